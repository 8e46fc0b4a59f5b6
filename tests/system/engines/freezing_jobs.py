"""Jobs that freeze and unfreeze parameters after the engine was made."""

from __future__ import annotations

import importlib

import torch
import torch.distributed as dist
from models import batches, full_weights, llama
from recipes import section_of
from running import Spec, evaluate, loss_of, on_engine, run, see, step

# Before which step, parameters whose names contain what, are frozen (False) or trained again (True).
SCHEDULES = {
    "progressive": {2: [("layers.0", False)], 4: [("layers.1", False)], 5: [("embed", False)]},
    "and back": {2: [("layers.0", False), ("lm_head", False)], 5: [("layers.0", True), ("lm_head", True)]},
    "in turns": {step: [("layers.0", step % 2 == 0), ("layers.1", step % 2 == 1)] for step in range(1, 8)},
    "all but the norms": {2: [("proj", False), ("embed", False), ("lm_head", False)]},
}


def exact_loss(engine, tokens, make=llama):
    """The loss of a model without DeepSpeed that has the engine's exact weights, in fp32."""
    weights = full_weights(engine.module)
    model = make().float()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(weights[name])
        return loss_of(model, tokens).item()


def _train(section, schedule, leaf=False, lr=1e-2, steps=8, accumulation=1):
    """The last loss is of an evaluation; what is seen, of the exact weights on its batch."""
    importlib.import_module("torch._dynamo")  # zero.Init needs it imported before, see plugin.enable
    tokens = list(batches(steps * accumulation, dist.get_rank()))

    def freeze(engine, index):
        for part, trains in SCHEDULES[schedule].get(index, ()):
            for name, param in engine.module.named_parameters():
                if part in name:
                    param.requires_grad_(trains)

    spec = Spec(
        section, config={"gradient_accumulation_steps": accumulation}, lr=lr, leaves=("LlamaDecoderLayer",) * leaf
    )
    events = [event for index in range(steps) for event in (on_engine(freeze, index), *[step] * accumulation)]
    return run(spec, [*events, evaluate(tokens[-1]), see(exact_loss, tokens[-1])], ("weights",), tokens)


def beside_stock(way, granularity, schedules=tuple(SCHEDULES), **options):
    """{schedule: (stock, the plugin)}."""
    section, leaf = section_of(way, gather_granularity=granularity), granularity == "block"
    return {
        schedule: (_train(None, schedule, leaf, **options), _train(section, schedule, **options))
        for schedule in schedules
    }


def computed_and_exact(cases, lr):
    """For each (way, schedule): (the loss that the engine computes after training, the loss of its exact weights)."""
    traces = [_train(section_of(way), schedule, lr=lr) for way, schedule in cases]
    return [(trace.losses[-1], *trace.seen) for trace in traces]


def frozen_between_micro_batches(way, granularity="block"):
    """Largest change of a frozen weight in a step whose first micro-batch trained it; of the others.

    Decoupled weight decay alone takes 1e-4 of a weight, the first step of Adam 1e-2 of each element.
    """
    section = None if way is None else section_of(way, gather_granularity=granularity)

    def freeze(engine):
        for name, param in engine.module.named_parameters():
            param.requires_grad_("layers.0" not in name)

    weights = see(lambda engine: full_weights(engine.module))
    spec = Spec(section, config={"gradient_accumulation_steps": 2}, lr=1e-2)
    before, after = run(spec, [weights, step, on_engine(freeze), step, weights]).seen
    moved = {n: (w - before[n]).abs().max().item() for n, w in after.items()}
    frozen = [change for name, change in moved.items() if "layers.0" in name]
    return max(frozen), min(change for name, change in moved.items() if "layers.0" not in name)


def frozen_between_micro_batches_in(ways):
    return {way: frozen_between_micro_batches(way) for way in ways}
