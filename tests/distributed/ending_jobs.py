"""Jobs with engines over one model that cannot be made, are destroyed in any order, or are dropped."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import random
import time
import weakref
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.zero import parameter_offload
from deepspeed.utils import get_z3_leaf_modules, set_z3_leaf_modules
from models import batches, ds_config, llama, make_engine
from parity_jobs import switch
from recipes import section_of

from zeropp_fp8.comm import failures
from zeropp_fp8.compute.products import LinearPrecision
from zeropp_fp8.handover import WeightSource
from zeropp_fp8.zero.gather.adopted import STATE

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
    STATE,
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
    "placed": ("zeropp_fp8.zero.gather.kinds", "Kind", "adopt", 1, False),
    "half taken over": ("zeropp_fp8.zero.gather.gatherer", "", "outsized_units", 1, False),
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
    """What a constructor raises."""


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
                found[name, key] = id(value.owner) if key == STATE else said
        found[name, "gradient hooks"] = [id(hook) for hook in (param._post_accumulate_grad_hooks or {}).values()]
        found[name, "requires_grad"] = param.requires_grad
    found["stack"] = [id(module) for module in parameter_offload.FWD_MODULE_STACK]
    return found


def differing(before, after):
    """What two of them disagree about, with how much there is of it."""
    missing = object()
    keys = {key for key in (*before, *after) if before.get(key, missing) != after.get(key, missing)}
    return sorted(f"{key}: {before.get(key)} -> {after.get(key)}" for key in keys)


def config_of(kind, granularity, persistent=0, **fields):
    if kind == "whole tensors":
        kind, fields = "zeropp", {**fields, "partition": "whole_tensor"}
    zero = {"stage3_param_persistence_threshold": persistent}
    return ds_config(section_of(kind, gather_granularity=granularity, **fields), zero_optimization=zero)


def step(engine, tokens):
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    return loss.item()


def evaluated(engine, tokens):
    with torch.no_grad():
        return engine(input_ids=tokens, labels=tokens).loss.item()


def fails_to_be_made(model, config, where, trains):
    """Whether an engine fails there."""
    try:
        with failing(where):
            make_engine(model, config, optimizer="adamw" if trains else None)
    except Late:
        return True
    return False


def beside_failures(kind, granularities):
    """{(granularities, trains, where): what a failed engine leaves, and losses beside it; of "alone": losses}.

    Engines that train and others fail at every place, with one of the granularities each, in turn.
    """
    switch(True)
    tokens, found = list(batches(6, dist.get_rank())), {}
    for first, second in granularities:
        engine = make_engine(llama(), config_of(kind, first))
        alone = [step(engine, batch) for batch in tokens[:4]]
        alone.append(evaluated(engine, tokens[5]))
        engine.destroy()
        found[first, second, "alone"] = alone
    cases = [(trains, where) for trains in (True, False) for where in FAILURES if trains or where not in OF_TRAINING]
    for (trains, where), (first, second) in zip(cases, itertools.cycle(granularities)):
        its_config = config_of(kind, second, persistent=100, compute=COMPUTE if first == "module" else {})
        beside = beside_a_failure(config_of(kind, first), its_config, where, trains, tokens)
        found[first, second, trains, where] = beside
    return found


def beside_a_failure(config, its_config, where, trains, tokens):
    model = llama()
    engine = make_engine(model, config)
    losses = [step(engine, tokens[0])]
    before = on_model(model)
    failed = fails_to_be_made(model, its_config, where, trains)
    left = differing(before, on_model(model))
    losses.append(step(engine, tokens[1]))
    gc.collect()  # what has failed is collected
    left += differing(before, on_model(model))
    losses.append(step(engine, tokens[2]))
    again = make_engine(model, its_config, optimizer="adamw" if trains else None)
    evaluated(again, tokens[5])
    again.destroy()
    left += differing(before, on_model(model))
    losses += [step(engine, tokens[3]), evaluated(engine, tokens[5])]
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
    config = config_of(kind, "block")
    for where in (None, *FAILURES):
        for had_one in (False, True):
            model = llama()
            if had_one:
                make_engine(model, config).destroy()
            before, alive = on_model(model), parts_alive()
            failed = where is None or fails_to_be_made(model, config, where, trains=True)
            parts = parts_alive() - alive
            left = differing(before, on_model(model))
            if not had_one:  # what DeepSpeed makes a parameter with is there for good
                left = [line for line in left if not any(f"'{key}'" in line for key in ON_PARAMETERS)]
            engine = make_engine(model, config_of(kind, "module"))
            found[where, had_one] = failed, left, parts, [step(engine, batch) for batch in tokens]
            engine.destroy()
    return found


def converted_again():
    """Layers in low precision, after an engine has failed, after the next was made, and after the first is collected.

    And whether exchanges of activations had hooks then.
    """
    switch(True)
    model, found = llama(), []
    config = config_of("zeropp", "block", compute=COMPUTE)

    def count():
        found.append(sum(isinstance(getattr(m, "precision", None), LinearPrecision) for m in model.modules()))

    assert fails_to_be_made(model, config, "the scheduler", trains=True)
    count()
    engine = make_engine(model, config)
    count()
    gc.collect()
    count()
    engine.destroy()
    count()
    return found


def hooks_again():
    """Losses of an engine whose hooks were taken off and put on again, as TRL does, beside a later one, and alone."""
    switch(True)
    tokens, found = list(batches(3, dist.get_rank())), []
    for beside in (False, True):
        engine = make_engine(llama(), config_of("zeropp", "block"))
        offload = engine.optimizer.parameter_offload
        for hook in (*offload.forward_hooks, *offload.backward_hooks):
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        offload._register_deepspeed_module(offload.module)
        losses = [step(engine, tokens[0])]
        later = make_engine(engine.module, config_of("zeropp", "block"), optimizer=None) if beside else engine
        losses += [evaluated(later, tokens[2]), step(engine, tokens[1])]
        if beside:
            later.destroy()
        losses.append(evaluated(engine, tokens[2]))
        engine.destroy()
        found.append(losses)
    return found


def failed_on_a_rank(kind):
    """What an engine that fails on rank 1 alone leaves there, and losses of the earlier one, alone and after it."""
    switch(True)
    tokens, found, left = list(batches(3, dist.get_rank())), [], []
    for beside in (False, True):
        engine = make_engine(llama(), config_of(kind, "block"))
        losses = [step(engine, tokens[0])]
        if beside:
            before, config = on_model(engine.module), config_of(kind, "module")
            if dist.get_rank() == 1:
                assert fails_to_be_made(engine.module, config, "the timers", trains=True)
            else:
                make_engine(engine.module, config).destroy()
            left = differing(before, on_model(engine.module))
        losses += [step(engine, tokens[1]), evaluated(engine, tokens[2])]
        engine.destroy()
        found.append(losses)
    return left, found


def owners_half_placed():
    """{call: (whether an engine failed in it, what that left, losses beside it)} of handing parts to owners, by an
    engine over one with owners, too; of None: losses alone."""
    switch(True)
    tokens, found = list(batches(4, dist.get_rank())), {}
    config = config_of("whole tensors", "block")
    owners = "zeropp_fp8.zero.owners.placement", "Owners", "own_part"
    given_up = "zeropp_fp8.zero.owners.unit", "", "slice_of_rank"
    calls = {f"{place[2]}, {call}": (*place, call, False) for place in (owners, given_up) for call in (1, 5, 20)}
    with mock.patch.dict(FAILURES, calls):
        for where in (None, *calls):
            engine = make_engine(llama(), config)
            losses, before = [step(engine, tokens[0])], on_model(engine.module)
            failed = where is not None and fails_to_be_made(engine.module, config, where, trains=True)
            left = differing(before, on_model(engine.module))
            losses += [step(engine, tokens[1]), evaluated(engine, tokens[2])]
            engine.destroy()
            found[where] = failed, left, losses
    return found


def owners_failed_on_a_rank():
    """Seconds until rank 1, which alone fails with whole tensors, is told; the others go on waiting somewhere else."""
    switch(True)
    tokens = next(batches(1, dist.get_rank()))
    engine = make_engine(llama(), config_of("whole tensors", "block"))
    step(engine, tokens)
    began, failures.WAIT_S = time.monotonic(), 1.0
    if dist.get_rank() == 1:
        assert fails_to_be_made(engine.module, config_of("whole tensors", "block"), "the timers", trains=True)
    else:
        make_engine(engine.module, config_of("whole tensors", "block"))
    return time.monotonic() - began


def all_fail(apart):
    """What ranks find out who fail `apart` seconds one after the other; and whether nobody is expected who has not."""
    failures.WAIT_S = 1.5
    time.sleep(apart * dist.get_rank())
    together = failures.all_have_failed(1, None)
    dist.barrier()
    alone = dist.get_rank() == 0 and failures.all_have_failed(2, None)
    return together, alone


def stored_weights():
    """What failures leave of an engine whose weights rest as codes, and its losses before, beside and after them."""
    switch(True)
    tokens = next(batches(1, dist.get_rank()))
    config = config_of("zeropp", "block", frozen={"modules": "all-linear", "format": "int8", "block_size": 32})
    model = llama()
    failed = fails_to_be_made(model, config, "the timers", trains=False)
    engine = make_engine(model, config, optimizer=None)
    losses, before, left = [evaluated(engine, tokens)], on_model(model), []
    for where in sorted(FAILURES.keys() - OF_TRAINING):
        failed = fails_to_be_made(model, config, where, trains=False) and failed
        left += differing(before, on_model(model))
        losses.append(evaluated(engine, tokens))
    later = make_engine(model, config, optimizer=None)
    losses.append(evaluated(later, tokens))
    return failed, left, losses


def compiled_in_turn():
    """Whether each block's forward is its own again, for two engines that compile them and end in either order."""
    switch(True)
    found, config = {}, config_of("zeropp", "block", compile="blocks")
    for first_ends_first in (True, False):
        model = llama()
        wrapped = model.model.layers[1].forward
        model.model.layers[1].forward = lambda *args, wrapped=wrapped, **kwargs: wrapped(*args, **kwargs)
        before = [layer.__dict__.get("forward") for layer in model.model.layers]
        engines = [make_engine(model, config, optimizer=None) for _ in range(2)]
        compiled = [layer.__dict__["forward"] for layer in model.model.layers]
        for engine in engines if first_ends_first else reversed(engines):
            engine.destroy()
        after = [layer.__dict__.get("forward") for layer in model.model.layers]
        found[first_ends_first] = after == before, all(a is not b for a, b in zip(before, compiled))
    return found


def units_gathered(granularities):
    """{granularities: units, modules with hooks and leaves of two engines; of the first again; leaves at last}."""
    switch(True)
    found = {}

    def seen(engine):
        hooked = sum("pre_bwd_fn" in module.__dict__ for module in engine.module.modules())
        leaves = [type(module).__name__ for module in get_z3_leaf_modules(engine.module)]
        marked = sum(hasattr(p, "ds_z3_leaf_module") for p in engine.module.parameters())
        return len(engine.optimizer.gatherer.units), hooked, leaves, marked

    for own in (False, True):
        for pair in granularities:
            model = llama()
            if own:
                set_z3_leaf_modules(model, ["LlamaMLP"])
            first = make_engine(model, config_of("zeropp", pair[0]), optimizer=None)
            alone = seen(first)
            second = make_engine(model, config_of("zeropp", pair[1]), optimizer=None)
            beside = seen(second)
            second.destroy()
            again = seen(first)
            second = make_engine(model, config_of("zeropp", pair[1]), optimizer=None)
            first.destroy()
            without = seen(second)
            second.destroy()
            found[own, pair] = alone, beside, again, without, len(get_z3_leaf_modules(model))
    return found


def collected_on_a_rank():
    """An engine over the parameters of another one's model, in modules of its own, is collected on rank 0 alone.

    What a source of the other owes before and after, what it hands over, and what is said of its next step.
    """
    switch(True)
    tokens = next(batches(1, dist.get_rank()))
    engine = make_engine(llama(), config_of("zeropp", "block"))
    step(engine, tokens)
    source = WeightSource(engine, only_changed=True)
    other = llama(seed=1)
    for mine, its in zip(engine.module.modules(), other.modules(), strict=True):
        its._parameters.update(mine._parameters)
    later, found = make_engine(other, config_of("zeropp", "module"), optimizer=None), []
    evaluated(later, tokens)
    found.append(len(list(source)))
    if dist.get_rank() == 0:
        later.__del__()
        del later
        gc.collect()
    found += [len(source.metadata()), len(list(source)), len(list(WeightSource(engine)))]
    with pytest.raises(RuntimeError) as raised:
        step(engine, tokens)
    return found, str(raised.value)


def loaded_after_a_later_one(kinds, folder):
    """{kind: {whether a later engine to train was there: losses after weights alone, then all, were loaded}}."""
    switch(True)
    tokens, found = list(batches(6, dist.get_rank())), {}
    for kind in kinds:
        found[kind] = {}
        for beside in (False, True):
            model, tag = llama(), f"{kind} {beside}"
            engine = make_engine(model, config_of(kind, "block"))
            losses = [step(engine, batch) for batch in tokens[:2]]
            if beside:
                make_engine(model, config_of(kind, "block")).destroy()
            engine.save_checkpoint(folder, tag=tag)
            losses.append(step(engine, tokens[2]))
            for options in ({"load_module_only": True}, {"load_optimizer_states": False}, {}):
                if beside:
                    make_engine(model, config_of(kind, "block")).destroy()
                engine.load_checkpoint(folder, tag=tag, **options)
                losses += [step(engine, tokens[3]), evaluated(engine, tokens[4])]
            found[kind][beside] = losses
            engine.destroy()
    return found


# -- any order -------------------------------------------------------------------------------------------------------


class Sequence:
    """Engines over one model that are made, fail to be made, work, end and are collected, in an order that chance says.

    At most two are to train, and while there are two, neither does: they would take each other's gradients.

    Attributes:
        trained: (which engine, loss) of each step; `evaluated`: (steps before it, loss).
        said: what is wrong.
    """

    MOST = 4

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.chance = kind, random.Random(seed)  # the same on all ranks
        self.model, self.mixed = llama(), seed % 2 == 1
        if seed % 3 == 0:
            set_z3_leaf_modules(self.model, ["LlamaMLP"])
        self.tokens = list(batches(40, dist.get_rank()))
        self.engines: dict[int, object] = {}  # by number, in the order in which they were made
        self.configs: dict[int, dict] = {}
        self.trains: set[int] = set()
        self.numbers = itertools.count()
        self.trained, self.evaluated, self.said, self.log = [], [], [], []
        self.seen: dict[tuple, dict] = {}
        self.leaves = get_z3_leaf_modules(self.model)

    def run(self, length: int) -> Sequence:
        for _ in range(length):
            self.one()
        while self.engines:
            self.destroy()
        return self

    def one(self) -> None:
        working = [number for number in self.engines if number in self.trains]
        actions = [self.make] * (len(self.engines) < self.MOST) + [self.fail, self.collect]
        if self.engines:
            actions += [self.evaluate, self.destroy]
        if len(working) == 1:
            actions += [self.train] * 2
        self.chance.choice(actions)()

    def config(self, fails: bool = False) -> dict:
        """Of another granularity than others, where it fails, and in a mixed sequence."""
        if fails or (self.mixed and self.kind != "whole tensors"):  # whose units decide on the owners
            granularity = self.chance.choice(["block", "module", "parameter"])
            return config_of(self.kind, granularity, self.chance.choice([0, 100, 10**6]))
        return config_of(self.kind, "block")

    def make(self) -> None:
        number, config = next(self.numbers), self.config()
        trains = self.chance.random() < 0.5 and len(self.trains) < 2
        self.log.append(f"make {number}{' to train' * trains}")
        self.configs[number] = config
        self.engines[number] = make_engine(self.model, config, optimizer="adamw" if trains else None)
        if trains:
            self.trains.add(number)
        self.check()

    def fail(self) -> None:
        config, trains = self.config(fails=True), self.chance.random() < 0.5
        where = self.chance.choice(sorted(FAILURES if trains else FAILURES.keys() - OF_TRAINING))
        self.log.append(f"fail at {where}")
        is_zero = hasattr(next(self.model.parameters()), "ds_id")
        before = on_model(self.model)
        if not fails_to_be_made(self.model, config, where, trains):
            self.wrong("did not fail")
        if is_zero:
            self.compare(before)

    def collect(self) -> None:
        self.log.append("collect")
        if dist.get_rank() == self.chance.randrange(2):
            gc.collect()
        self.check()

    def train(self) -> None:
        (number,) = self.trains
        self.log.append(f"train {number}")
        self.trained.append((number, step(self.engines[number], self.tokens[len(self.trained)])))
        self.check()

    def evaluate(self) -> None:
        number = self.chance.choice(list(self.engines))
        self.log.append(f"evaluate {number}")
        loss = evaluated(self.engines[number], self.tokens[-1])
        self.evaluated.append((len(self.trained), loss))
        self.check()

    def destroy(self) -> None:
        number = self.chance.choice(list(self.engines))
        self.log.append(f"destroy {number}")
        engine = self.engines.pop(number)
        self.trains.discard(number)
        engine.destroy()
        parts = [weakref.ref(part) for part in (engine, engine.optimizer, engine._zeropp_fp8_offload)]
        del engine
        gc.collect()
        if any(part() is not None for part in parts):
            self.wrong("what was destroyed is held")
        self.check()

    def check(self) -> None:
        """With the same engines, the same is on the model; without any, what was there before the first."""
        found = on_model(self.model)
        self.compare(self.seen.setdefault(tuple(self.engines), found))
        if not self.engines:
            if get_z3_leaf_modules(self.model) != self.leaves:
                self.wrong("leaf modules")
            hooks = {key: len(there) for key, there in found.items() if key[1] in (*HOOKS, "gradient hooks") and there}
            alone = (
                {("", "_forward_pre_hooks"): 1, ("", "_forward_hooks"): 1} if "destroy" in " ".join(self.log) else {}
            )
            if hooks != alone or found["stack"]:
                self.wrong(f"hooks: {hooks}, {found['stack']}")

    def compare(self, before: dict) -> None:
        # The hooks that let a model run alone are new ones each time.
        left = differing(before, on_model(self.model)) if self.engines else []
        if left:
            self.wrong(f"{left[:4]}")

    def wrong(self, what: str) -> None:
        self.said.append(f"{' / '.join(self.log)}: {what}")


def in_any_order(kind, seeds, length):
    """{seed: (what is wrong, losses of training and evaluation, the same without other engines)}."""
    switch(True)
    found = {}
    for seed in seeds:
        done = Sequence(kind, seed).run(length)
        found[seed] = done.said, done.trained, done.evaluated, reference(done), done.log
    return found


def reference(done):
    """The same steps and evaluations, each by an engine that has the model for itself."""
    model, engine, trained, wanted = llama(), None, [], {steps for steps, _ in done.evaluated}
    evaluations, last = {}, None

    def evaluate():
        if len(trained) in wanted:
            there = engine or make_engine(model, config_of(done.kind, "block"), optimizer=None)
            evaluations[len(trained)] = evaluated(there, done.tokens[-1])
            if there is not engine:
                there.destroy()

    evaluate()
    for number, _ in done.trained:
        if number != last:
            if engine is not None:
                engine.destroy()
            engine, last = make_engine(model, done.configs[number]), number
        trained.append((number, step(engine, done.tokens[len(trained)])))
        evaluate()
    if engine is not None:
        engine.destroy()
    return trained, [(steps, evaluations[steps]) for steps, _ in done.evaluated]
