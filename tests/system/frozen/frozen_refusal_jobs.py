"""Jobs about what a frozen store refuses: weights that are trained or written, and engines that do not fit."""

from __future__ import annotations

import torch
import torch.distributed as dist
from frozen_models import codes, config_of, decoded, evaluate, gathered, rounded, same, with_adapters
from models import build, ds_config, llama, make_engine, train
from ranks import attempt
from running import switch


def bad_input(fields, overrides=None, **more):
    """Return what is said, and that nothing is lost once it is put right."""
    switch(True)
    config = config_of(fields, overrides=overrides, **more)
    engine = make_engine(with_adapters(build(llama, config, zero_init=True)), config, lr=1e-2)
    model = engine.module
    train(engine, 1)
    before, loss, log = codes(model), evaluate(engine), {}
    key = model.get_base_model().model.layers[1].self_attn.k_proj

    def double():
        with torch.no_grad():
            key.weight.mul_(2)

    def double_in_context():
        with gathered(model):
            double()

    def as_before():
        return same(before, codes(model)), evaluate(engine) == loss

    key.weight.requires_grad_(True)
    log["trained"] = attempt(lambda: train(engine, 1)), attempt(lambda: evaluate(engine))
    key.weight.requires_grad_(False)
    log["frozen again"] = as_before()

    double()
    log["written"] = (attempt(lambda: evaluate(engine)),)
    log["written once"] = as_before()
    log["written in a context"] = (attempt(double_in_context),)
    log["context over"] = as_before()

    hook = key.register_forward_hook(lambda *_: double())
    # Where a unit stays gathered until its next use, it is that use that finds what was written.
    log["written while it runs"] = (attempt(lambda: [evaluate(engine) for _ in range(2)]),)
    hook.remove()
    log["hook removed"] = as_before()

    with gathered(model, modifier_rank=0):
        pass
    log["nothing written"] = as_before()
    doubled = decoded(model)["model.layers.1.self_attn.k_proj.weight"] * 2
    with gathered(model, modifier_rank=0), torch.no_grad():
        key.weight.mul_(2) if dist.get_rank() == 0 else key.weight.zero_()  # what rank 0 wrote counts
    log["one written"] = [n for n, code in codes(model).items() if not torch.equal(code, before[n])]
    log["requantized"] = torch.equal(decoded(model)[log["one written"][0]], rounded(doubled, fields))
    partly = decoded(model)[log["one written"][0]]
    partly[:8] = 0.5
    with gathered(model, modifier_rank=0), torch.no_grad():
        key.weight[:8] = 0.5
    log["a part written"] = torch.equal(decoded(model)[log["one written"][0]], rounded(partly, fields))
    log["goes on"] = len(train(engine, 1))
    return log


def refused_engines(fields, other):
    """Engines that do not go with what a model was made with, and one that does."""
    switch(True)
    config, log = config_of(fields), {}
    model = build(llama, config, zero_init=True)
    before = codes(model)
    log["trained"] = attempt(lambda: make_engine(model, config))
    with_adapters(model)
    log["other format"] = attempt(lambda: make_engine(model, config_of(other)))
    log["no format"] = attempt(lambda: make_engine(model, config_of({"format": "none"})))
    log["stock"] = attempt(lambda: make_engine(model, ds_config()))
    named = {**fields, "modules": ["v_proj"]}
    log["trained by name"] = attempt(lambda: make_engine(llama(), config_of(named)))
    nothing = config_of({**fields, "modules": ["q_porj", "lm_head"]})
    log["names nothing"] = [
        attempt(lambda given=given: make_engine(with_adapters(build(llama, nothing, zero_init=given)), nothing))
        for given in (False, True)
    ]
    kept = same(before, codes(model))
    model = with_adapters(build(llama, config, zero_init=True))
    engine = make_engine(model, config, lr=0.0)
    losses, before = train(engine, 2), codes(model)
    engine.destroy()
    log["after all"] = kept, losses == train(make_engine(model, config, lr=0.0), 2), same(before, codes(model))

    trained = build(llama, config_of({**fields, "modules": "frozen"}), zero_init=True)
    engine = make_engine(trained, config_of({**fields, "modules": "frozen"}))
    log["stored of a trained model"] = len(codes(trained)), len(train(engine, 1))
    trained = build(llama, config_of({**fields, "skip_modules": ["*"]}), zero_init=True)
    log["stored of a skipped model"] = len(codes(trained))
    skipping = config_of({**fields, "skip_modules": ["*"]})
    log["nothing to store"] = [
        attempt(lambda: make_engine(llama(), config)),
        attempt(lambda: make_engine(with_adapters(llama()), skipping)),
    ]
    log["stored for evaluation"] = len(codes(make_engine(llama(), config, optimizer=None).module))
    return log
