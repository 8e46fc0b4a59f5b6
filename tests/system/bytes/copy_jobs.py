"""Jobs on ranks that keep whole codes of as many units as memory allows."""

from __future__ import annotations

from unittest import mock

import deepspeed
import psutil
import torch
import torch.distributed as dist
from models import batches, llama, secondary_bytes, section
from ranks import printed
from running import Spec, backward, evaluate, forward, freezing, loss_of, on_engine, run, see, stepped, update

import zeropp_fp8
from zeropp_fp8.zero.gather.secondary import is_frozen

KINDS = ("weights_forward", "weights_backward")


def spec_of(recipe="zeropp-pcie", secondary=None, accumulation=1, frozen=(), fields=None):
    """Of a small Llama; `secondary` and `fields` on top of the recipe, `frozen`: parts of names."""
    whole = {"weights": {"difference": "none"}}  # bytes of differences are those of what a step has changed
    chosen = section(recipe, **{**whole, **({"secondary": secondary} if secondary else {}), **(fields or {})})
    return Spec(chosen, config={"gradient_accumulation_steps": accumulation}, adapted=freezing(*frozen))


def train(secondary, recipe="zeropp-pcie", accumulation=1, steps=3, **options):
    """Losses, weights, bytes of weights per step after the first, what is kept; with an evaluation at the end."""
    held, sent = [], []
    look = on_engine(lambda engine: held.append(secondary_bytes(engine.optimizer.gatherer)))
    count = on_engine(lambda engine: sent.append(weight_bytes(engine)))
    events = [*[forward, backward, look, update] * accumulation, count] * steps
    events += [evaluate(next(batches(1, dist.get_rank(), seed=9))), see(kept)]
    trace = run(spec_of(recipe, secondary, accumulation, **options), events, ("weights",))
    found = {"losses": trace.losses, "weights": trace.weights, "held": max(held), **trace.seen[0]}
    return {**found, "bytes": (sent[-1] - sent[0]) / (steps - 1)}


def kept(engine):
    """Which units' copies an engine keeps, and bytes of them, of all units, and of residuals."""
    gatherer, reducer = engine.optimizer.gatherer, engine.optimizer.reducer
    kept = [unit for unit in gatherer.units if unit.keeps_secondary]
    residuals = reducer.error_feedback._payloads.values() if reducer.error_feedback else ()
    return {
        "kept": [gatherer.units.index(unit) for unit in kept],
        "kept bytes": sum(unit.held_bytes for unit in kept),
        "frozen": [gatherer.units.index(unit) for unit in gatherer.units if is_frozen(unit)],
        "frozen bytes": sum(unit.held_bytes for unit in kept if is_frozen(unit)),
        "all bytes": sum(unit.held_bytes for unit in gatherer.units),
        "residuals": sum(p.numel() for p in residuals),
        "expected residuals": reducer.residual_bytes(engine.module.parameters()),
    }


def weight_bytes(engine):
    """Bytes of weights that this rank has sent in finished steps."""
    sent = engine.zeropp_fp8_session.ledger.of_run.bytes
    return sum(sent["per_step", kind, link] for link in ("inter", "intra") for kind in KINDS)


def runs(cases):
    """A training for each."""
    return [train(**case) for case in cases]


def with_memory(available, secondary, recipe="zeropp-pcie"):
    """Return what an engine keeps where rank r has `available[r]` bytes free; or the error. And the start table."""
    real = psutil.virtual_memory
    mine = available[dist.get_rank()]
    with (
        mock.patch.object(psutil, "virtual_memory", lambda: real()._replace(available=mine)),
        mock.patch("zeropp_fp8.zero.gather.secondary.device_bytes", lambda device, ranks: 4_000_000),
    ):
        try:
            engine = spec_of(recipe, secondary).engine()
        except zeropp_fp8.ConfigError as error:
            return str(error), None
    kept = [unit.keeps_secondary for unit in engine.optimizer.gatherer.units]
    table = printed()
    stepped(engine, next(batches(1, 0)))  # all ranks agree, or they would hang
    return kept, table


def refused_and_right_again(available):
    """A refusal leaves a model that another engine can have: (message, losses of it, of a model never refused)."""
    real, model = psutil.virtual_memory, llama()
    with mock.patch.object(psutil, "virtual_memory", lambda: real()._replace(available=available)):
        try:
            spec_of(secondary={"memory_gb": 1.0}).engine(model)
        except zeropp_fp8.ConfigError as error:
            message = str(error)
    tokens, spec = next(batches(1, dist.get_rank())), spec_of(secondary={"memory_gb": 7e-5})
    return message, [loss_of(spec.engine(chosen), tokens).item() for chosen in (model, llama())]


def written_from_outside(secondary, recipe="zeropp-pcie"):
    """Losses of an engine before and after somebody writes to its weights, and of an engine that began with them."""
    tokens = next(batches(1, 0))

    def write(engine):
        params = [p for n, p in engine.module.named_parameters() if "layers.0" in n or "embed" in n]
        with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
            if dist.get_rank() == 0:
                for param in params:
                    param.data.mul_(1.5)

    spec = spec_of(recipe, secondary)
    written = run(spec, [evaluate(tokens), on_engine(write), evaluate(tokens)])
    fresh = run(spec, [on_engine(write), evaluate(tokens)])  # before anything was gathered
    return [*written.losses, *fresh.losses]


def without_an_optimizer(secondary):
    """An engine without an optimizer: losses, what it keeps, bytes of the second evaluation."""
    tokens = next(batches(1, 0))
    evaluation = [evaluate(tokens), see(lambda engine: engine.zeropp_fp8_session.ledger.outside["per_step", "inter"])]
    events = [
        *evaluation * 2,
        see(lambda engine: sum(unit.keeps_secondary for unit in engine.optimizer.gatherer.units)),
    ]
    trace = run(Spec(section("zeropp-pcie", secondary=secondary), optimizer=None), events)
    first, second, kept = trace.seen
    return trace.losses, kept, second - first


def generated(secondary):
    """Tokens that an engine generates from codes that stay."""
    engine = spec_of(secondary=secondary).engine()
    tokens = next(batches(1, 0))[:, :4]
    found = {}
    for weights in ("codes", "values", "sharded"):
        with zeropp_fp8.generation(engine, weights=weights) as model, torch.no_grad():
            found[weights] = model.generate(input_ids=tokens, max_new_tokens=4, do_sample=False).tolist()
    return found
