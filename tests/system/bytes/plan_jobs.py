"""Jobs on ranks whose bytes the cost model is compared with."""

from __future__ import annotations

import torch
from frozen_models import with_adapters
from models import ds_config, llama, make_engine, section, train
from running import switch

import zeropp_fp8

LINEAR = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]


def lora_bytes(cases, shape, rank, targets=LINEAR):
    """For each (recipe, fields, micro-batches) what LoRA sends in its third step, and what this rank holds then.

    "sent" {link: bytes of all ranks}; "weights", "secondary", "states" bytes; "base" and "adapters" parameters.
    """
    switch(True)
    return [_lora_bytes(*case, shape, rank, targets) for case in cases]


def _lora_bytes(recipe, fields, micro_batches, shape, rank, targets):
    model = llama(**shape)
    base = sum(p.numel() for p in model.parameters())
    model.enable_input_require_grads()  # as with activation checkpointing
    config = ds_config(section(recipe, **fields), "bf16", gradient_accumulation_steps=micro_batches)
    engine = make_engine(with_adapters(model, r=rank, target_modules=targets), config)

    def sent():
        report = zeropp_fp8.wire_report(engine, total=True)
        kinds = report["per_step"].values()
        return {link: sum(kind[link] for kind in kinds) * report["steps"] for link in ("inter", "intra")}

    train(engine, 2, micro_batches, vocab=shape["vocab"])
    before = sent()
    train(engine, 1, micro_batches, vocab=shape["vocab"])
    after, params = sent(), list(engine.module.parameters())
    states = [t for state in engine.optimizer.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    states = [t for t in states if t.dim()] + list(engine.optimizer.fp32_partitioned_groups_flat)
    secondary = [unit.secondary for unit in engine.optimizer.gatherer.units if unit.secondary is not None]
    found = {
        "sent": {link: after[link] - before[link] for link in after},
        "weights": sum(p.ds_tensor.nbytes for p in params),
        "secondary": sum(tensor.nbytes for tensor in secondary),
        "states": sum(tensor.nbytes for tensor in states),
        "base": base,
        "adapters": sum(p.ds_numel for p in params) - base,
    }
    engine.destroy()
    return found
