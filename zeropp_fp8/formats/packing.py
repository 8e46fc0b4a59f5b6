"""Codes of 2, 3, 4 and 6 bits, packed: the first code in the lowest bits.

2 and 4 bits: 4 or 2 codes in a byte, c0 | c1 << bits | ... 3 and 6 bits: 8 or 4 codes as such a number of 24 bits in 3
bytes, lowest first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeropp_fp8.formats.chunks import Scratch

# 16 codes of 6 bits: four groups of 24 bits fill three 32-bit words.
_SIX_BIT_RUN = 16


def pack(codes: Tensor, bits: int, packed: Tensor, scratch: Scratch) -> None:
    """Write contiguous `codes` (int8 [rows, n], overwritten) to `packed`, uint8 [rows, n * bits / 8].

    n is a multiple of 4 with 2 bits, of 8 with 3, of 2 with 4, of 16 with 6. Bits of a code above `bits` are ignored.
    """
    if bits in (2, 3):
        _pack_fours(codes.view(torch.int32), bits, packed, scratch)
        return
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
    if bits in (2, 3):
        return _unpack_fours(packed, bits, scratch)
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


def _pack_fours(groups: Tensor, bits: int, packed: Tensor, scratch: Scratch) -> None:
    """`pack` of codes of 2 or 3 bits, of which each int32 of `groups` holds four, a byte each."""
    mask, (joined, spare) = (1 << bits) - 1, (scratch(name, groups.shape, torch.int32) for name in ("groups", "spare"))
    torch.bitwise_and(groups, mask, out=joined)
    for place in (1, 2, 3):
        torch.bitwise_right_shift(groups, (8 - bits) * place, out=spare).bitwise_and_(mask << bits * place)
        joined.bitwise_or_(spare)
    if bits == 2:
        packed.copy_(joined)
        return
    pairs = joined.view(groups.shape[0], -1, 2)
    numbers = torch.bitwise_or(pairs[..., 0], pairs[..., 1] << 12)
    packed.copy_(numbers.view(torch.uint8).view(*numbers.shape, 4)[..., :3].flatten(1))


def _unpack_fours(packed: Tensor, bits: int, scratch: Scratch) -> Tensor:
    """The inverse of `_pack_fours`: int8 [rows, n]."""
    mask, rows = (1 << bits) - 1, packed.shape[0]
    if bits == 2:
        joined = scratch("groups", packed.shape, torch.int32).copy_(packed)
    else:
        low, middle, high = packed.view(rows, -1, 3).to(torch.int32).unbind(-1)
        joined = scratch("groups", (rows, low.shape[1], 2), torch.int32)
        torch.bitwise_or(low, (middle & 0xF) << 8, out=joined[..., 0])
        torch.bitwise_or(middle >> 4, high << 4, out=joined[..., 1])
        joined = joined.view(rows, -1)
    groups, spare = (scratch(name, joined.shape, torch.int32) for name in ("unpacked", "spare"))
    torch.bitwise_and(joined, mask, out=groups)
    for place in (1, 2, 3):
        torch.bitwise_and(joined, mask << bits * place, out=spare).bitwise_left_shift_((8 - bits) * place)
        groups.bitwise_or_(spare)
    return groups.view(torch.int8)
