"""E8M0 scales: a power of two in one byte, shared by the 32 elements of an MX block.

    byte = shared exponent + 127, from 0 (2^-127) to 254 (2^127); 0xFF is NaN

    floor:  shared exponent = floor(log2(amax)) - emax: the element's largest exponent meets amax, and what then lies
            beyond the element's largest number is clamped (Microscaling paper, Algorithm 1; OCP MX v1.0, section 6.3)
    rceil:  the smallest one with amax <= 2^(shared exponent) * largest: nothing is clamped

Both by integer operations on the bits of amax, hence exact: rceil is floor, plus one where amax has a larger mantissa
than the element's largest number. The exponent is clamped to [-127, 127]. amax is taken over finite numbers, fp32
subnormals count as zero, and an all-zero block has the exponent -127.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zeropp_fp8.formats.chunks import Scratch

SCALE_MODES = ("rceil", "floor")
NAN_SCALE = 0xFF
_LARGEST_SCALE = 254
_SMALLEST_NORMAL = 2.0**-126
_HALF_SMALLEST_NORMAL_BITS = 0x00400000  # 2^-127 is an fp32 subnormal
# With an amax of 2^-64 or more, numbers below 2^-126 are less than 2^-24 of an element's step (E5M2's is the finest,
# 2^-31 of its largest number): they round to zero whatever the rounding, and need not be made zero first.
_SUBNORMALS_VANISH = 2.0**-64


def power_of_two(exponents: Tensor) -> Tensor:
    """fp32 2^(e - 127) for int32 exponents 0 <= e <= 254."""
    return torch.where(exponents == 0, _HALF_SMALLEST_NORMAL_BITS, exponents << 23).view(torch.float32)


class E8M0Scale:
    """Power-of-two scales.

    Args:
        largest: the element's largest finite number.
        mode: one of SCALE_MODES.
        spoiled_by_special: whether a NaN or Inf makes its block's scale NaN, because the element has no code for it.
    """

    num_bytes = 1

    def __init__(self, largest: float, mode: str, spoiled_by_special: bool) -> None:
        self.name = f"e8m0 {mode}"
        self.emax = math.frexp(largest)[1] - 1
        # Added to the bits of amax, this carries into the exponent exactly where the mantissa is above that of largest.
        mantissa = int(math.ldexp(largest, 23 - self.emax)) - 2**23
        self.carry = 2**23 - 1 - mantissa if mode == "rceil" else 0
        self.spoiled_by_special = spoiled_by_special

    def scale_(self, blocks: Tensor, scale_bytes: Tensor, scratch: Scratch) -> None:
        magnitudes = torch.abs(blocks, out=scratch("magnitudes", blocks.shape))
        amax = magnitudes.amax(dim=-1)
        usual = (amax < math.inf) & ((amax >= _SUBNORMALS_VANISH) | (amax == 0))
        spoiled = None
        if blocks.device.type != "cpu" or not usual.all().item():  # a GPU's stream is not waited for
            subnormal = magnitudes < _SMALLEST_NORMAL
            blocks.copy_(torch.where(subnormal, blocks * 0.0, blocks))  # keeps the sign
            magnitudes.masked_fill_(subnormal | (magnitudes < math.inf).logical_not_(), 0.0)
            spoiled = (amax < math.inf).logical_not_()
            amax = magnitudes.amax(dim=-1)
        scales = (amax.view(torch.int32) + self.carry >> 23).sub_(self.emax).clamp_(0, _LARGEST_SCALE)
        blocks *= power_of_two(254 - scales).unsqueeze(-1)
        if spoiled is not None and self.spoiled_by_special:
            scales.masked_fill_(spoiled, NAN_SCALE)
            blocks.masked_fill_(spoiled.unsqueeze(-1), 0.0)
        scale_bytes.copy_(scales)

    def decode(self, scale_bytes: Tensor) -> Tensor:
        scales = scale_bytes.to(torch.int32)
        return power_of_two(scales).masked_fill_(scales == NAN_SCALE, math.nan)
