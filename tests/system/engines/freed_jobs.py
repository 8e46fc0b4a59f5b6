"""Jobs that say what is left of engines after destroy()."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload
from deepspeed.utils import safe_get_full_fp32_param
from freezing_jobs import exact_loss
from frozen_models import evaluate, with_adapters
from models import batches, section
from recipes import section_of
from running import Spec, loss_of, trained

from zeropp_fp8.zero.offload import _begin_alone

QLORA, FROZEN, STOCK = "qlora", "qlora, no optimizer", "stock"


def engine_of(kind, zero_init=False):
    """An engine that has worked. `kind`: one of recipes.WAYS or the three above."""
    if kind in (QLORA, FROZEN):
        chosen, dtype = section("qlora", frozen={"block_size": 32}), "bf16"
    else:
        chosen, dtype = None if kind == STOCK else section_of(kind), "fp32"
    adapted = (lambda model: with_adapters(model.bfloat16())) if kind == QLORA else None
    optimizer = None if kind == FROZEN else "adamw"
    engine = Spec(chosen, dtype, optimizer=optimizer, zero_init=zero_init, adapted=adapted).engine()
    evaluate(engine) if kind == FROZEN else trained(engine, batches(2, dist.get_rank()))
    return engine


def parts_of(engine):
    """{name: weak reference} of an engine, its model, and what else in it holds memory."""
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    parts = {"engine": engine, "model": engine.module, "parameter": next(engine.module.parameters())}
    parts |= {"stage": engine.optimizer, "offload": offload}
    if hasattr(engine, "zeropp_fp8_session"):  # not one of stock
        gatherer = offload.gatherer
        parts |= {"session": engine.zeropp_fp8_session, "gatherer": gatherer, "unit": gatherer.units[0]}
        for path in ("reduction.reducer", "hooks.order", "gradients.store", "states.compressed"):
            owner, name = path.split(".")
            part = getattr(getattr(engine.optimizer, owner, None), name, None)  # an engine that evaluates has none
            if part is not None:
                parts[name] = part
    return {name: weakref.ref(part) for name, part in parts.items()}


def alive(parts):
    gc.collect()
    return [name for name, part in parts.items() if part() is not None]


def live_bytes():
    """Of all tensors that Python knows."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def dropped(kind, zero_init=False):
    """Return what is alive of engines that nobody keeps, one after the other, and the bytes that each has left behind.

    And of the second, before that: what is alive while the engine is kept, its bytes before and after destroy(); then
    what is alive while the model is kept, the bytes of that, and of the model's shards and buffers.
    """
    left, held = [], [live_bytes()]
    for _ in range(2):
        engine = engine_of(kind, zero_init)
        parts, model = parts_of(engine), engine.module
        before = live_bytes() - held[-1]
        engine.destroy()
        of_engine = alive(parts), before, live_bytes() - held[-1]
        del engine
        tensors = (*(getattr(p, "ds_tensor", p) for p in model.parameters()), *model.buffers())
        storages = {t.data_ptr(): t for t in (tensor.untyped_storage() for tensor in tensors)}
        weights = sum(storage.nbytes() for storage in storages.values())
        del tensors, storages
        of_model = alive(parts), live_bytes() - held[-1], weights
        del model
        left.append(alive(parts))
        held.append(live_bytes())
    return (left, [after - before for before, after in pairwise(held)]), of_model, of_engine


def left_by(kinds):
    """{kind: `dropped`}."""
    return {kind: dropped(kind) for kind in kinds}


def made_under_zero_init(kinds):
    return {kind: dropped(kind, zero_init=True)[0] for kind in kinds}


def run_alone(kind):
    """Of a model before destroy(), after it and in a second engine: losses, and what DeepSpeed and the model hold."""
    tokens = next(batches(1, dist.get_rank()))
    engine = engine_of(kind)
    model, losses = engine.module, [exact_loss(engine, tokens)]
    engine.destroy()
    del engine
    gc.collect()
    with torch.no_grad():
        losses.append(loss_of(model, tokens).item())
        on_stack = len(parameter_offload.FWD_MODULE_STACK)
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            pass  # drops what the forward has gathered
        second = Spec(section_of(kind)).engine(model)
        losses.append(loss_of(second, tokens).item())
    return losses, on_stack, _begin_alone in model._forward_pre_hooks.values()


def said_by_what_is_freed():
    """Return what an engine that is kept says of its states and of its checkpoints."""
    engine = engine_of("FP8 states")
    engine.destroy()
    said = []
    for ask in (lambda: safe_get_full_fp32_param(next(engine.module.parameters())), engine.optimizer.state_dict):
        try:
            ask()
        except RuntimeError as error:
            said.append(str(error))
    return said


def destroyed_twice(kind):
    """As DeepSpeed allows: its engine destroys its optimizer too. What is left of the model's entry on the stack."""
    engine = engine_of(kind)
    engine.optimizer.destroy()
    engine.destroy()
    return parameter_offload.FWD_MODULE_STACK.count(engine.module)
