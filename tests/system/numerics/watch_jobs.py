"""Jobs about the watch, and what a run is like that has fallen back, that run on ranks."""

from __future__ import annotations

import functools
import itertools
import json
import os
from pathlib import Path

import running
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from models import batches, compiled_by, full_weights, llama, section
from numerics_jobs import WATCHED, decibels, small_model, sums_of, watch_arrivals
from ranks import attempt, printed
from running import Spec, backward, differing, evaluated, forward, loss_of, on_engine, run, scaled, see, step, update

from zeropp_fp8.numerics import watch as watch_module
from zeropp_fp8.zero.fall_back import fall_back

SPIKE_AT, STEPS = 10, 13


def watched(watch="fall_back", rank=2, factor=1000.0, recipe="zeropp", accumulation=1, direct=False, **fields):
    """One rank's loss jumps in one step.

    Returns:
        (after each step whether it has fallen back, and whether layers are plain; how it ended; of the last step the dB
        of reduced gradients and the loss, of engine and of a plain model with the same weights).
    """
    config, model = {"gradient_accumulation_steps": accumulation}, functools.partial(llama, intermediate=128)
    spec = Spec(section(recipe, numerics={"watch": watch}, **fields), config=config, model=model)
    plain, found, data = model(), [], list(batches(STEPS * accumulation, dist.get_rank()))
    jump = scaled(factor if dist.get_rank() == rank else 1.0)
    back = (lambda running: running.loss.backward()) if direct else backward

    def look(engine):
        formats = engine.zeropp_fp8_session.formats
        layer = engine.module.get_submodule(WATCHED)
        none = (formats.weights, formats.within, formats.between) == (None, None, None)
        found.append((none, type(layer) is torch.nn.Linear))

    one = [*[forward, back, update] * accumulation, on_engine(look)]
    high = [*[forward, jump, back, update] * accumulation, on_engine(look)]
    take = on_engine(lambda engine: plain.load_state_dict(full_weights(engine.module)))
    last = [take, *[forward, back, update] * (accumulation - 1), forward, back, see(gradients_of), update]
    events = [*one * (SPIKE_AT - 1), *high, *one * (STEPS - SPIKE_AT - 1), *last, on_engine(look)]
    try:
        trace = run(spec, events, data=data)
    except (FloatingPointError, RuntimeError) as error:
        return found, repr(error), None, None
    losses = []
    for tokens in data[-accumulation:]:
        loss = loss_of(plain, tokens)
        (loss / accumulation).backward()
        losses.append(loss.item())
    pairs = [(mean_of(param.grad), trace.seen[0][name]) for name, param in plain.named_parameters()]
    return found, None, decibels(sums_of(pairs)), (trace.losses[-accumulation:], losses)


def gradients_of(engine):
    trained = {name: param for name, param in engine.module.named_parameters() if param.requires_grad}
    return {name: safe_get_full_grad(param).double() for name, param in trained.items()}


def mean_of(gradient):
    """Over ranks, in float64."""
    exact = gradient.double()
    dist.all_reduce(exact)
    return exact / dist.get_world_size()


def watch_all(cases):
    return [watched(**case) for case in cases]


SOON = 3  # the step that jumps where two losses are enough to compare with
JUMP = [forward, scaled(1000.0), backward, update]


def spec_of(watch, recipe="zeropp", lora=False, ds=None, numerics=None, **fields):
    watch_module.LEAST = SOON - 1
    the_section = section(recipe, numerics={"watch": watch, **(numerics or {})}, **fields)
    return Spec(the_section, config=ds or {}, model=functools.partial(small_model, lora))


def said(engine):
    return printed(dist.get_rank())


def jumping(steps, high):
    """Return what is said of a watch in `steps` steps, of which those in `high` have losses that jump."""
    events = [JUMP if place in high else [step] for place in range(1, steps + 1)]
    before, after = run(spec_of("fall_back"), [see(said), *itertools.chain(*events), see(said)]).seen
    return after[len(before) :]


def sampled(path, recipe, accumulation):
    """Kinds in the samples of steps of which one falls back."""
    small = {"compute": {"format": "fp8", "min_features": 16, "skip_modules": ["lm_head"]}}
    numerics, config = {"every": 1, "parts": 1, "file": path}, {"gradient_accumulation_steps": accumulation}
    events = [[step] * (SOON - 1), JUMP, [step] * 2]
    events = [event for of_step in events for event in of_step * accumulation]
    run(spec_of("fall_back", recipe, ds=config, numerics=numerics, **small), events)
    dist.barrier()
    return [{row["kind"] for row in json.loads(line)["rows"]} for line in Path(path).read_text().splitlines()]


def resumed(folder, cases):
    """A run that falls back, saves, and goes on; beside it runs that resume from what it has saved, in a fresh engine.

    Of each case: (losses after the checkpoint and those of the first run, the last weights of both, whether the engine
    has fallen back, the losses that the watch compares with, what was printed while it loaded).
    """
    return [_resumed(os.path.join(folder, str(index)), **case) for index, case in enumerate(cases)]


def _resumed(folder, watch="fall_back", **case):
    first, second = (spec_of(each, **case) for each in ("fall_back", watch))

    def look(engine):
        session = engine.zeropp_fp8_session
        compared_with = [len(one.earlier) for one in session.parts if isinstance(one, watch_module.Watch)]
        fell_back = session.formats.fell_back, session.formats.weights is session.formats.between is None
        return fell_back, compared_with, said(engine)

    before, after = [*[step] * (SOON - 1), *JUMP, step], [see(look), step, step]
    _, went_on, again = running.resumed(first, before, after, ("weights",), running.other(second), folder=folder)
    (fell_back, compared_with, text), (*_, earlier) = again.seen[0], went_on.seen[0]
    same = again.losses == went_on.losses, running.same(again.weights, went_on.weights)
    return *same, fell_back, compared_with, text[len(earlier) :]


def fallen(cases):
    """Of each case what is said, and what the next step is like: `NextStep`."""
    return [_fallen(**case) for case in cases]


def _fallen(**case):
    spec, rank = spec_of("fall_back", **case), dist.get_rank()
    micro_batches = spec.config.get("gradient_accumulation_steps", 1)
    *first, tokens = [*batches(SOON, rank), *batches(1, rank, seed=7)]
    next_step = NextStep(spec.model(), tokens)
    last = [forward, backward, on_engine(next_step.before_update), update] * micro_batches
    events = [*[step] * (SOON - 1) * micro_batches, *JUMP * micro_batches, see(said), on_engine(next_step.begin)]
    data = [each for each in (*first, tokens) for _ in range(micro_batches)]
    before = len(printed(rank))
    with compiled_by("aot_eager"):
        trace = run(spec, [*events, *last, see(next_step.compare)], data=data)
    return trace.seen[0][before:], {**trace.seen[1], "losses": (trace.losses[-1], next_step.plain_loss)}


def evaluated_before():
    """How a step after a fall-back differs where an evaluation came just before that."""
    live = {f"stage3_max_{what}": 10**9 for what in ("live_parameters", "reuse_distance")}  # what it gathers stays
    spec, (first, last, other) = spec_of("fall_back", ds={"zero_optimization": live}), batches(3, dist.get_rank())
    fall = on_engine(lambda engine: fall_back(engine.optimizer))
    looks = [], [see(evaluated, other)]
    traces = [run(spec, [step, *look, fall, step], ("weights",), data=[first, last]) for look in looks]
    return differing(*traces, but=["seen"])


def without_memory():
    """Return what two ranks raise where one of them has no memory to fall back."""

    def formats_changed():
        raise torch.OutOfMemoryError("out of memory")

    def fill(engine):
        if dist.get_rank() == 1:
            engine.optimizer.gradients.store.formats_changed = formats_changed

    spec = spec_of("fall_back", "fp8-lm-o1")
    return attempt(lambda: run(spec, [on_engine(fill), *[step] * (SOON - 1), *JUMP]))


class NextStep:
    """One more step, against a plain model with the same weights and an update by the formulas.

    {"arrived otherwise": weights that had other bits than those at rest, of "seen", "losses": both, "gradients", and
    "weights" after the update: dB, "sent": bytes of all ranks, of weights in forward and of gradients, "numel": that
    are trained, "frozen": formats of weights that rest as codes}
    """

    def __init__(self, plain, tokens):
        self.plain, self.tokens, self.arrived = plain, tokens, {}

    def begin(self, engine):
        at_rest = full_weights(engine.module)
        self.plain.load_state_dict(at_rest)
        self.trained = {name: param for name, param in engine.module.named_parameters() if param.requires_grad}
        self.states = {name: states_of(param) for name, param in self.trained.items()}
        self.hooks, self.sent = watch_arrivals(engine, at_rest, self.arrived), sent_of(engine)

    def before_update(self, engine):
        self.reduced = gradients_of(engine)

    def compare(self, engine):
        for hook in self.hooks:
            hook.remove()
        loss = loss_of(self.plain, self.tokens)
        loss.backward()
        self.plain_loss = loss.item()
        gradients, weights, after = [], [], full_weights(engine.module)
        for name, param in self.plain.named_parameters():
            if name in self.trained:
                exact = mean_of(param.grad)
                gradients.append((exact, self.reduced[name].view_as(exact)))
                weights.append((updated(self.states[name], exact), after[name]))
        units = engine.optimizer.gatherer.units
        frozen = [(unit, param) for unit in units if unit.storage.sends_as_stored for param in unit.params]
        return {
            "arrived otherwise": sorted(name for name, same in self.arrived.items() if not same),
            "seen": len(self.arrived),
            "gradients": decibels(sums_of(gradients)),
            "weights": decibels(sums_of(weights)),
            "sent": {kind: value - self.sent[kind] for kind, value in sent_of(engine).items()},
            "numel": sum(param.ds_numel for param in self.trained.values()),
            "frozen": {unit.format_of(param).name for unit, param in frozen},
        }


def states_of(param):
    """(master weight, both moments) in fp64."""
    moments = (safe_get_full_optimizer_state(param, key).double() for key in ("exp_avg", "exp_avg_sq"))
    return (safe_get_full_fp32_param(param).double(), *moments)


def updated(states, gradient, step=SOON + 1, lr=1e-3, betas=(0.9, 0.999), epsilon=1e-8, decay=0.01):
    """AdamW by its formulas, of one step more."""
    weight, first, second = states
    first = betas[0] * first + (1 - betas[0]) * gradient.view_as(first)
    second = betas[1] * second + (1 - betas[1]) * gradient.view_as(second).square()
    root = (second / (1 - betas[1] ** step)).sqrt() + epsilon
    return weight * (1 - lr * decay) - lr * first / (1 - betas[0] ** step) / root


def sent_of(engine):
    """Bytes that all ranks have sent so far, by kind."""
    report = engine.zeropp_fp8_session.ledger.report(total=True)
    return {kind: report["steps"] * sum(report["per_step"][kind].values()) for kind in ("weights_forward", "gradients")}
