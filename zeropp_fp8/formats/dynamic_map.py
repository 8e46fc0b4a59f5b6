"""The signed 8-bit dynamic type: 256 fp32 levels in [-1, 1], dense around zero.

"Dynamic tree quantization" (Dettmers et al., arXiv 2110.02861, section 2): behind the sign, E zero bits are an exponent
of 10^-E, a one ends them, and the bits that are left are a fraction: one of 2^(6 - E) equal parts of [0.1, 1], by its
middle. With E = 0 ... 6 that is 127 magnitudes; 0 and 1 make 256 levels:

    0,  1,  and  +-10^-E * (0.1 + 0.9 * (j + 1/2) / 2^(6 - E))    for 0 <= E <= 6, 0 <= j < 2^(6 - E)

Level 127 is 0, level 255 is 1, level 0 is -0.993: there is no -1. A number takes the nearest level; one that lies in
the middle between two takes the lower one.
"""

from __future__ import annotations

import functools
import struct
from itertools import pairwise

import torch
from torch import Tensor

from zeropp_fp8.formats.tables import fp32_limits

ZERO_CODE = 127
_FRACTION_BITS = 6


def _round(number: float) -> float:
    """To fp32."""
    return struct.unpack("f", struct.pack("f", number))[0]


@functools.cache
def dynamic_levels() -> tuple[float, ...]:
    """The 256 levels in order, each an fp32 number.

    Rounded where bitsandbytes' create_dynamic_map rounds, so that the levels are its levels and not their neighbours:
    the ends of the parts (counted from the nearer end of [0.1, 1]), their middles, and the product with 10^-E.
    """
    first = _round(0.1)
    levels = [0.0, 1.0]
    for exponent in range(_FRACTION_BITS + 1):
        parts = 2 ** (_FRACTION_BITS - exponent)
        step = _round(1.0 - first) / parts
        ends = [
            _round(first + step * j if j < (parts + 1) // 2 else 1.0 - step * (parts - j)) for j in range(parts + 1)
        ]
        for lower, upper in pairwise(ends):
            magnitude = _round(_round(10.0**-exponent) * _round((lower + upper) / 2))
            levels += [magnitude, -magnitude]
    return tuple(sorted(levels))


def nearest_dynamic(values: Tensor) -> Tensor:
    """int32 codes of fp32 values, which must be finite, of the same shape."""
    return torch.bucketize(values, fp32_limits(dynamic_levels(), values.device), out_int32=True)
