"""Jobs on ranks whose bytes the cost model is compared with."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from frozen_models import with_adapters
from models import batches, llama, section
from running import Spec, run, see, step

import zeropp_fp8

LINEAR = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]


def lora_bytes(cases, shape, rank, targets=LINEAR):
    """For each (recipe, fields, micro-batches) what LoRA sends in its third step, and what this rank holds then.

    "sent" {link: bytes of all ranks}; "weights", "secondary", "states" bytes; "base" and "adapters" parameters.
    """
    return [_lora_bytes(*case, shape, rank, targets) for case in cases]


def _lora_bytes(recipe, fields, micro_batches, shape, rank, targets):
    def adapted(model):
        model.enable_input_require_grads()  # as with activation checkpointing
        return with_adapters(model, r=rank, target_modules=targets)

    config, model = {"gradient_accumulation_steps": micro_batches}, functools.partial(llama, **shape)
    whole = {"weights": {"difference": "none"}}  # bytes of differences are those of what a step has changed
    spec = Spec(section(recipe, **whole, **fields), "bf16", config, model, adapted=adapted)
    steps, base = [step] * micro_batches, sum(p.numel() for p in model().parameters())
    data = batches(10**6, dist.get_rank(), vocab=shape["vocab"])
    before, after, held = run(spec, [*steps * 2, see(_sent), *steps, see(_sent), see(_held)], data=data).seen
    adapters = held.pop("parameters") - base
    return {"sent": {link: after[link] - before[link] for link in after}, "base": base, "adapters": adapters, **held}


def _sent(engine):
    report = zeropp_fp8.wire_report(engine, total=True)
    kinds = report["per_step"].values()
    return {link: sum(kind[link] for kind in kinds) * report["steps"] for link in ("inter", "intra")}


def _held(engine):
    params = list(engine.module.parameters())
    states = [t for state in engine.optimizer.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    states = [t for t in states if t.dim()] + list(engine.optimizer.fp32_partitioned_groups_flat)
    secondary = [unit.secondary for unit in engine.optimizer.gatherer.units if unit.secondary is not None]
    copies = {tensor.untyped_storage().data_ptr() for tensor in secondary}
    rest_there = [p.ds_tensor.nbytes for p in params if p.ds_tensor.untyped_storage().data_ptr() in copies]
    return {
        "weights": sum(p.ds_tensor.nbytes for p in params),
        "secondary": sum(tensor.nbytes for tensor in secondary) - sum(rest_there),
        "states": sum(tensor.nbytes for tensor in states),
        "parameters": sum(p.ds_numel for p in params),
    }
