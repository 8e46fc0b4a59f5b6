"""FP8 elements (OFP8): E4M3 (largest 448, no Inf) and E5M2 (largest 57344)."""

from __future__ import annotations

import torch
from torch import Tensor

from zeropp_fp8.formats.rounding import round_to_integer_


class Float8Element:
    """8-bit floats. Nearest rounding is torch's cast; other modes round on the element's own grid first."""

    bits = 8
    codes_per_byte = 1

    def __init__(self, dtype: torch.dtype, mantissa_bits: int, min_exponent: int) -> None:
        self.dtype = dtype
        self.largest = torch.finfo(dtype).max
        self.mantissa_bits = mantissa_bits
        self.min_exponent = min_exponent

    def quantize_(self, scaled: Tensor, rounding: str, noise: Tensor | None) -> Tensor:
        """fp32 values with |v| <= largest (up to division error) -> uint8 codes of the same shape."""
        if rounding != "nearest":
            # The grid spacing around v is 2^(exponent - mantissa_bits); frexp's exponent is one more than IEEE's.
            exponent = torch.frexp(scaled).exponent.sub_(1).clamp_min_(self.min_exponent)
            spacing = torch.ldexp(torch.ones_like(scaled), exponent.sub_(self.mantissa_bits))
            scaled = round_to_integer_(scaled / spacing, rounding, noise).mul_(spacing)
        # The clamp is needed: an unscaled cast beyond the largest value gives NaN on a GPU and saturates on a CPU.
        return scaled.clamp_(-self.largest, self.largest).to(self.dtype).view(torch.uint8)

    def dequantize(self, codes: Tensor) -> Tensor:
        """uint8 codes -> fp32 values, before scaling."""
        return codes.view(self.dtype).float()


def e4m3() -> Float8Element:
    """Sign, 4 exponent bits (bias 7), 3 mantissa bits: normals from 2^-6, subnormals from 2^-9."""
    return Float8Element(torch.float8_e4m3fn, mantissa_bits=3, min_exponent=-6)


def e5m2() -> Float8Element:
    """Sign, 5 exponent bits (bias 15), 2 mantissa bits: normals from 2^-14, subnormals from 2^-16."""
    return Float8Element(torch.float8_e5m2, mantissa_bits=2, min_exponent=-14)
