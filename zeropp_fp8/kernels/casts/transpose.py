"""Codes [R, C] -> codes [C, R], a byte each: one read, one write.

torch copies a transposed matrix element by element; here a tile goes through shared memory, and both sides are accessed
16 bytes at a time.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.kernels.casts.matrices import Launch, load_tile, store_tile, tile_of_program, tiles
from zeropp_fp8.kernels.launching import PLANS, Kernel, Plan

TRANSPOSE = Launch(tile_rows=128, tile_columns=128, num_warps=8)


@Kernel
@triton.jit
def transpose_kernel(
    codes_ptr, transposed_ptr, rows, columns, transposed_length, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr
):
    """One program: one tile. Beyond `rows` the transposed copy's rows are filled with zeros."""
    first_row, first_column = tile_of_program(columns, TILE_ROWS, TILE_COLUMNS)
    codes = load_tile(codes_ptr, first_row, first_column, rows, columns, TILE_ROWS, TILE_COLUMNS)
    store_tile(transposed_ptr, tl.trans(codes), first_column, first_row, columns, transposed_length)


def transpose(codes: Tensor, transposed: Tensor) -> None:
    """Transpose bytes.

    Args:
        codes: uint8 or FP8 [R, C], contiguous.
        transposed: of the same dtype, [L, C] of strides (1, L), R <= L <= R rounded up to 128; zeros beyond R.
    """
    _plan(codes.shape, transposed.shape[0], codes.device)(codes, transposed)


@functools.lru_cache(PLANS)
def _plan(shape: torch.Size, transposed_length: int, device: torch.device) -> Plan:
    form = TRANSPOSE
    constants = {"TILE_ROWS": form.tile_rows, "TILE_COLUMNS": form.tile_columns, **form.options()}
    grid = (tiles(*shape, form.tile_rows, form.tile_columns),)
    return Plan(transpose_kernel, grid, (*shape, transposed_length), constants)
