"""Trainings of a script that has told torch what tensors are to be of which nobody says it: bf16, or on a device."""

from __future__ import annotations

import torch
from models import Mlp, ds_config, full_fp32_weights, make_engine
from parity_jobs import switch
from recipes import section_of

HIDDEN = 64  # the least that computes in FP8
# As torch.set_default_device("cuda"); "meta" has no numbers, so that nothing of it can go unseen.
DEFAULTS = {"nothing": (torch.float32, None), "bf16": (torch.bfloat16, None), "a device": (torch.float32, "meta")}


def trained(way, default):
    """(losses, fp32 weights) of two steps of two micro-batches of a model that makes no tensors itself.

    `way` None: stock DeepSpeed.
    """
    switch(way is not None)
    model, section = Mlp(hidden=HIDDEN), None if way is None else section_of(way)
    config = ds_config(section, "bf16", gradient_accumulation_steps=2, gradient_clipping=0.5)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    x = torch.randn(4, HIDDEN, generator=generator).bfloat16()
    y = torch.randint(0, HIDDEN, (4,), generator=generator)
    dtype, device = DEFAULTS[default]
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        engine, losses = make_engine(model, config), []
        for _ in range(4):
            losses.append(engine(x, y))
            engine.backward(losses[-1])
            engine.step()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    weights = full_fp32_weights(engine.module)
    engine.destroy()
    return [loss.item() for loss in losses], weights
