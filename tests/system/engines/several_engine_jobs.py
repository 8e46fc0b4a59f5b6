"""Jobs with two engines whose parameters are gathered and changed in one context."""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from freezing_jobs import exact_loss
from models import batches, full_weights, llama
from recipes import section_of
from running import Spec, backward, evaluated, forward, run, see, trained, update, within

from zeropp_fp8.config import ConfigError

OVER_ONE_MODEL = ("lossless", "zeropp", "zeropp, rank's copy", "zeropp-exact", "whole tensors", "FP8 states")


def _spec(kind, seed=0, trains=True):
    """`kind`: one of recipes.WAYS, "whole tensors", "stock", or "stored" for linear weights that rest as INT8 codes."""
    if kind == "stock":
        section = None
    elif kind == "whole tensors":
        section = section_of("zeropp", partition="whole_tensor")
    elif kind == "stored":
        section = section_of("zeropp", frozen={"modules": "all-linear", "format": "int8", "block_size": 32})
    else:
        section = section_of(kind)
    return Spec(section, model=functools.partial(llama, seed=seed), optimizer="adamw" if trains else None)


def follow(first, second, first_follows):
    """One of two engines trains, the other takes over twice its weights; {what: numbers}."""
    import deepspeed

    tokens = list(batches(2, dist.get_rank()))  # the first step records the order of modules, the second uses it
    engines = [_spec(first, 0, not first_follows).engine(), _spec(second, 1, first_follows).engine()]
    target, source = engines if first_follows else reversed(engines)
    trained(source, tokens)
    before, source_loss = evaluated(target, tokens[0]), evaluated(source, tokens[0])
    weights = full_weights(source.module)
    pairs = list(zip(target.module.parameters(), source.module.parameters()))
    with deepspeed.zero.GatheredParameters([p for pair in pairs for p in pair], modifier_rank=0):
        if dist.get_rank() == 0:
            for mine, theirs in pairs:
                mine.data.mul_(0.0).add_(theirs.data, alpha=2.0)
    held = full_weights(target.module)
    return {
        "errors": [((held[name] - 2 * w).norm() / (2 * w).norm()).item() for name, w in weights.items()],
        "before": before,
        "computed": evaluated(target, tokens[0]),
        "exact": exact_loss(target, tokens[0]),
        "source": (source_loss, evaluated(source, tokens[0])),
        "source's weights": all(torch.equal(w, weights[name]) for name, w in full_weights(source.module).items()),
    }


def follow_all(pairs):
    """`follow` for each pair of kinds, the follower made first and made second."""
    return {(a, b, first): follow(a, b, first) for a, b in pairs for first in (True, False)}


def follow_stored(kind):
    """`follow` by a model whose linear weights rest as codes, made first and made second."""
    return {first: follow(*(("stored", kind) if first else (kind, "stored")), first) for first in (True, False)}


def _over(kind, model, trains):
    return _spec(kind, trains=trains).engine(model)


def over_one_model(kind):
    """{who was made when: (losses of training, losses of evaluation by the engine that trains, and by the other)}."""
    tokens, made = list(batches(5, dist.get_rank())), functools.partial(_over, kind)
    found = {}

    trains = made(llama(), True)
    before = evaluated(trains, tokens[4])
    losses = trained(trains, tokens[:2])
    between = evaluated(trains, tokens[4])
    losses += trained(trains, tokens[2:4])
    own = [before, between, evaluated(trains, tokens[4])]
    found["alone"] = losses, own, own
    trains.destroy()

    model = llama()
    evaluates = made(model, False)
    others = [evaluated(evaluates, tokens[4])]
    trains = made(model, True)
    own = [evaluated(trains, tokens[4])]
    losses = trained(trains, tokens[:2])
    others.append(evaluated(evaluates, tokens[4]))
    own.append(evaluated(trains, tokens[4]))
    losses += trained(trains, tokens[2:4])
    own.append(evaluated(trains, tokens[4]))
    trains.destroy()
    others.append(evaluated(evaluates, tokens[4]))
    found["evaluates first"] = losses, own, others
    evaluates.destroy()

    model = llama()
    trains = made(model, True)
    own = [evaluated(trains, tokens[4])]
    losses = trained(trains, tokens[:2])
    evaluates = made(model, False)
    others = [own[0], evaluated(evaluates, tokens[4])]
    own.append(evaluated(trains, tokens[4]))
    losses += trained(trains, tokens[2:4])
    others.append(evaluated(evaluates, tokens[4]))
    own.append(evaluated(trains, tokens[4]))
    found["trains first"] = losses, own, others
    return found


def before_a_later_one(first, later, destroyed):
    """Losses of an engine that trains alone, and beside one that is made later and evaluates; or all that it raises."""
    tokens, found = list(batches(5, dist.get_rank())), {}
    for name in ("alone", "beside"):
        model = llama()
        trains = _over(first, model, True)
        losses = trained(trains, tokens[:2])
        if name == "beside":
            evaluates = _over(later, model, False)
            evaluated(evaluates, tokens[4])
            if destroyed:
                evaluates.destroy()
        try:
            found[name] = losses + trained(trains, tokens[2:4]) + [evaluated(trains, tokens[4])]
        except RuntimeError as error:
            found[name] = [str(error)]
            for action in (trains.save_checkpoint, trains.load_checkpoint):
                with tempfile.TemporaryDirectory() as folder, pytest.raises(RuntimeError) as raised:
                    action(folder, tag="none")
                found[name].append(str(raised.value))
    return found


def before_later_ones(pairs, destroyed):
    """`before_a_later_one` of pairs."""
    return {pair: before_a_later_one(*pair, destroyed) for pair in pairs}


# What stays gathered: small parameters between steps, and all of them from one pass to the next.
KEPT = {
    "small ones": {"stage3_param_persistence_threshold": 100},
    "all": {"stage3_max_reuse_distance": 10**9, "stage3_max_live_parameters": 10**9},
}


def keeping_weights_gathered(kinds):
    """{(kind, what stays): training alone, and beside a later engine that evaluates before each step}."""
    tokens = list(batches(4, dist.get_rank()))

    @contextlib.contextmanager
    def a_later_one(spec, engine):
        later.append(replace(spec, optimizer=None).engine(engine.module))
        yield
        later.pop().destroy()

    def look(engine):
        evaluates = later[0] if later else engine
        return evaluated(evaluates, tokens[3]), evaluates.optimizer.gatherer.live_numel >= 0

    later, steps, found = [], [forward, backward, see(look), update] * 3, {}
    for kind, (name, kept) in itertools.product(kinds, KEPT.items()):
        spec = Spec(section_of(kind), config={"zero_optimization": kept})
        beside = within(functools.partial(a_later_one, spec), *steps)
        found[kind, name] = [run(spec, events, data=tokens) for events in (steps, [beside])]
    return found


def over_one_model_each(kinds):
    """`over_one_model` of kinds."""
    return {kind: over_one_model(kind) for kind in kinds}


def across_engines():
    """Return what is said of a module of one engine that has a parameter of another among its own."""
    import deepspeed

    first, second = _spec("zeropp").engine(), _spec("zeropp", 1, trains=False).engine()
    theirs = second.module.lm_head.weight
    deepspeed.zero.register_external_parameter(first.module.lm_head, theirs)
    try:
        trained(first, batches(1, dist.get_rank()))
    except RuntimeError as error:
        return str(error)


def master_weights():
    """Return the words about unrounded master weights while a later engine has weights; whether they are back."""
    from deepspeed.utils import safe_get_full_fp32_param

    model = llama()
    first = _over("FP8 states", model, True)
    param = model.lm_head.weight
    expected = safe_get_full_fp32_param(param).clone()
    later = _over("whole tensors", model, False)
    with pytest.raises(RuntimeError) as raised:
        safe_get_full_fp32_param(param)
    later.destroy()
    found = str(raised.value), torch.equal(safe_get_full_fp32_param(param), expected)
    first.destroy()
    return found


def refused():
    """Return the refusals of later engines; losses of the earlier one beside them, and of one left alone."""
    stored = Spec(section_of("zeropp", frozen={"format": "int8", "block_size": 32}), optimizer=None)
    said, losses = [], []
    for beside in (False, True):
        engine = _spec("zeropp").engine()
        model = engine.module
        over = ((model.model.layers[0].mlp, _spec("zeropp", trains=False)), (model, stored)) if beside else ()
        for part, spec in over:
            try:
                spec.engine(part)
            except ConfigError as error:
                said.append(str(error))
        losses.append(trained(engine, batches(2, dist.get_rank())))
    return said, losses


def generating():
    """Return what is said of a generation in an engine whose model a later one has, and after that has ended."""
    import zeropp_fp8

    model, said = llama(), []
    engine, later = _over("zeropp", model, True), _over("zeropp", model, False)
    for end in (False, True):
        if end:
            later.destroy()
        try:
            with zeropp_fp8.generation(engine, weights="values") as there, torch.no_grad():
                there(input_ids=torch.arange(8)[None])
            said.append("done")
        except RuntimeError as error:
            said.append(str(error))
    return said
