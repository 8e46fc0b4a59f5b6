"""Jobs about adapters that are merged into the weights of a frozen store, and taken out of them."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from frozen_models import (
    codes,
    config_of,
    decoded,
    evaluate,
    gathered,
    hugging_face_knows,
    plain,
    rounded,
    same,
    with_adapters,
)
from models import batches, build, llama, make_engine, train
from ranks import attempt
from running import loss_of, switch

from zeropp_fp8.zero.frozen.store import stored_weight


def as_trl_reads(model):
    """{name: weight} that TRL hands to a generation engine while a merged PEFT model is gathered."""
    weights = {}
    for name, param in model.named_parameters():
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if model.prefix in name or "original_module" in name:
            continue
        weights[name.replace("modules_to_save.default.", "")] = param.data.clone()
    return weights


def adapted_layers(model):
    """{name of its weight: PEFT layer}."""
    return {plain(n) + ".weight": m for n, m in model.named_modules() if hasattr(m, "base_layer")}


def merge_and_unmerge(fields, dtype="fp32", safe_merge=False, use_dora=False, overrides=None, **more):
    """Merging in one context and over two, and training that goes on as if nothing had been merged."""
    import deepspeed

    switch(True)
    config = config_of(fields, dtype, overrides=overrides, **more)

    def an_engine():
        model = build(llama, config, zero_init=True)
        with hugging_face_knows(config):  # DoRA reads the base weight
            model = with_adapters(model, use_dora=use_dora)
        return make_engine(model, config, lr=1e-2)

    undisturbed = an_engine()
    wanted = train(undisturbed, 2) + train(undisturbed, 2, seed=2)
    engine = an_engine()
    model, losses = engine.module, train(engine, 2)
    before, numbers, unmerged_loss = codes(model), decoded(model), evaluate(engine)
    log = {}

    with gathered(model):  # TRL: gather, merge, sync, unmerge
        layers = adapted_layers(model)
        log["shows what codes decode to"] = all(
            torch.equal(p, numbers[plain(n)]) for n, p in model.named_parameters() if stored_weight(p)
        )
        if not use_dora:
            merged = {n: numbers[n].float() + layer.get_delta_weight("default") for n, layer in layers.items()}
        model.merge_adapter(safe_merge=safe_merge)
        synced = as_trl_reads(model)
        model.unmerge_adapter()
    if not use_dora:
        close = {"fp32": 1e-6, "bf16": 2**-8}[dtype]
        log["merged"] = all(torch.allclose(synced[n].float(), merged[n], rtol=close, atol=1e-7) for n in merged)
    log["changed by merging"] = sorted(n for n in numbers if not torch.equal(synced[n], numbers[n]))
    log["after one context"] = same(before, codes(model)), evaluate(engine) == unmerged_loss

    for block in model.get_base_model().model.layers:  # a layer at a time
        with gathered(block):
            for layer in (m for m in block.modules() if hasattr(m, "merge")):
                layer.merge(safe_merge=safe_merge)
                layer.unmerge()
    for name, param in model.named_parameters():  # a parameter at a time
        with deepspeed.zero.GatheredParameters([param]):
            if stored_weight(param):
                log["parameter by parameter"] = log.get("parameter by parameter", True) and torch.equal(
                    param, numbers[plain(name)]
                )
    log["after layers"] = same(before, codes(model)), evaluate(engine) == unmerged_loss

    with gathered(model, modifier_rank=0):
        model.merge_adapter(safe_merge=safe_merge)
    log["codes changed"] = sorted(n for n, code in codes(model).items() if not torch.equal(code, before[n]))
    log["requantized"] = all(
        torch.equal(w, rounded(synced[n], fields)) for n, w in decoded(model).items() if n in layers
    )
    log["losses around"] = unmerged_loss, evaluate(engine)
    with gathered(model, modifier_rank=0):
        pass
    log["merged stays"] = evaluate(engine) == log["losses around"][1]
    with gathered(model, modifier_rank=0):
        model.unmerge_adapter()
    log["after two contexts"] = same(before, codes(model)), evaluate(engine) == unmerged_loss

    losses += train(engine, 2, seed=2)
    log["training goes on"] = losses == wanted, same(before, codes(model))
    return log


def merge_and_unload(fields, folder):
    """A merged model without adapters: saved inside the context, and kept in the store."""
    from transformers import AutoModelForCausalLM

    switch(True)
    config, log = config_of(fields), {}

    def an_engine():
        engine = make_engine(with_adapters(build(llama, config, zero_init=True)), config, lr=1e-2)
        train(engine, 2)
        return engine

    def plain_loss(model):
        tokens = next(batches(1, dist.get_rank(), seed=9))
        with torch.no_grad():
            return float(loss_of(model, tokens))

    engine = an_engine()
    before, numbers = codes(engine.module), decoded(engine.module)
    with gathered(engine.module):
        deltas = {n: layer.get_delta_weight("default") for n, layer in adapted_layers(engine.module).items()}
        merged = engine.module.merge_and_unload()
        if dist.get_rank() == 0:
            merged.save_pretrained(folder)
    log["codes stay"] = same(before, codes(merged))
    dist.barrier()
    saved = AutoModelForCausalLM.from_pretrained(folder)
    log["adapters left"] = [n for n, _ in merged.named_modules() if "lora" in n]
    log["saved"] = all(
        torch.allclose(saved.get_parameter(n), numbers[n] + deltas.get(n, 0), rtol=1e-6, atol=1e-7) for n in numbers
    )

    engine = an_engine()
    with gathered(engine.module, modifier_rank=0):
        merged = engine.module.merge_and_unload()
    for name in deltas:
        weight = saved.get_parameter(name)
        weight.data = rounded(weight.data, fields)
    log["goes on evaluating"] = plain_loss(saved), evaluate(engine)
    kept = codes(merged)

    def copies():
        return sum(stored_weight(p).before_merge is not None for p in merged.parameters() if stored_weight(p))

    log["copies left"] = copies()
    gc.collect()  # PEFT's layers are gone by now
    with gathered(merged, modifier_rank=0):
        pass
    log["nothing comes back"] = same(kept, codes(merged)) and evaluate(engine) == log["goes on evaluating"][1]

    engine = an_engine()
    with gathered(engine.module, modifier_rank=0):
        engine.module.merge_adapter()
    kept = codes(engine.module)
    with gathered(engine.module, modifier_rank=0):
        merged = engine.module.merge_and_unload()
    log["merged before"] = same(kept, codes(merged)), copies(), evaluate(engine) == log["goes on evaluating"][1]
    return log


def merges_that_do_not_reach_the_codes(fields, overrides=None):
    """Merging on one rank only; merging and unmerging in contexts without modifier_rank; and putting it right."""
    switch(True)
    config = config_of(fields, overrides=overrides)
    engine = make_engine(with_adapters(build(llama, config, zero_init=True)), config, lr=1e-2)
    model, log = engine.module, {}
    before, loss = codes(model), evaluate(engine)

    def as_before():
        return same(before, codes(model)), evaluate(engine) == loss

    with gathered(model):
        model.merge_adapter()
    log["merged for nothing"] = attempt(lambda: evaluate(engine))
    with gathered(model):
        model.unmerge_adapter()
    log["unmerged in a context like it"] = as_before()

    with gathered(model, modifier_rank=0):
        model.merge_adapter()
    with gathered(model):
        model.unmerge_adapter()
    log["unmerged for nothing"] = attempt(lambda: evaluate(engine))
    with gathered(model, modifier_rank=0):
        pass
    log["taken out"] = as_before()

    def merge_on_one_rank():
        with gathered(model, modifier_rank=0):
            if dist.get_rank() == 0:
                model.merge_adapter()

    log["merged on one rank"] = attempt(merge_on_one_rank)
    if dist.get_rank() == 0:
        for layer in adapted_layers(model).values():
            layer.merged_adapters.clear()
    log["nothing merged"] = as_before()
    return log
