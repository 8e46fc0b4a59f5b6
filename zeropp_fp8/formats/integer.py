"""Integer elements: symmetric, two's complement, the most negative code unused."""

from __future__ import annotations

from torch import Tensor

from zeropp_fp8.formats.chunks import Scratch
from zeropp_fp8.formats.packing import pack, unpack


class IntegerElement:
    """`bits`-wide signed integers in [-(2^(bits-1) - 1), 2^(bits-1) - 1]."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.largest = float(2 ** (bits - 1) - 1)
        self.keeps_infinity = False

    def quantize_(self, scaled: Tensor, codes: Tensor, scratch: Scratch) -> None:
        """Write the codes of fp32 values with |v| <= largest (up to division error) to `codes` (uint8).

        `codes` is [rows, n * bits / 8]; `scaled`, [rows, n], is overwritten.
        """
        scaled.round_()  # not beyond the largest code: |v| is at most largest * (1 + 2^-22)
        pack(scaled, self.bits, codes, scratch)

    def dequantize(self, codes: Tensor, values: Tensor, scratch: Scratch) -> None:
        """Write the values of uint8 codes, before scaling, to `values` (fp32)."""
        numbers, sign = unpack(codes, self.bits, scratch), 1 << self.bits - 1
        # Flipping that bit of a code adds as much to its value.
        values.copy_(numbers if self.bits == 8 else numbers.bitwise_xor_(sign).sub_(sign))
