"""INT8 and INT4 elements: symmetric, two's complement, the most negative code unused."""

from __future__ import annotations

import torch
from torch import Tensor

from zeropp_fp8.formats.rounding import round_to_integer_


class IntegerElement:
    """`bits`-wide signed integers in [-(2^(bits-1) - 1), 2^(bits-1) - 1]; 4-bit codes are packed two to a byte.

    In a packed byte the element with the even index is the low nibble.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.largest = float(2 ** (bits - 1) - 1)
        self.codes_per_byte = 8 // bits

    def quantize_(self, scaled: Tensor, rounding: str, noise: Tensor | None) -> Tensor:
        """fp32 values with |v| <= largest (up to division error) -> uint8 codes [..., n / codes_per_byte]."""
        rounded = round_to_integer_(scaled, rounding, noise).clamp_(-self.largest, self.largest)
        codes = rounded.to(torch.int8).view(torch.uint8)
        if self.bits == 8:
            return codes
        return torch.bitwise_or(codes[..., 0::2].bitwise_and(0xF), codes[..., 1::2].bitwise_left_shift(4))

    def dequantize(self, codes: Tensor) -> Tensor:
        """uint8 codes -> fp32 values, before scaling."""
        if self.bits == 8:
            return codes.view(torch.int8).float()
        out = torch.empty(*codes.shape, 2, dtype=torch.float32, device=codes.device)
        # Shifting a nibble to the top of an int8 and back extends its sign.
        out[..., 0] = codes.bitwise_left_shift(4).view(torch.int8).bitwise_right_shift(4)
        out[..., 1] = codes.view(torch.int8).bitwise_right_shift(4)
        return out.view(*codes.shape[:-1], codes.shape[-1] * 2)
