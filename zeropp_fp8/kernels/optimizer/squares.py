"""Sums of squares of FP8 codes, tile by tile: one pass over one byte per element.

    partial[t] = sum over tile t of number(code)^2                  fp32; NaN codes give NaN

The caller multiplies with the square of the tile's scale and adds the partial sums up, so the result does not depend on
the order of programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.kernels.elements import numbers_of
from zeropp_fp8.kernels.launching import Kernel
from zeropp_fp8.kernels.wire.launch_tables import interpreted, native_float8

_TILES = 4  # a program's, so that 4,096 elements are under way at once


@Kernel
@triton.jit
def squares_kernel(
    codes_ptr,
    partial_ptr,
    num_tiles,
    ELEMENT: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """One program: TILES tiles."""
    tiles = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    there = tiles < num_tiles
    places = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    codes = tl.load(codes_ptr + places, mask=there[:, None], other=0)
    numbers = numbers_of(codes, ELEMENT, NATIVE_FP8, TILES, TILE)
    tl.store(partial_ptr + tiles, tl.sum(numbers * numbers, axis=1), mask=there)


def squares_of_tiles(codes: Tensor, element: str, tile: int) -> Tensor:
    """fp32 [codes / tile]: of uint8 `codes`, a multiple of `tile` (a power of two) of them, contiguous."""
    num_tiles = codes.numel() // tile
    partial = torch.empty(num_tiles, dtype=torch.float32, device=codes.device)
    if num_tiles:
        squares_kernel[(-(-num_tiles // _TILES),)](
            codes,
            partial,
            num_tiles,
            ELEMENT=element,
            TILE=tile,
            TILES=_TILES,
            NATIVE_FP8=native_float8(codes.device) and not interpreted(),
            enable_fp_fusion=False,
        )
    return partial
