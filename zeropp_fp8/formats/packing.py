"""Codes of 4 and 6 bits, packed: 2 in a byte, 4 in 3 bytes, the first code in the lowest bits.

4 bits: byte = c0 | c1 << 4. 6 bits: the 24-bit number c0 | c1 << 6 | c2 << 12 | c3 << 18 in 3 bytes, lowest first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeropp_fp8.formats.chunks import Scratch

# 16 codes of 6 bits: four groups of 24 bits fill three 32-bit words.
_SIX_BIT_RUN = 16


def pack(codes: Tensor, bits: int, packed: Tensor, scratch: Scratch) -> None:
    """Write contiguous `codes` (int8 [rows, n], overwritten) of 4 or 6 bits to `packed`, uint8 [rows, n * bits / 8].

    n is even with 4 bits, a multiple of 16 with 6 bits. Bits of a code above `bits` are ignored.
    """
    if bits == 4:
        # Two neighbours as one int16 h..hl..l, of which the last byte shall be hl: half the numbers a pass.
        pairs = codes.view(torch.int16)
        high = scratch("high bits", pairs.shape, torch.int16)
        torch.bitwise_right_shift(pairs, 4, out=high).bitwise_and_(0xF0)
        packed.copy_(pairs.bitwise_and_(0x0F).bitwise_or_(high))
        return
    groups = codes.view(torch.int32)
    spare, joined = (scratch(name, groups.shape, torch.int32) for name in ("high bits", "groups"))
    torch.bitwise_and(groups, 0x3F, out=joined)
    for place in (1, 2, 3):
        torch.bitwise_right_shift(groups, 2 * place, out=spare).bitwise_and_(0x3F << 6 * place)
        joined.bitwise_or_(spare)
    first, second, third, fourth = joined.view(codes.shape[0], -1, 4).unbind(-1)
    words = scratch("words", (codes.shape[0], codes.shape[1] // _SIX_BIT_RUN, 3), torch.int32)
    torch.bitwise_or(first, second << 24, out=words[..., 0])
    torch.bitwise_or(second >> 8, third << 16, out=words[..., 1])
    torch.bitwise_or(third >> 16, fourth << 8, out=words[..., 2])
    packed.copy_(words.view(codes.shape[0], -1).view(torch.uint8))


def unpack(packed: Tensor, bits: int, scratch: Scratch) -> Tensor:
    """The inverse of `pack`: int8 [rows, n] in a buffer of `scratch`, zeros above each code."""
    rows, count = packed.shape[0], packed.shape[1] * 8 // bits
    if bits == 4:
        # A byte hl becomes the int16 0h0l, that is two int8.
        pairs = scratch("unpacked", packed.shape, torch.int16).copy_(packed)
        high = scratch("high bits", packed.shape, torch.int16)
        torch.bitwise_left_shift(pairs, 4, out=high)
        return pairs.bitwise_or_(high).bitwise_and_(0x0F0F).view(torch.int8)
    words = scratch("words", (rows, count // _SIX_BIT_RUN, 3), torch.int32)
    words.view(rows, -1).view(torch.uint8).copy_(packed)
    first, second, third = words.unbind(-1)
    joined = scratch("groups", (rows, count // _SIX_BIT_RUN, 4), torch.int32)
    # Right shifts copy the sign down; what is masked off here is masked off, what is not lies above bit 23.
    joined[..., 0] = first
    torch.bitwise_or(first >> 24 & 0xFF, second << 8, out=joined[..., 1])
    torch.bitwise_or(second >> 16 & 0xFFFF, third << 16, out=joined[..., 2])
    torch.bitwise_right_shift(third, 8, out=joined[..., 3])
    joined = joined.view(rows, -1)
    groups, spare = (scratch(name, joined.shape, torch.int32) for name in ("unpacked", "high bits"))
    torch.bitwise_and(joined, 0x3F, out=groups)
    for place in (1, 2, 3):
        torch.bitwise_and(joined, 0x3F << 6 * place, out=spare).bitwise_left_shift_(2 * place)
        groups.bitwise_or_(spare)
    return groups.view(torch.int8)
