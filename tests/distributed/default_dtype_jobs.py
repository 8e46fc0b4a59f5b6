"""Trainings of a script that has told torch what tensors are to be of which nobody says it: bf16, or on a device."""

from __future__ import annotations

import contextlib

import torch
from models import Mlp, ds_config, full_fp32_weights, llama, make_engine, train
from parity_jobs import switch
from recipes import section_of


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def losses_and_weights(way, default, accumulation):
    """Of an engine that is made and trains while this is the default; `way` None: stock DeepSpeed."""
    switch(way is not None)
    model, section = llama(), None if way is None else section_of(way)
    config = ds_config(section, "bf16", gradient_accumulation_steps=accumulation, gradient_clipping=0.5)
    with default_dtype(default):
        engine = make_engine(model, config)
        losses = train(engine, 2, accumulation)
    weights = full_fp32_weights(engine.module)
    engine.destroy()
    return losses, weights


def differences(ways, accumulation):
    """{way: (losses with fp32 as the default, with bf16, names of weights that differ)}."""
    found = {}
    for way in ways:
        (losses, weights), (others, other_weights) = (
            losses_and_weights(way, default, accumulation) for default in (torch.float32, torch.bfloat16)
        )
        found[way] = losses, others, [name for name in weights if not torch.equal(weights[name], other_weights[name])]
    return found


def losses_with_default_device(ways, devices):
    """{way: losses with each of `devices` as the default}; of a model that makes no tensors itself."""
    found = {}
    for way in ways:
        found[way] = []
        for device in devices:
            switch(way is not None)
            model, section = Mlp(hidden=64), None if way is None else section_of(way)
            generator = torch.Generator().manual_seed(torch.distributed.get_rank())
            x, y = torch.randn(4, 64, generator=generator), torch.randint(0, 64, (4,), generator=generator)
            torch.set_default_device(device)
            try:
                engine, losses = make_engine(model, ds_config(section, "bf16")), []
                for _ in range(3):
                    losses.append(engine(x.bfloat16(), y))
                    engine.backward(losses[-1])
                    engine.step()
            finally:
                torch.set_default_device(None)
            found[way].append([loss.item() for loss in losses])
            engine.destroy()
    return found
