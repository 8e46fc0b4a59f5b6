"""Uniform numbers for stochastic rounding: a hash of a seed and an element's place, the same on every device.

A device's own generator gives other numbers on a CPU than on a GPU, and can only be read in order. Here the number of
an element depends on nothing but (seed, row, column), so that the torch code and a kernel that walks the elements in
any order make the same payload, and a payload can be made again from its seed.

The hash is the 32-bit integer mixer "lowbias32" (C. Wellons, hash-prospector; bias 0.17 of 1000).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp_fp8.formats.chunks import Scratch

MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B
ROW_STEP = 0x9E3779B9  # 2^32 / golden ratio: keys of neighbouring rows lie far apart
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Seed:
    """62 random bits in two halves below 2^31, so that a kernel always gets 32-bit integers."""

    low: int
    high: int

    def of_tensor(self, index: int) -> Seed:
        """The seed of the tensor with this index in a payload of several."""
        return Seed((self.low + index) & 0x7FFFFFFF, self.high)


def _mix(x: int) -> int:
    x ^= x >> 16
    x = x * MIX_1 & _MASK
    x ^= x >> 15
    x = x * MIX_2 & _MASK
    return x ^ x >> 16


def _signed(x: int) -> int:
    """The int32 with the same bits as a uint32."""
    return x - (1 << 32) if x >= 1 << 31 else x


def _xor_shifted_(x: Tensor, shift: int, spare: Tensor) -> None:
    """x ^= x >> shift on int32 as on uint32; torch shifts arithmetically, so the sign's copies are masked off."""
    torch.bitwise_right_shift(x, shift, out=spare).bitwise_and_(_MASK >> shift)
    x.bitwise_xor_(spare)


def _mix_(x: Tensor, spare: Tensor) -> Tensor:
    """`_mix` on int32 in place."""
    _xor_shifted_(x, 16, spare)
    x *= MIX_1
    _xor_shifted_(x, 15, spare)
    x *= _signed(MIX_2)
    _xor_shifted_(x, 16, spare)
    return x


def uniform(seed: Seed, rows: range, columns: range, scratch: Scratch) -> Tensor:
    """fp32 [rows, columns] in [0, 1), multiples of 2^-24, in a buffer of `scratch`.

    key = mix(mix(low ^ row * ROW_STEP) + high); number = mix(column * (mix(key) | 1) + key) >> 8.
    """
    keys = [_mix(_mix(seed.low ^ (row * ROW_STEP & _MASK)) + seed.high & _MASK) for row in rows]
    steps = [_mix(key) | 1 for key in keys]
    starts = [key + columns.start * step & _MASK for key, step in zip(keys, steps)]
    shape = (len(rows), len(columns))
    counters, spare = (scratch(name, shape, torch.int32) for name in ("counters", "noise"))
    device = counters.device
    places = torch.arange(len(columns), dtype=torch.int32, device=device)
    torch.mul(places, torch.tensor([[_signed(step)] for step in steps], dtype=torch.int32, device=device), out=counters)
    counters += torch.tensor([[_signed(start)] for start in starts], dtype=torch.int32, device=device)
    _mix_(counters, spare)
    return spare.view(torch.float32).copy_(counters.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF)).mul_(2.0**-24)
