"""Jobs with engines over one model that have it in turn: the last one ends first, and another order is refused."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from dataclasses import replace

import pytest
import torch.distributed as dist
from deepspeed.utils import get_z3_leaf_modules, set_z3_leaf_modules
from failing_jobs import (
    FAILURES,
    HOOKS,
    OF_TRAINING,
    differing,
    fails_to_be_made,
    on_model,
    spec_of,
)
from models import batches, llama
from running import Spec, evaluated, stepped, switch

from zeropp_fp8.handover import WeightSource


def hooks_again():
    """Losses of an engine whose hooks were taken off and put on again, as TRL does, beside a later one, and alone."""
    tokens, found = list(batches(3, dist.get_rank())), []
    for beside in (False, True):
        engine = spec_of("zeropp", "block").engine()
        offload = engine.optimizer.parameter_offload
        for hook in (*offload.forward_hooks, *offload.backward_hooks):
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        offload._register_deepspeed_module(offload.module)
        losses = [stepped(engine, tokens[0])]
        later = spec_of("zeropp", "block", trains=False).engine(engine.module) if beside else engine
        losses += [evaluated(later, tokens[2]), stepped(engine, tokens[1])]
        if beside:
            later.destroy()
        losses.append(evaluated(engine, tokens[2]))
        engine.destroy()
        found.append(losses)
    return found


def compiled_in_turn():
    """Each block's forward before, in and after two engines that compile them: which are the same."""
    spec, model, seen = spec_of("zeropp", "block", trains=False, compile="blocks"), llama(), []
    wrapped = model.model.layers[1].forward
    model.model.layers[1].forward = lambda *args, **kwargs: wrapped(*args, **kwargs)

    def look():
        seen.append([layer.__dict__.get("forward") for layer in model.model.layers])

    look()
    first = spec.engine(model)
    look()
    second = spec.engine(model)
    look()
    for engine in (second, first):
        engine.destroy()
        look()
    before, of_first, of_second, again, after = seen
    return after == before, again == of_first, all(len(set(three)) == 3 for three in zip(before, of_first, of_second))


def ended_too_early():
    """Return the words of destroy() while a later engine lives, thrice; losses of both beside those of each alone."""
    tokens, found = list(batches(4, dist.get_rank())), []
    for kind in ("zeropp", "whole tensors", "FP8 states", "FP8 operands, node's copy"):
        runs, said = [], []
        for early in (False, True):
            engine = spec_of(kind, "block").engine()
            losses = [stepped(engine, tokens[0])]
            its = kind if "FP8" not in kind else "zeropp"  # layers that compute in low precision are the first one's
            later = spec_of(its, "module", trains=False).engine(engine.module)
            before = on_model(engine.module)
            for end in (engine.destroy, engine.optimizer.destroy, engine.destroy) if early else ():
                with pytest.raises(RuntimeError) as raised:
                    end()
                said.append(str(raised.value))
            assert not differing(before, on_model(engine.module))
            losses += [evaluated(later, tokens[1])]
            later.destroy()
            losses += [stepped(engine, tokens[2]), evaluated(engine, tokens[3])]
            engine.destroy()
            engine.destroy()
            runs.append(losses)
        found.append((said, *runs))
    return found


def units_gathered(granularities):
    """{granularities: units, modules with hooks and leaves of two engines; of the first again; leaves at last}."""
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
            first = spec_of("zeropp", pair[0], trains=False).engine(model)
            alone = seen(first)
            second = spec_of("zeropp", pair[1], trains=False).engine(model)
            beside = seen(second)
            second.destroy()
            again = seen(first)
            first.destroy()
            found[own, pair] = alone, beside, again, len(get_z3_leaf_modules(model))
    return found


def collected_on_a_rank():
    """An engine over the parameters of another one's model, in modules of its own, is collected on rank 0 alone.

    How many tensors a source of the other hands over before and after, and what is said of its next step.
    """
    tokens = next(batches(1, dist.get_rank()))
    engine = spec_of("zeropp", "block").engine()
    stepped(engine, tokens)
    source = WeightSource(engine)
    other = llama(seed=1)
    for mine, its in zip(engine.module.modules(), other.modules(), strict=True):
        its._parameters.update(mine._parameters)
    later, found = spec_of("zeropp", "module", trains=False).engine(other), []
    evaluated(later, tokens)
    found.append(len(list(source)))
    if dist.get_rank() == 0:
        later.__del__()
        del later
        gc.collect()
    found += [len(source.metadata()), len(list(source))]
    with pytest.raises(RuntimeError) as raised:
        stepped(engine, tokens)
    return found, str(raised.value)


def loaded_after_a_later_one(kinds, folder):
    """{kind: {whether a later engine to train was there: losses after weights alone, then all, were loaded}}."""
    tokens, found = list(batches(6, dist.get_rank())), {}
    for kind in kinds:
        found[kind], spec = {}, spec_of(kind, "block")
        for beside in (False, True):
            engine, tag = spec.engine(), f"{kind} {beside}"
            losses = [stepped(engine, batch) for batch in tokens[:2]]
            if beside:
                spec.engine(engine.module).destroy()
            engine.save_checkpoint(folder, tag=tag)
            losses.append(stepped(engine, tokens[2]))
            for options in ({"load_module_only": True}, {"load_optimizer_states": False}, {}):
                if beside:
                    spec.engine(engine.module).destroy()
                engine.load_checkpoint(folder, tag=tag, **options)
                losses += [stepped(engine, tokens[3]), evaluated(engine, tokens[4])]
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
        self.specs: dict[int, Spec] = {}  # as if they were to train
        self.trains: set[int] = set()
        self.numbers = itertools.count()
        self.trained, self.evaluated, self.said, self.log = [], [], [], []
        self.seen: dict[tuple, dict] = {}
        self.leaves = get_z3_leaf_modules(self.model)

    def run(self, length: int) -> Sequence:
        for _ in range(length):
            self.one()
        for number in reversed(list(self.engines)):
            self.destroy(number)
        return self

    def one(self) -> None:
        working = [number for number in self.engines if number in self.trains]
        actions = [self.make] * (len(self.engines) < self.MOST) + [self.fail, self.collect]
        if self.engines:
            actions += [self.evaluate, self.destroy, self.destroy]
        if len(working) == 1:
            actions += [self.train] * 2
        self.chance.choice(actions)()

    def spec(self, fails: bool = False) -> Spec:
        """Of another granularity than others, where it fails, and in a mixed sequence."""
        if fails or (self.mixed and self.kind != "whole tensors"):  # whose units decide on the owners
            granularity = self.chance.choice(["block", "module", "parameter"])
            return spec_of(self.kind, granularity, self.chance.choice([0, 100, 10**6]))
        return spec_of(self.kind, "block")

    def make(self) -> None:
        number, spec = next(self.numbers), self.spec()
        trains = self.chance.random() < 0.5 and len(self.trains) < 2
        self.log.append(f"make {number}{' to train' * trains}")
        self.specs[number] = spec
        self.engines[number] = (spec if trains else replace(spec, optimizer=None)).engine(self.model)
        if trains:
            self.trains.add(number)
        self.check()

    def fail(self) -> None:
        spec, trains = self.spec(fails=True), self.chance.random() < 0.5
        where = self.chance.choice(sorted(FAILURES if trains else FAILURES.keys() - OF_TRAINING))
        self.log.append(f"fail at {where}")
        is_zero = hasattr(next(self.model.parameters()), "ds_id")
        before = on_model(self.model)
        if not fails_to_be_made(spec if trains else replace(spec, optimizer=None), self.model, where):
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
        self.trained.append((number, stepped(self.engines[number], self.tokens[len(self.trained)])))
        self.check()

    def evaluate(self) -> None:
        number = self.chance.choice(list(self.engines))
        self.log.append(f"evaluate {number}")
        loss = evaluated(self.engines[number], self.tokens[-1])
        self.evaluated.append((len(self.trained), loss))
        self.check()

    def destroy(self, number: int | None = None) -> None:
        if number is None:
            number = self.chance.choice(list(self.engines))
        if number != list(self.engines)[-1]:
            self.log.append(f"refuse to destroy {number}")
            with pytest.raises(RuntimeError, match="made later over this model"):
                self.engines[number].destroy()
            self.check()
            return
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
            there = engine or spec_of(done.kind, "block", trains=False).engine(model)
            evaluations[len(trained)] = evaluated(there, done.tokens[-1])
            if there is not engine:
                there.destroy()

    evaluate()
    for number, _ in done.trained:
        if number != last:
            if engine is not None:
                engine.destroy()
            engine, last = done.specs[number].engine(model), number
        trained.append((number, stepped(engine, done.tokens[len(trained)])))
        evaluate()
    if engine is not None:
        engine.destroy()
    return trained, [(steps, evaluations[steps]) for steps, _ in done.evaluated]
