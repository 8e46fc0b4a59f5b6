"""Trainings of a script that has torch make bf16 tensors where nobody says what they are to be."""

from __future__ import annotations

import contextlib

import torch
from models import ds_config, full_fp32_weights, llama, make_engine, train
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
