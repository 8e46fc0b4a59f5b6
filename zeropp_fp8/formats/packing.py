"""Codes of 4 and 6 bits, packed: the first code in the lowest bits.

4 bits: 2 codes in a byte, c0 | c1 << 4. 6 bits: 4 codes as such a number of 24 bits in 3 bytes, lowest first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeropp_fp8.formats.chunks import Scratch


def pack(codes: Tensor, bits: int, packed: Tensor, scratch: Scratch) -> None:
    """Write contiguous `codes` (int8 [rows, n], overwritten) to `packed`, uint8 [rows, n * bits / 8].

    n is a multiple of 4 with 6 bits, of 2 with 4. Bits of a code above `bits` are ignored.
    """
    if bits == 4:
        # Two neighbours as one int16 h..hl..l, of which the last byte shall be hl: half the numbers a pass.
        pairs = codes.view(torch.int16)
        high = scratch("high bits", pairs.shape, torch.int16)
        torch.bitwise_right_shift(pairs, 4, out=high).bitwise_and_(0xF0)
        packed.copy_(pairs.bitwise_and_(0x0F).bitwise_or_(high))
        return
    # Four codes, a byte each, as one int32.
    groups, mask = codes.view(torch.int32), (1 << bits) - 1
    joined, spare = (scratch(name, groups.shape, torch.int32) for name in ("groups", "high bits"))
    torch.bitwise_and(groups, mask, out=joined)
    for place in (1, 2, 3):
        torch.bitwise_right_shift(groups, (8 - bits) * place, out=spare).bitwise_and_(mask << bits * place)
        joined.bitwise_or_(spare)
    packed.copy_(joined.view(torch.uint8).view(*joined.shape, 4)[..., :3].flatten(1))


def unpack(packed: Tensor, bits: int, scratch: Scratch) -> Tensor:
    """The inverse of `pack`: int8 [rows, n] in a buffer of `scratch`, zeros above each code."""
    if bits == 4:
        # A byte hl becomes the int16 0h0l, that is two int8.
        pairs = scratch("unpacked", packed.shape, torch.int16).copy_(packed)
        high = scratch("high bits", packed.shape, torch.int16)
        torch.bitwise_left_shift(pairs, 4, out=high)
        return pairs.bitwise_or_(high).bitwise_and_(0x0F0F).view(torch.int8)
    low, middle, high = packed.view(packed.shape[0], -1, 3).to(torch.int32).unbind(-1)
    joined = low | middle << 8 | high << 16
    mask, (groups, spare) = (1 << bits) - 1, (scratch(n, joined.shape, torch.int32) for n in ("unpacked", "high bits"))
    torch.bitwise_and(joined, mask, out=groups)
    for place in (1, 2, 3):
        torch.bitwise_and(joined, mask << bits * place, out=spare).bitwise_left_shift_((8 - bits) * place)
        groups.bitwise_or_(spare)
    return groups.view(torch.int8)
