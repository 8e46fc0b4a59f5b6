"""One training on either backend: DeepSpeed's ZeRO-3, and torch's fully_shard."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fsdp2_jobs import adamw, full, loss_of, sharded
from models import batches, section
from ranks import attempt
from running import Spec, evaluate, run, step
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from zeropp_fp8 import fsdp2

HELD_OUT = torch.arange(64).view(2, 32)
BACKENDS = ("zero3", "fsdp2")


def trained(backend, recipe, fields=None, steps=4, evaluates=False, seed=1):
    """(losses, weights, bytes per step by kind and link); a recipe of None is the backend's own."""
    data = list(batches(steps, dist.get_rank(), seed=seed))
    way = _by_zero3 if backend == "zero3" else _by_fsdp2
    return way(recipe, fields or {}, data, evaluates)


def _by_zero3(recipe, fields, data, evaluates):
    spec = Spec(section(recipe, **fields)) if recipe else Spec(leaves=(LlamaDecoderLayer,))
    events = [step for _ in data]
    if evaluates:
        events = [each for one in events for each in (one, evaluate(HELD_OUT))]
    trace = run(spec, events, ("weights", "bytes") if recipe else ("weights",), data)
    return trace.losses[:: 2 if evaluates else 1], trace.weights, trace.bytes


def _by_fsdp2(recipe, fields, data, evaluates):
    model, losses = sharded(reshard_after_forward=True), []  # as ZeRO-3: the root's weights too
    if recipe:
        fsdp2.apply(model, recipe, **fields)
    optimizer = adamw(model)
    for tokens in data:
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if evaluates:
            with torch.no_grad():
                loss_of(model, HELD_OUT)
            model.reshard()
    return losses, full(model), fsdp2.wire_report(model)["per_step"] if recipe else None


def on_both(**how):
    """`trained` by backend."""
    return {backend: trained(backend, **how) for backend in BACKENDS}


def several(backend, runs):
    """`trained` for each of several sets of arguments."""
    return [trained(backend, **how) for how in runs]


def refused(backend, recipe, fields):
    """The error of a section."""
    return attempt(lambda: trained(backend, recipe, fields, steps=1))
