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
from models import batches, build, ds_config, llama, make_engine, section, train
from recipes import section_of
from running import loss_of, switch

from zeropp_fp8.zero.offload import _begin_alone

QLORA, FROZEN, STOCK = "qlora", "qlora, no optimizer", "stock"


def engine_of(kind, zero_init=False):
    """An engine that has worked. `kind`: one of recipes.WAYS or the three above."""
    if kind in (QLORA, FROZEN):
        config = ds_config(section("qlora", frozen={"block_size": 32}), "bf16")
    else:
        config = ds_config(None if kind == STOCK else section_of(kind))
    model = build(llama, config, zero_init)
    if kind == QLORA:
        model = with_adapters(model.bfloat16())
    engine = make_engine(model, config, optimizer=None if kind == FROZEN else "adamw")
    evaluate(engine) if kind == FROZEN else train(engine, 2)
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
    """What is alive of engines that nobody keeps, one after the other, and the bytes that each has left behind."""
    left, held = [], [live_bytes()]
    for _ in range(2):
        engine = engine_of(kind, zero_init)
        parts = parts_of(engine)
        engine.destroy()
        del engine
        left.append(alive(parts))
        held.append(live_bytes())
    return left, [after - before for before, after in pairwise(held)]


def model_kept(kind):
    """What is alive of an engine whose model is kept, the bytes of that, and of the model's shards and buffers."""
    before = live_bytes()
    engine = engine_of(kind)
    parts, model = parts_of(engine), engine.module
    engine.destroy()
    del engine
    left, held = alive(parts), live_bytes() - before
    tensors = (*(p.ds_tensor for p in model.parameters()), *model.buffers())
    storages = {t.data_ptr(): t for t in (tensor.untyped_storage() for tensor in tensors)}
    return left, held, sum(storage.nbytes() for storage in storages.values())


def engine_kept(kind):
    """What is alive of an engine that is kept itself, and its bytes before and after."""
    before = live_bytes()
    engine = engine_of(kind)
    parts, held = parts_of(engine), live_bytes() - before
    engine.destroy()
    return alive(parts), held, live_bytes() - before


def left_by(kinds):
    """{kind: what the three jobs above say}."""
    switch(True)
    return {kind: (dropped(kind), model_kept(kind), engine_kept(kind)) for kind in kinds}


def made_under_zero_init(kinds):
    switch(True)
    return {kind: dropped(kind, zero_init=True) for kind in kinds}


def run_alone(kind):
    """Of a model before destroy(), after it and in a second engine: losses, and what DeepSpeed and the model hold."""
    switch(True)
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
        second = make_engine(model, ds_config(section_of(kind)))
        losses.append(loss_of(second, tokens).item())
    return losses, on_stack, _begin_alone in model._forward_pre_hooks.values()


def said_by_what_is_freed():
    """What an engine that is kept says of its states and of its checkpoints."""
    switch(True)
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
    switch(True)
    engine = engine_of(kind)
    engine.optimizer.destroy()
    engine.destroy()
    return parameter_offload.FWD_MODULE_STACK.count(engine.module)
