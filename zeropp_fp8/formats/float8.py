"""FP8 elements (OFP8).

E4M3: 4 exponent bits (bias 7), 3 mantissa bits; normals from 2^-6, subnormals from 2^-9, largest 448, no Inf.
E5M2: 5 exponent bits (bias 15), 2 mantissa bits; normals from 2^-14, subnormals from 2^-16, largest 57344.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeropp_fp8.formats.chunks import Scratch

MATRIX_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of what is cast
SMALLEST_SCALE = 2.0**-126  # the smallest normal fp32 number: 1 / scale is finite


def scale_of_amax(amax: Tensor, dtype: torch.dtype, smallest: float = SMALLEST_SCALE) -> Tensor:
    """fp32 multipliers of decoding for groups with largest finite magnitudes `amax` (fp32, any shape)."""
    # Divided by a tensor on purpose: torch on CUDA multiplies with the rounded reciprocal of a Python number.
    scale = (amax / torch.full_like(amax, torch.finfo(dtype).max)).clamp_min_(smallest)
    return scale.masked_fill_(amax == 0, 1.0)


class Float8Element:
    """8-bit floats, rounded by torch's cast."""

    bits = 8
    keeps_infinity = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.largest = torch.finfo(dtype).max

    def quantize_(self, scaled: Tensor, codes: Tensor, scratch: Scratch) -> None:
        """Write the codes of fp32 values with |v| <= largest (up to division error) to `codes` (uint8).

        `codes` and `scaled` have the same shape; `scaled` is overwritten.
        """
        # The clamp is needed: an unscaled cast beyond the largest value gives NaN on a GPU and saturates on a CPU.
        codes.view(self.dtype).copy_(scaled.clamp_(-self.largest, self.largest))

    def dequantize(self, codes: Tensor, values: Tensor, scratch: Scratch) -> None:
        """Write the values of uint8 codes, before scaling, to `values` (fp32)."""
        e4m3 = self.dtype == torch.float8_e4m3fn
        if codes.device.type != "cpu" or _largest(codes, scratch) >= (0x7F if e4m3 else 0x7D):  # a NaN
            values.copy_(codes.view(self.dtype))
            return
        # torch's casts on a CPU take 2.5 (E4M3) and 0.3 (E5M2) ns an element, this 0.3 and 0.2. An E5M2 code is the
        # upper half of an fp16 number. An E4M3 code shifted left by 7 is an fp16 number with the exponent bias 15
        # instead of 7, so it is 2^-8 of the value, subnormals included; int16 repeats the sign once too often.
        halves = scratch("halves", codes.shape, torch.int16).copy_(codes.view(torch.int8))
        halves.bitwise_left_shift_(7 if e4m3 else 8)
        if e4m3:
            halves.bitwise_and_(~0x4000)
        values.copy_(halves.view(torch.float16))
        if e4m3:
            values *= 256.0


def _largest(codes: Tensor, scratch: Scratch) -> int:
    """The largest code, signs left out. Inf and NaN, which encoding never writes, come after all finite numbers."""
    return torch.bitwise_and(codes, 0x7F, out=scratch("unsigned", codes.shape, torch.uint8)).max().item()


ELEMENTS = {"fp8_e4m3": Float8Element(torch.float8_e4m3fn), "fp8_e5m2": Float8Element(torch.float8_e5m2)}
