"""Constant fp32 tables, made once for each device."""

from __future__ import annotations

import functools
import struct
from itertools import pairwise

import torch
from torch import Tensor


@functools.cache
def fp32_table(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """fp32 [n] of numbers, each rounded to nearest.

    Not by torch.tensor: weights are also encoded while a model is made under `deepspeed.zero.Init`, which lets torch's
    constructors give 16-bit floats whatever dtype they are asked for.
    """
    raw = bytearray(struct.pack(f"={len(numbers)}f", *numbers))
    return torch.frombuffer(raw, dtype=torch.float32).to(device)


@functools.cache
def fp32_limits(levels: tuple[float, ...], device: torch.device) -> Tensor:
    """fp32 [n - 1]: the middles between neighbours of n levels in order, for torch.bucketize.

    It gives a number beyond the limit i the code i + 1, one equal to it the code i: the lower level.
    """
    return fp32_table(tuple((lower + upper) / 2 for lower, upper in pairwise(levels)), device)
