"""Codes of 2 to 7 bits, packed: the codes that fill whole bytes are one number, the first in its lowest bits.

4 bits: 2 codes in a byte, c0 | c1 << 4. 6 bits: 4 codes in 3 bytes, the lowest byte first. 8 bits are not packed.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from zeropp_fp8.formats.chunks import Scratch

_GROUPS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # as many codes, a byte each, as one number


def group_of(bits: int) -> tuple[int, int]:
    """(codes, bytes): the fewest codes that fill whole bytes."""
    return 8 // math.gcd(8, bits), bits // math.gcd(8, bits)


@functools.cache
def _joins(bits: int) -> list[tuple[int, int]]:
    """For codes, pairs and fours: (bits of every second one where it is joined to the one below; how far it moves)."""
    count = group_of(bits)[0]
    masks = {n: sum((1 << n * bits) - 1 << at for at in range(n * bits, count * 8, n * 16)) for n in (1, 2, 4)}
    return [(mask, n * (8 - bits)) for n, mask in masks.items() if n < count]


def pack(numbers: Tensor, bits: int, packed: Tensor, scratch: Scratch) -> None:
    """Write the last bits of integers [rows, n] to `packed`, uint8 [rows, n * bits / 8]; n: of whole groups."""
    if bits == 8:
        packed.view(torch.int8).copy_(numbers)
        return
    count, size = group_of(bits)
    codes = scratch("codes", numbers.shape, torch.int8).copy_(numbers).bitwise_and_((1 << bits) - 1)
    groups = codes.view(_GROUPS[count])
    upper = scratch("upper codes", groups.shape, groups.dtype)
    for mask, shift in _joins(bits):
        torch.bitwise_right_shift(groups, shift, out=upper).bitwise_and_(mask)
        groups.sub_(upper, alpha=(1 << shift) - 1)
    if size == 1:  # a cast is faster
        packed.copy_(groups)
    else:
        packed.unflatten(1, (-1, size)).copy_(codes.view(torch.uint8).unflatten(1, (-1, count))[..., :size])


def unpack(packed: Tensor, bits: int, scratch: Scratch) -> Tensor:
    """The inverse of `pack`: int8 [rows, n], zeros above each code, in a buffer of `scratch`; of 8 bits a view."""
    if bits == 8:
        return packed.view(torch.int8)
    count, size = group_of(bits)
    shape = packed.shape[0], packed.shape[1] // size
    groups, upper = (scratch(name, shape, _GROUPS[count]) for name in ("unpacked", "upper codes"))
    if size == 1:
        groups.copy_(packed)
    else:
        groups.zero_().view(torch.uint8).unflatten(1, (-1, count))[..., :size] = packed.unflatten(1, (-1, size))
    for mask, shift in reversed(_joins(bits)):
        groups.add_(torch.bitwise_and(groups, mask, out=upper), alpha=(1 << shift) - 1)
    return groups.view(torch.int8)
