"""Elements of the MX formats: floats of 4, 6 and 8 bits, and 8-bit fixed point, by bit arithmetic on fp32.

A float of M mantissa bits stands, around a number v, on a grid of spacing 2^(max(exponent of v, min exponent) - M).
With k = the magnitude of v in spacings, rounded to an integer, the code without its sign is

    code = k + ((max(exponent of v, min exponent) - min exponent) << M)

for normal numbers (k = 2^M + mantissa) and subnormal ones (k = mantissa) alike, also where rounding up reaches the next
exponent. Fixed point is the case in which every number is subnormal. The sign is the input's, so -0 and what rounds to
zero from below have the code of -0; integers have none.

Source: OCP Microscaling Formats (MX) v1.0, sections 5.3 and 6.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zeropp_fp8.formats.chunks import Scratch
from zeropp_fp8.formats.packing import pack, unpack

_EXPONENT = 0x7F800000  # of an fp32 number
_ONE = 127  # the fp32 exponent field of 1.0
NAN_CODE = 0x7F  # of both 8-bit floats; the sign of a NaN is dropped, devices do not agree on it
INFINITY_CODE = 0x7C


class MiniFloatElement:
    """A float with a sign, `exponent_bits` (bias 2^(exponent_bits - 1) - 1) and `mantissa_bits`.

    Args:
        exponent_bits: 2 to 5.
        mantissa_bits: 1 or more.
        largest: the largest finite number.
        special: "none": every code is a finite number. "nan": the last code is NaN, and Inf is encoded as NaN.
            "ieee": the codes with the last exponent are Inf and NaN.
    """

    def __init__(self, exponent_bits: int, mantissa_bits: int, largest: float, special: str = "none") -> None:
        self.bits = 1 + exponent_bits + mantissa_bits
        self.mantissa_bits = mantissa_bits
        self.bias = 2 ** (exponent_bits - 1) - 1
        self.min_exponent = 1 - self.bias
        self.largest = largest
        self.special = special
        self.keeps_infinity = special == "ieee"
        self.holds_special = special != "none"  # whether NaN is a code: a NaN or Inf does not spoil its whole block

    def quantize_(self, scaled: Tensor, codes: Tensor, scratch: Scratch) -> None:
        """Write the codes of fp32 `scaled` [rows, n] to `codes`, uint8 [rows, n * bits / 8].

        Values beyond the largest are clamped to it, Inf and NaN are not. Elements without codes for them must not be
        given any. `scaled` is left as it is.
        """
        steps, anchors = self._steps(scaled, scratch)
        # How far an anchor's exponent lies above the smallest one is how far the number's does.
        anchors.sub_((_ONE + self.min_exponent + 23 - self.mantissa_bits) << 23)
        magnitudes = steps.add_(anchors.bitwise_right_shift_(23 - self.mantissa_bits))
        sign = torch.bitwise_right_shift(scaled.view(torch.int32), 32 - self.bits, out=anchors)
        wide_codes = magnitudes.bitwise_or_(sign.bitwise_and_(1 << self.bits - 1))
        if self.keeps_infinity:
            wide_codes += scaled.isinf()  # the code of Inf follows that of the largest number
            wide_codes.masked_fill_(scaled.isnan(), NAN_CODE)
        elif self.holds_special:
            wide_codes.masked_fill_(scaled.isfinite().logical_not_(), NAN_CODE)
        pack(wide_codes, self.bits, codes, scratch)

    def _steps(self, scaled: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """(rounded magnitudes in spacings, bits of the anchors), both int32, in buffers of `scratch`.

        A number's anchor is 2^23 spacings. There fp32's own spacing is the grid's, so that a sum with it is on the
        grid, and its low bits are the number of spacings.
        """
        magnitudes = torch.abs(scaled, out=scratch("magnitudes", scaled.shape)).clamp_max_(self.largest)
        anchors = scratch("anchors", scaled.shape, torch.int32)
        torch.bitwise_and(magnitudes.view(torch.int32), _EXPONENT, out=anchors)
        anchors.clamp_min_((_ONE + self.min_exponent) << 23).add_((23 - self.mantissa_bits) << 23)
        magnitudes += anchors.view(torch.float32)  # rounds to nearest, ties to even
        return magnitudes.view(torch.int32).sub_(anchors), anchors

    def dequantize(self, codes: Tensor, values: Tensor, scratch: Scratch) -> None:
        """Write the values of uint8 `codes` [rows, n * bits / 8], before scaling, to `values` (fp32 [rows, n])."""
        unpacked = unpack(codes, self.bits, scratch)
        # With its mantissa moved below fp16's and its sign to the top, a code is an fp16 number that is
        # 2^(bias - 15) times its value, subnormals included.
        halves = scratch("halves", unpacked.shape, torch.int16).copy_(unpacked)
        halves.bitwise_left_shift_(10 - self.mantissa_bits)
        if self.bias != 15:
            # Where the sign came to lie, and (int8 becomes int16) its copies above, is moved to bit 15.
            sign_at = 9 + self.bits - self.mantissa_bits
            sign = torch.bitwise_left_shift(halves, 15 - sign_at, out=scratch("signs", halves.shape, torch.int16))
            sign.bitwise_and_(-0x8000)
            halves.bitwise_and_((1 << sign_at) - 1).bitwise_or_(sign)
        values.copy_(halves.view(torch.float16))
        if self.bias != 15:
            values *= 2.0 ** (15 - self.bias)
        if self.special == "nan":
            values.masked_fill_(codes & 0x7F == NAN_CODE, math.nan)


class FixedPointElement(MiniFloatElement):
    """INT8 of the MX formats: code / 64 with codes from -127 to 127, two's complement.

    Its magnitudes are those of a float with one bit before the point, six behind it, and no exponent.
    """

    def __init__(self) -> None:
        super().__init__(exponent_bits=1, mantissa_bits=6, largest=127 / 64)
        self.min_exponent = 0

    def quantize_(self, scaled: Tensor, codes: Tensor, scratch: Scratch) -> None:
        steps, spare = self._steps(scaled, scratch)
        sign = torch.bitwise_right_shift(scaled.view(torch.int32), 31, out=spare)
        codes.view(torch.int8).copy_(steps.bitwise_xor_(sign).sub_(sign))

    def dequantize(self, codes: Tensor, values: Tensor, scratch: Scratch) -> None:
        values.copy_(codes.view(torch.int8)).mul_(1 / 64)
