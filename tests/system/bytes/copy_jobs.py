"""Jobs on ranks that keep whole codes of as many units as memory allows."""

from __future__ import annotations

from unittest import mock

import psutil
import torch
import torch.distributed as dist
from models import batches, ds_config, full_weights, llama, make_engine, secondary_bytes, section
from ranks import printed
from running import evaluated, forward_backward, loss_of, switch

import zeropp_fp8
from zeropp_fp8.zero.gather.secondary import is_frozen

KINDS = ("weights_forward", "weights_backward")


def engine_of(recipe="zeropp-pcie", secondary=None, accumulation=1, frozen=(), seed=0, fields=None, model=None):
    """An engine over a small Llama; `secondary` and `fields` on top of the recipe, `frozen`: parts of names."""
    switch(True)
    chosen = section(recipe, **{**({"secondary": secondary} if secondary else {}), **(fields or {})})
    model = model or llama(seed=seed)
    for name, param in model.named_parameters():
        param.requires_grad_(not any(part in name for part in frozen))
    return make_engine(model, ds_config(chosen, gradient_accumulation_steps=accumulation))


def train(secondary, recipe="zeropp-pcie", accumulation=1, steps=3, **options):
    """Losses, weights, bytes of weights per step after the first, what is kept; with evaluations in between."""
    engine = engine_of(recipe, secondary, accumulation, **options)
    gatherer, ledger = engine.optimizer.gatherer, engine.zeropp_fp8_session.ledger
    data, losses, held = batches(steps * (accumulation + 1), dist.get_rank()), [], []
    for step in range(steps):
        if step == 1:
            before = weight_bytes(ledger)
        for _ in range(accumulation):
            tokens = next(data)
            loss = loss_of(engine, tokens)
            engine.backward(loss)
            held.append(secondary_bytes(gatherer))
            losses.append(loss.item())
            engine.step()
        tokens = next(data)
        if step == steps - 1:
            losses.append(evaluated(engine, tokens))
    kept = [unit for unit in gatherer.units if unit.keeps_secondary]
    found = {
        "losses": losses,
        "weights": full_weights(engine.module),
        "bytes": (weight_bytes(ledger) - before) / (steps - 1),
        "held": max(held),
        "kept": [gatherer.units.index(unit) for unit in kept],
        "kept bytes": sum(unit.held_bytes for unit in kept),
        "frozen": [gatherer.units.index(unit) for unit in gatherer.units if is_frozen(unit)],
        "frozen bytes": sum(unit.held_bytes for unit in kept if is_frozen(unit)),
        "all bytes": sum(unit.held_bytes for unit in gatherer.units),
        "residuals": sum(p.numel() for p in engine.optimizer.reducer.error_feedback._payloads.values())
        if engine.optimizer.reducer.error_feedback
        else 0,
        "expected residuals": engine.optimizer.reducer.residual_bytes(engine.module.parameters()),
    }
    engine.destroy()
    return found


def weight_bytes(ledger):
    """Bytes of weights that this rank has sent in finished steps."""
    return sum(ledger.of_run.bytes["per_step", kind, link] for link in ("inter", "intra") for kind in KINDS)


def runs(cases):
    """A training for each."""
    return [train(**case) for case in cases]


def with_memory(available, secondary, recipe="zeropp-pcie"):
    """What an engine keeps where rank r has `available[r]` bytes free; or the error. And the start table."""
    real = psutil.virtual_memory
    mine = available[dist.get_rank()]
    with (
        mock.patch.object(psutil, "virtual_memory", lambda: real()._replace(available=mine)),
        mock.patch("zeropp_fp8.zero.gather.secondary.device_bytes", lambda device, ranks: 4_000_000),
    ):
        try:
            engine = engine_of(recipe, secondary)
        except zeropp_fp8.ConfigError as error:
            return str(error), None
    kept = [unit.keeps_secondary for unit in engine.optimizer.gatherer.units]
    table = printed()
    tokens = next(batches(1, 0))
    forward_backward(engine, tokens)  # all ranks agree, or they would hang
    engine.step()
    return kept, table


def refused_and_right_again(available):
    """A refusal leaves a model that another engine can have: (message, losses of it, of a model never refused)."""
    real, model = psutil.virtual_memory, llama()
    with mock.patch.object(psutil, "virtual_memory", lambda: real()._replace(available=available)):
        try:
            engine_of(secondary={"memory_gb": 1.0}, model=model)
        except zeropp_fp8.ConfigError as error:
            message = str(error)
    losses = []
    for chosen in (model, llama()):
        engine = engine_of(secondary={"memory_gb": 7e-5}, model=chosen)
        tokens = next(batches(1, dist.get_rank()))
        losses.append(loss_of(engine, tokens).item())
    return message, losses


def written_from_outside(secondary, recipe="zeropp-pcie"):
    """Losses of an engine before and after somebody writes to its weights, and of an engine that began with them."""
    import deepspeed

    tokens = next(batches(1, 0))
    losses = []

    def write(engine):
        params = [p for n, p in engine.module.named_parameters() if "layers.0" in n or "embed" in n]
        with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
            if dist.get_rank() == 0:
                for param in params:
                    param.data.mul_(1.5)

    engine = engine_of(recipe, secondary)
    losses.append(evaluated(engine, tokens))
    write(engine)
    losses.append(evaluated(engine, tokens))
    fresh = engine_of(recipe, secondary)
    write(fresh)  # before anything was gathered
    losses.append(evaluated(fresh, tokens))
    return losses


def without_an_optimizer(secondary):
    """An engine without an optimizer: losses, what it keeps, bytes of the second evaluation."""
    switch(True)
    engine = make_engine(llama(), ds_config(section("zeropp-pcie", secondary=secondary)), optimizer=None)
    tokens = next(batches(1, 0))
    losses, sent = [], []
    with torch.no_grad():
        for _ in range(2):
            losses.append(loss_of(engine, tokens).item())
            sent.append(engine.zeropp_fp8_session.ledger.outside["per_step", "inter"])
    return losses, sum(unit.keeps_secondary for unit in engine.optimizer.gatherer.units), sent[1] - sent[0]


def generated(secondary):
    """Tokens that an engine generates from codes that stay."""
    engine = engine_of(secondary=secondary)
    tokens = next(batches(1, 0))[:, :4]
    found = {}
    for weights in ("codes", "values", "sharded"):
        with zeropp_fp8.generation(engine, weights=weights) as model, torch.no_grad():
            found[weights] = model.generate(input_ids=tokens, max_new_tokens=4, do_sample=False).tolist()
    return found
