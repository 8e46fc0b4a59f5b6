"""Uniform numbers for stochastic rounding: a hash of a seed and an element's place, the same on every device.

A device's own generator gives other numbers on a CPU than on a GPU, and can only be read in order. Here the number of
an element depends on nothing but (seed, place), so that a kernel that walks the elements in any order rounds alike.

The hash is the 32-bit integer mixer "lowbias32" (C. Wellons, hash-prospector; bias 0.17 of 1000).
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B
_MASK = 0xFFFFFFFF
Numbers = TypeVar("Numbers", int, Tensor)


@dataclass(frozen=True)
class Seed:
    """62 random bits in two halves below 2^31, so that a kernel always gets 32-bit integers."""

    low: int
    high: int

    @classmethod
    def of(cls, *numbers: int) -> Seed:
        """Other bits for other numbers."""
        low, high = struct.unpack("<II", hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest())
        return cls(low & 0x7FFFFFFF, high & 0x7FFFFFFF)


def _mix(x: Numbers) -> Numbers:
    """Of uint32 in Python's or in 64-bit integers, whose products keep the low 32 bits when they overflow."""
    x = x ^ x >> 16
    x = x * MIX_1 & _MASK
    x = x ^ x >> 15
    x = x * MIX_2 & _MASK
    return x ^ x >> 16


def uniform(seed: Seed, tensor: int, numel: int, device: torch.device) -> Tensor:
    """fp32 [numel] in [0, 1), multiples of 2^-24: the noise of the tensor with this id.

    key = mix(mix(low + tensor) + high); number = mix(place * (mix(key) | 1) + key) >> 8.
    """
    key = _mix(_mix(seed.low + tensor & 0x7FFFFFFF) + seed.high & _MASK)
    places = torch.arange(numel, device=device)
    return (_mix(places * (_mix(key) | 1) + key & _MASK) >> 8).to(torch.float32) * 2.0**-24
