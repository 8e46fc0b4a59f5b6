"""Trainings of a script that has told torch what tensors are to be of which nobody says it: bf16, or on a device."""

from __future__ import annotations

import itertools

import torch
from models import Mlp
from recipes import section_of
from running import Spec, on_engine, run, step

HIDDEN = 64  # the least that computes in FP8
# As torch.set_default_device("cuda"); "meta" has no numbers, so that nothing of it can go unseen.
DEFAULTS = {"nothing": (torch.float32, None), "bf16": (torch.bfloat16, None), "a device": (torch.float32, "meta")}


def set_default(name):
    dtype, device = DEFAULTS[name]
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)


def trained(way, default):
    """Two steps of two micro-batches of a model that makes no tensors itself; `way` None: stock DeepSpeed."""
    model = Mlp(hidden=HIDDEN)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    x = torch.randn(4, HIDDEN, generator=generator).bfloat16()
    y = torch.randint(0, HIDDEN, (4,), generator=generator)
    config = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    spec = Spec(way and section_of(way), "bf16", config, lambda: model)
    try:
        set_default(default)
        ended = on_engine(lambda engine: set_default("nothing"))
        return run(spec, [*[step] * 4, ended], ("masters",), data=itertools.repeat((x, y)))
    finally:
        set_default("nothing")
