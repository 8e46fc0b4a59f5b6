"""INT2 and INT3: levels at odd multiples of half a step, without a zero; for gradients with error feedback.

Level k of 2^b is (k - 2^(b-1) + 1/2) * scale: of 2 bits -1.5, -0.5, 0.5 and 1.5 scales. With so few levels a zero is
one too many, and the largest number of a block is cut off: a scale that left it in would make the step too coarse for
all others. What is cut off is not lost where the error is added to the next gradient (`gradients.error_feedback`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeropp_fp8.formats.block_scaled import BlockScaledFormat
from zeropp_fp8.formats.chunks import Scratch
from zeropp_fp8.formats.packing import pack, unpack

# Scales to the largest magnitude of a block, by bits: the best of steps of 0.25 (2 bits) and 0.5 (3 bits).
_SCALES = {2: 2.25, 3: 4.5}
HALF_STEP_NAMES = ("int2", "int3")


class HalfStepElement:
    """`bits`-wide codes k of the numbers k - 2^(bits-1) + 1/2; the first code of a byte is in its lowest bits."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.largest = _SCALES[bits]
        self._levels_below_zero = 2 ** (bits - 1)
        self.keeps_infinity = False

    def quantize_(self, scaled: Tensor, codes: Tensor, scratch: Scratch) -> None:
        """Write the codes of fp32 `scaled` [rows, n], overwritten, to `codes`, uint8 [rows, n * bits / 8]."""
        half = self._levels_below_zero
        scaled.floor_().clamp_(-half, half - 1).add_(half)
        pack(scratch("codes", scaled.shape, torch.int8).copy_(scaled), self.bits, codes, scratch)

    def dequantize(self, codes: Tensor, values: Tensor, scratch: Scratch) -> None:
        """Write the values of uint8 codes, before scaling, to `values` (fp32)."""
        values.copy_(unpack(codes, self.bits, scratch)).sub_(self._levels_below_zero - 0.5)


class HalfStepFormat(BlockScaledFormat):
    """Half steps with a bf16 scale per block, to the nearest level; the upper one where both are as near.

    Raises:
        ValueError: another name, or a block size that does not fill whole bytes.
    """

    def __init__(self, name: str, block_size: int | None = 64, hadamard: bool = False) -> None:
        super().__init__(name, HalfStepElement(int(name.removeprefix("int"))), block_size, hadamard)
