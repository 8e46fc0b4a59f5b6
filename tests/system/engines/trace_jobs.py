"""Jobs of an engine that has its model again after later ones: bit for bit, or with the weights that were written."""

from __future__ import annotations

import itertools
from dataclasses import replace

import deepspeed
import torch
import torch.distributed as dist
from failing_jobs import FAILURES, fails_to_be_made, spec_of
from models import batches
from recipes import section_of
from running import Spec, backward, evaluate, evaluated, forward, on_engine, run, stepped, update

# Ways in which training depends on more than weights and optimizer states.
OWN_STATES = {
    "error feedback": ("zeropp", {"gradients": {"error_feedback": True}}),
    "differences": ("zeropp-exact", {}),
    "differences, whole tensors": ("exact, whole tensors", {}),
    "FP8 states": ("FP8 states", {}),
    "some copies": ("zeropp-pcie, some copies", {}),
    "delayed scaling": ("lossless, delayed FP8 compute", {}),
    "FP8 operands": ("FP8 operands, node's copy", {}),
    "fp8-lm": ("fp8-lm", {}),
}
# What becomes of another engine over the model: where it fails, or whether it is evaluated before it is destroyed.
ENDS = ("hooks are on", "half taken over", "the timers", "destroyed", "evaluated")
# Of which ends come in turn, from one of them on; None: there is no other engine. With both, each end is met before a
# forward and before a step, and by an engine that trains and one that does not.
TURNS = (None, 0, 2)


def without_a_trace(name, first):
    """Three steps of two micro-batches, with another engine in all places between them."""
    way, fields = OWN_STATES[name]
    # Small matrices stay gathered between steps.
    zero = {"stage3_param_persistence_threshold": 5000}
    settings = {"gradient_accumulation_steps": 2, "zero_optimization": zero}
    own = section_of(way, **fields)
    # Layers that compute in low precision are the first one's.
    way, fields = ("zeropp", {}) if "compute" in own else (way, fields)
    its = Spec(section_of(way, gather_granularity="module", **fields), "bf16", settings)
    *tokens, last = batches(7, dist.get_rank())
    ends = itertools.repeat(None) if first is None else itertools.cycle(ENDS[first:] + ENDS[:first])

    def another(engine, trains):
        drawn, end = torch.get_rng_state(), next(ends)
        spec = its if trains else replace(its, optimizer=None)
        if end in FAILURES:
            assert fails_to_be_made(spec, engine.module, end)
        elif end is not None:
            later = spec.engine(engine.module)
            if end == "evaluated":
                evaluated(later, last)
            later.destroy()
        assert torch.equal(drawn, torch.get_rng_state())

    events = []
    for index in range(6):
        events += [on_engine(another, index % 3 == 0), forward, backward, on_engine(another, index % 3 == 1), update]
        events += [evaluate(last)] * (index in (1, 2))
    events += [evaluate(last), on_engine(another, False), evaluate(last)]
    return run(Spec(own, "bf16", settings), events, ("masters",), data=tokens)


def written_while_later_ones_were_there(kinds):
    """{(kind, who wrote weights): losses of two engines that have them again, one after the other, beside a new one's}.

    Of three engines the last one has the model when weights are written, by a step (of its own, or of the first) or
    from outside.
    """
    tokens, found = list(batches(4, dist.get_rank())), {}

    def outside(first, last):
        with deepspeed.zero.GatheredParameters(list(first.module.parameters()), modifier_rank=0):
            if dist.get_rank() == 0:
                for param in first.module.parameters():
                    param.data.mul_(0.5)

    writers = {
        "first": lambda first, last: stepped(first, tokens[2]),
        "last": lambda first, last: stepped(last, tokens[2]),
        "outside": outside,
    }
    for kind, (who, write) in itertools.product(kinds, writers.items()):
        trains, evaluates = (spec_of(kind, "block", trains=trains) for trains in (True, False))
        first = (evaluates if who == "last" else trains).engine()
        for batch in tokens[:2]:
            if who != "last":
                stepped(first, batch)
            evaluated(first, batch)
        between = evaluates.engine(first.module)
        evaluated(between, tokens[3])
        last = (trains if who == "last" else evaluates).engine(first.module)
        write(first, last)
        losses = []
        for ends, has_it in ((last, between), (between, first)):
            ends.destroy()
            losses.append(evaluated(has_it, tokens[3]))
        new = evaluates.engine(first.module)
        found[kind, who] = evaluated(new, tokens[3]), losses
        new.destroy()
        first.destroy()
    return found
