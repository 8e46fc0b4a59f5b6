"""Block scales: one bf16 number a block, rounded up so that no code can overflow."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The smallest scale of a block that is not all zero: the smallest normal bf16. Below it a scale would be a subnormal
# with fewer than 8 significant bits, and amax / max could underflow to zero.
MIN_SCALE = 2.0**-126


def round_up_to_bf16_(values: Tensor) -> Tensor:
    """Each positive finite fp32 value becomes the smallest bf16 number >= it, in place."""
    values.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)
    return values


def block_scales(amax: Tensor, largest_code: float) -> Tensor:
    """Scales for blocks with largest magnitudes `amax` (fp32), as fp32 numbers that are exact in bf16.

    scale = round_up_bf16(amax / largest_code), hence amax / scale <= largest_code. An all-zero block has scale 0; a
    block with NaN or Inf has scale NaN, so that all of it decodes to NaN and overflow checks see it.
    """
    # Divided by a tensor on purpose: torch on CUDA turns a division by a Python number into a multiplication by its
    # reciprocal, which is not correctly rounded, and the bytes would differ from the CPU's.
    scale = round_up_to_bf16_((amax / torch.full_like(amax, largest_code)).clamp_min_(MIN_SCALE))
    scale.masked_fill_(amax == 0, 0.0)
    return scale.masked_fill_((amax < math.inf).logical_not_(), math.nan)
