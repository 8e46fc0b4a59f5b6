"""Jobs with engines over one model that cannot be made: what they leave, and what goes on beside them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import weakref
from unittest import mock

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.zero import parameter_offload
from models import batches, llama
from recipes import section_of
from running import Spec, evaluate, evaluated, run, step, stepped, switch

from zeropp_fp8 import sharded
from zeropp_fp8.compute.products import LinearPrecision

# What DeepSpeed leaves on modules for good, of an engine that was destroyed too.
FOR_GOOD = {
    "ds_id",
    "ds_recompute_parameters",
    "_external_params",
    "ds_external_parameters",
    "all_parameters",
    "_parameters",
    "_original_parameters",
    "ds_inflight_param_registry",
    "ds_grads_remaining",
    "training",
}
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
ON_PARAMETERS = (
    sharded.SLOT,
    "_z3_optimizer",
    "ds_z3_leaf_module",
    "ds_persist",
    "all_gather",
    "all_gather_coalesced",
    "partition",
)

# Where a constructor fails: (module, class or "", name, at which call, whether what it does is done before).
FAILURES = {
    "half of the modules have hooks": (
        "deepspeed.runtime.zero.parameter_offload",
        "DeepSpeedZeRoOffload",
        "_register_deepspeed_module",
        3,
        False,
    ),
    "hooks are on": ("zeropp_fp8.zero.offload", "", "leave_untraced", 1, False),
    "parameters are taken over": ("zeropp_fp8.zero.offload", "", "UnitCoordinator", 1, False),
    "what an engine had": ("zeropp_fp8.zero.gather.gatherer", "", "slice_numel", 1, False),
    "placed": ("zeropp_fp8.zero.gather.storage", "Storage", "attach", 1, False),
    "half taken over": ("zeropp_fp8.zero.gather.gatherer", "", "slice_numel", 5, False),
    "states": ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", "_setup_for_real_optimizer", 1, False),
    "half of the gradients have hooks": ("deepspeed.runtime.zero.stage3", "", "register_grad_hook", 5, False),
    "the stage is made": (
        "deepspeed.runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        "_link_all_hp_params",
        1,
        True,
    ),
    "the table": ("zeropp_fp8.zero.offload", "", "print_start_table", 1, True),
    "the scheduler": ("deepspeed.runtime.engine", "DeepSpeedEngine", "_configure_lr_scheduler", 1, False),
    "the timers": ("deepspeed.runtime.engine", "", "EngineTimers", 1, False),
}
COMPUTE = {"format": "fp8", "min_features": 16, "skip_modules": ["lm_head"]}
OF_TRAINING = {"states", "half of the gradients have hooks", "the stage is made", "the scheduler"}


class Late(Exception):
    """Raised by a constructor."""


@contextlib.contextmanager
def failing(where):
    """A constructor fails there."""
    module, owner, name, call, after = FAILURES[where]
    target = importlib.import_module(module)
    target = getattr(target, owner) if owner else target
    stock, calls = getattr(target, name), []

    def fails(*args, **kwargs):
        calls.append(1)
        if len(calls) != call:
            return stock(*args, **kwargs)
        if after:
            stock(*args, **kwargs)
        raise Late(where)

    with mock.patch.object(target, name, fails):
        yield
    assert len(calls) >= call, f"{where} did not occur"


def on_model(model):
    """All that engines put on a model: hooks in their order, attributes, and the model on DeepSpeed's stack."""
    found = {}
    for name, module in model.named_modules():
        found[name, "class"] = type(module).__name__
        for hooks in HOOKS:
            found[name, hooks] = [id(hook) for hook in getattr(module, hooks).values()]
        for key, value in module.__dict__.items():
            if key not in FOR_GOOD and not key.startswith(("_forward", "_backward", "_modules", "_buffers")):
                known = isinstance(value, (bool, int, str, type(None)))
                found[name, key] = value if known else len(value) if isinstance(value, list) else id(value)
    for name, param in model.named_parameters():
        for key in ON_PARAMETERS:
            # What has ended is referred to by a proxy.
            if key in param.__dict__ and type(param.__dict__[key]) is not weakref.ProxyType:
                value = param.__dict__[key]
                # Closures are made anew when parameters are given back.
                said = value if isinstance(value, bool) else getattr(value, "__qualname__", id(value))
                found[name, key] = id(getattr(value.wire, "owner", None)) if key == sharded.SLOT else said
        found[name, "gradient hooks"] = [id(hook) for hook in (param._post_accumulate_grad_hooks or {}).values()]
        found[name, "requires_grad"] = param.requires_grad
    found["stack"] = [id(module) for module in parameter_offload.FWD_MODULE_STACK]
    return found


def differing(before, after):
    """Return what two of them disagree about, with how much there is of it."""
    missing = object()
    keys = {key for key in (*before, *after) if before.get(key, missing) != after.get(key, missing)}
    return sorted(f"{key}: {before.get(key)} -> {after.get(key)}" for key in keys)


def spec_of(kind, granularity, persistent=0, trains=True, **fields):
    if kind == "whole tensors":
        kind, fields = "zeropp", {**fields, "partition": "whole_tensor"}
    zero = {"stage3_param_persistence_threshold": persistent}
    chosen = section_of(kind, gather_granularity=granularity, **fields)
    return Spec(chosen, config={"zero_optimization": zero}, optimizer="adamw" if trains else None)


def fails_to_be_made(spec, model, where):
    """Whether an engine fails there."""
    try:
        with failing(where):
            spec.engine(model)
    except Late:
        return True
    return False


def beside_failures(kind, granularities):
    """{(granularities, trains, where): what a failed engine leaves, and losses beside it; of "alone": losses}.

    Engines that train and others fail at every place, with one of the granularities each, in turn.
    """
    tokens, found = list(batches(6, dist.get_rank())), {}
    alone = [*[step] * 4, evaluate(tokens[5])]
    losses = {first: run(spec_of(kind, first), alone, data=tokens).losses for first in dict(granularities)}
    found.update({(first, second, "alone"): losses[first] for first, second in granularities})
    cases = [(trains, where) for trains in (True, False) for where in FAILURES if trains or where not in OF_TRAINING]
    for (trains, where), (first, second) in zip(cases, itertools.cycle(granularities)):
        its = spec_of(kind, second, 100, trains, compute=COMPUTE if first == "module" else {})
        found[first, second, trains, where] = beside_a_failure(spec_of(kind, first), its, where, tokens)
    return found


def beside_a_failure(spec, its, where, tokens):
    engine = spec.engine()
    model, losses = engine.module, [stepped(engine, tokens[0])]
    before = on_model(model)
    failed = fails_to_be_made(its, model, where)
    left = differing(before, on_model(model))
    losses.append(stepped(engine, tokens[1]))
    gc.collect()  # what has failed is collected
    left += differing(before, on_model(model))
    losses.append(stepped(engine, tokens[2]))
    again = its.engine(model)
    evaluated(again, tokens[5])
    again.destroy()
    left += differing(before, on_model(model))
    losses += [stepped(engine, tokens[3]), evaluated(engine, tokens[5])]
    engine.destroy()
    return failed, left, losses


def parts_alive():
    """How many engines, and large parts of them, there are."""
    gc.collect()
    of_engines = (deepspeed.DeepSpeedEngine, parameter_offload.DeepSpeedZeRoOffload, ZeROOptimizer)
    return sum(issubclass(type(found), of_engines) for found in gc.get_objects())


def without_another(kind):
    """{(where, whether an engine was there before): what a failed engine leaves, parts of it, losses of the next}."""
    switch(True)
    tokens, found = list(batches(2, dist.get_rank())), {}
    spec = spec_of(kind, "block")
    for where in (None, *FAILURES):
        for had_one in (False, True):
            model = llama()
            if had_one:
                spec.engine(model).destroy()
            before, alive = on_model(model), parts_alive()
            failed = where is None or fails_to_be_made(spec, model, where)
            parts = parts_alive() - alive
            left = differing(before, on_model(model))
            if not had_one:  # what DeepSpeed makes a parameter with is there for good
                left = [line for line in left if not any(f"'{key}'" in line for key in ON_PARAMETERS)]
            engine = spec_of(kind, "module").engine(model)
            found[where, had_one] = failed, left, parts, [stepped(engine, batch) for batch in tokens]
            engine.destroy()
    return found


def converted_again():
    """Layers in low precision, after an engine has failed, after the next was made, and after the first is collected.

    And whether exchanges of activations had hooks then.
    """
    switch(True)
    model, found = llama(), []
    spec = spec_of("zeropp", "block", compute=COMPUTE)

    def count():
        found.append(sum(isinstance(getattr(m, "precision", None), LinearPrecision) for m in model.modules()))

    assert fails_to_be_made(spec, model, "the scheduler")
    count()
    engine = spec.engine(model)
    count()
    gc.collect()
    count()
    engine.destroy()
    count()
    return found


def failed_on_a_rank(kind):
    """Return what an engine leaves that fails on rank 1 alone, and losses of the earlier one, alone and after it."""
    tokens, found, left = list(batches(3, dist.get_rank())), [], []
    for beside in (False, True):
        engine = spec_of(kind, "block").engine()
        losses = [stepped(engine, tokens[0])]
        if beside:
            before, its = on_model(engine.module), spec_of(kind, "module")
            if dist.get_rank() == 1:
                assert fails_to_be_made(its, engine.module, "the timers")
            else:
                its.engine(engine.module).destroy()
            left = differing(before, on_model(engine.module))
        losses += [stepped(engine, tokens[1]), evaluated(engine, tokens[2])]
        engine.destroy()
        found.append(losses)
    return left, found


def owners_half_placed():
    """{call: (whether an engine failed in it, what that left, losses beside it)} of handing parts to owners, by an
    engine over one with owners, too; of None: losses alone."""
    tokens, found = list(batches(4, dist.get_rank())), {}
    spec = spec_of("whole tensors", "block")
    owners = "zeropp_fp8.zero.owners.placement", "Owners", "own_part"
    given_up = "zeropp_fp8.zero.owners.unit", "", "slice_of_rank"
    calls = {f"{place[2]}, {call}": (*place, call, False) for place in (owners, given_up) for call in (1, 5, 20)}
    with mock.patch.dict(FAILURES, calls):
        for where in (None, *calls, "the timers"):
            engine = spec.engine()
            losses, before = [stepped(engine, tokens[0])], on_model(engine.module)
            failed = where is not None and fails_to_be_made(spec, engine.module, where)
            left = differing(before, on_model(engine.module))
            losses += [stepped(engine, tokens[1]), evaluated(engine, tokens[2])]
            engine.destroy()
            found[where] = failed, left, losses
    return found


def owners_failed_on_a_rank():
    """Whether rank 1, which alone fails with whole tensors, is told at once: the others go on somewhere else."""
    tokens = next(batches(1, dist.get_rank()))
    spec = spec_of("whole tensors", "block")
    engine = spec.engine()
    stepped(engine, tokens)
    if dist.get_rank() == 1:
        return fails_to_be_made(spec, engine.module, "the timers")
    spec.engine(engine.module)
    return None


def stored_weights():
    """Return what failures leave of an engine with stored weights, and its losses before, beside and after them."""
    switch(True)
    tokens = next(batches(1, dist.get_rank()))
    codes = {"modules": "all-linear", "format": "int8", "block_size": 32}
    spec, model = spec_of("zeropp", "block", trains=False, frozen=codes), llama()
    failed = fails_to_be_made(spec, model, "the timers")
    engine = spec.engine(model)
    losses, before, left = [evaluated(engine, tokens)], on_model(model), []
    for where in sorted(FAILURES.keys() - OF_TRAINING):
        failed = fails_to_be_made(spec, model, where) and failed
        left += differing(before, on_model(model))
        losses.append(evaluated(engine, tokens))
    losses.append(evaluated(spec.engine(model), tokens))
    return failed, left, losses
