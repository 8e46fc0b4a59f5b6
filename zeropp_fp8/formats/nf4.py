"""NF4 (4-bit NormalFloat) elements: 16 levels that hold equal shares of normally distributed numbers.

QLoRA (arXiv 2305.14314), section 3 and appendix E: the levels are quantiles of the normal distribution, made separately
below and above zero so that zero is one of them, and scaled to [-1, 1]. A block's scale is its largest magnitude:

    value = scale * LEVELS[code]        code 0 is -1, code 7 is 0, code 15 is 1

A number times the reciprocal of its block's scale takes the nearest level: the limits are the middles between
neighbours in fp32, and a number equal to a limit takes the lower level. These are the decision thresholds of
bitsandbytes' kernels.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from zeropp_fp8.formats.block_scaled import BlockScaledFormat
from zeropp_fp8.formats.chunks import Scratch
from zeropp_fp8.formats.packing import pack
from zeropp_fp8.formats.scales import Fp32Scale
from zeropp_fp8.formats.tables import fp32_limits, fp32_table

NF4_BLOCK = 64
# arXiv 2305.14314, appendix E.
NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@functools.cache
def _pairs_of_levels(device: torch.device) -> Tensor:
    """int64 [256]: the two fp32 levels that a byte stands for, side by side."""
    levels = [(NF4_LEVELS[byte & 0xF], NF4_LEVELS[byte >> 4]) for byte in range(256)]
    return fp32_table(tuple(level for pair in levels for level in pair), device).view(torch.int64)


class NF4Element:
    """4-bit codes, two to a byte; the element with the even index is the low nibble."""

    bits = 4
    largest = 1.0
    keeps_infinity = False

    def quantize_(self, scaled: Tensor, codes: Tensor, scratch: Scratch) -> None:
        """Write the codes of fp32 values with |v| <= 1 (up to rounding) to `codes` (uint8 [rows, n / 2])."""
        places = scratch("places", scaled.shape, torch.int32)
        torch.bucketize(scaled.contiguous(), fp32_limits(NF4_LEVELS, scaled.device), out_int32=True, out=places)
        pack(places, self.bits, codes, scratch)

    def dequantize(self, codes: Tensor, values: Tensor, scratch: Scratch) -> None:
        """Write the levels of uint8 codes [rows, n / 2] to `values` (fp32 [rows, n])."""
        places = scratch("places", codes.shape, torch.int32).copy_(codes)
        pairs = scratch("pairs", codes.shape, torch.int64)
        torch.index_select(_pairs_of_levels(codes.device), 0, places.view(-1), out=pairs.view(-1))
        values.copy_(pairs.view(torch.float32))


class NF4Format(BlockScaledFormat):
    """NF4 with an fp32 scale per block.

    Args:
        block_size: elements a scale is shared by, even; None for one scale per row (per tensor).
        hadamard: False; there for the options of all formats to be the same.

    Raises:
        ValueError: the rotation, or a block size that does not exist.
        TypeError: a block size that is no int.
    """

    def __init__(self, block_size: int | None = NF4_BLOCK, hadamard: bool = False) -> None:
        if hadamard:
            raise ValueError("nf4: has no rotation; leave hadamard out, or use int4")
        super().__init__("nf4", NF4Element(), block_size, scale=Fp32Scale())
