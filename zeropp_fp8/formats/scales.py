"""Block scales in bf16, rounded up so that no code can overflow, and in fp32: one number per block."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from zeropp_fp8.formats.chunks import Scratch

# The smallest scale of a block that is not all zero: the smallest normal bf16. Below it a scale would be a subnormal
# with fewer than 8 significant bits, and amax / max could underflow to zero.
MIN_SCALE = 2.0**-126


class BlockScale(Protocol):
    """The number that a block's elements share, as a block-scaled format needs it."""

    name: str
    num_bytes: int

    def scale_(self, blocks: Tensor, scale_bytes: Tensor, scratch: Scratch) -> None:
        """Choose the scales of fp32 `blocks` [rows, blocks, block size] and divide by them, in place.

        `scale_bytes`, uint8 [rows, num_bytes * blocks], is written. A block that its scale marks as NaN becomes zeros.
        """

    def decode(self, scale_bytes: Tensor) -> Tensor:
        """fp32 [rows, blocks] of uint8 [rows, num_bytes * blocks], in memory of its own."""


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


def divide_(blocks: Tensor, scales: Tensor) -> None:
    """fp32 `blocks` [rows, blocks, block size] divided by fp32 scales [rows, blocks], in place; zeros where NaN.

    One division a block and a product an element: an exact division an element would be the slowest instruction of a
    kernel by far. An all-zero block is multiplied by any number; a NaN block holds zeros, its scale says NaN.
    """
    blocks *= (torch.ones_like(scales) / scales.clamp_min(MIN_SCALE)).unsqueeze(-1)
    torch.nan_to_num_(blocks, nan=0.0, posinf=0.0, neginf=0.0)


class Bf16Scale:
    """`block_scales` in 2 bytes per block."""

    name = "bf16"
    num_bytes = 2

    def __init__(self, largest_code: float) -> None:
        self._largest_code = largest_code

    def scale_(self, blocks: Tensor, scale_bytes: Tensor, scratch: Scratch) -> None:
        magnitudes = torch.abs(blocks, out=scratch("magnitudes", blocks.shape))
        scales = block_scales(magnitudes.amax(dim=-1), self._largest_code)
        # The scales are exact in bf16, so their upper halves are it. A cast would also do, but CPU and CUDA cast NaN to
        # different bits, and payloads are compared byte for byte.
        scale_bytes.copy_(
            scales.view(torch.int16)[:, 1::2].clone(memory_format=torch.contiguous_format).view(torch.uint8)
        )
        divide_(blocks, scales)

    def decode(self, scale_bytes: Tensor) -> Tensor:
        # clone() gives the bytes an aligned storage of their own; a view as bf16 needs one.
        return scale_bytes.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()


class Fp32Scale:
    """The block's largest magnitude as it is, in 4 bytes per block; for elements whose largest number is 1.

    NaN for a block that holds NaN or Inf.
    """

    name = "fp32"
    num_bytes = 4

    def scale_(self, blocks: Tensor, scale_bytes: Tensor, scratch: Scratch) -> None:
        scales = torch.abs(blocks, out=scratch("magnitudes", blocks.shape)).amax(dim=-1)
        scales.masked_fill_((scales < math.inf).logical_not_(), math.nan)
        scale_bytes.copy_(scales.view(torch.uint8))
        divide_(blocks, scales)

    def decode(self, scale_bytes: Tensor) -> Tensor:
        return scale_bytes.clone(memory_format=torch.contiguous_format).view(torch.float32)
