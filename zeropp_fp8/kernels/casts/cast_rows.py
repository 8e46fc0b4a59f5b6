"""A matrix to FP8 with a scale per row, plain, and a scale per column, transposed.

    codes[r, c] = FP8(x[r, c] / scale[r]),    codes_t[c, r] = FP8(x[r, c] / scale_t[c])

The amax of a column needs the whole matrix. So a first pass leaves the amaxes of the rows and columns of each tile, a
small kernel makes scales of them, and a second pass casts. The plain copy alone takes one pass, over whole rows.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.kernels.casts.matrices import (
    ALIGNMENT,
    CastPlan,
    Launch,
    amax_of,
    cast_plan,
    codes_of,
    load_tile,
    numbers_of,
    reciprocal,
    scale_of_amax,
    store_tile,
    tile_of_program,
    tiles,
)
from zeropp_fp8.kernels.launching import PLANS, Kernel, Plan

CAST = Launch(tile_rows=128, tile_columns=64, num_warps=4)
# The amax pass writes 4 bytes for each row and column of its tiles, 1/32 of the bf16 elements it reads.
_AMAX_TILE = 128
_AMAX_WARPS = 8
# Rows and columns a program makes scales for, and partial amaxes that it reads at a time.
_SCALES = 128
_PARTIALS = 16
# Elements that a program holds where it has whole rows: up to 32 per thread.
_ROWS_NUMEL = 4096
_LARGEST_ROW = 16384


@Kernel
@triton.jit
def tile_amax_kernel(matrix_ptr, row_amax_ptr, column_amax_ptr, rows, columns, FORM: tl.constexpr):
    """One program: one tile's amaxes, into fp32 [tiles in a row, rows] and [tiles in a column, columns]."""
    first_row, first_column = tile_of_program(columns, FORM.rows, FORM.columns)
    x = numbers_of(load_tile(matrix_ptr, first_row, first_column, rows, columns, FORM.rows, FORM.columns))
    if FORM.plain:
        row = first_row + tl.arange(0, FORM.rows)
        pointers = row_amax_ptr + (first_column // FORM.columns).to(tl.int64) * rows + row
        tl.store(pointers, amax_of(x, 1), mask=row < rows)
    if FORM.transposed:
        column = first_column + tl.arange(0, FORM.columns)
        pointers = column_amax_ptr + (first_row // FORM.rows).to(tl.int64) * columns + column
        tl.store(pointers, amax_of(x, 0), mask=column < columns)


@triton.jit
def scales_of_partials(
    amax_ptr, scale_ptr, first, count, num_partials, LARGEST: tl.constexpr, SCALES: tl.constexpr, PARTIALS: tl.constexpr
):
    """scale[i] for SCALES indices i from `first`, of the maxima over p of fp32 amax [num_partials, count]."""
    index = first + tl.arange(0, SCALES)
    amax = tl.zeros((SCALES,), tl.float32)
    for start in range(0, num_partials, PARTIALS):
        partial = start + tl.arange(0, PARTIALS)
        pointers = amax_ptr + partial.to(tl.int64)[:, None] * count + index[None, :]
        some = tl.load(pointers, mask=(partial < num_partials)[:, None] & (index < count)[None, :], other=0.0)
        amax = tl.maximum(amax, tl.max(some, axis=0))
    tl.store(scale_ptr + index, scale_of_amax(amax, LARGEST), mask=index < count)


@Kernel
@triton.jit
def scales_kernel(
    row_amax_ptr,
    column_amax_ptr,
    scale_ptr,
    scale_t_ptr,
    rows,
    columns,
    FORM: tl.constexpr,
    SCALES: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """The first programs make scales of rows, the others scales of columns."""
    program = tl.program_id(0)
    row_programs = 0
    if FORM.plain:
        row_programs = (rows + SCALES - 1) // SCALES
        if program < row_programs:
            partials = (columns + FORM.columns - 1) // FORM.columns
            scales_of_partials(
                row_amax_ptr, scale_ptr, program * SCALES, rows, partials, FORM.largest, SCALES, PARTIALS
            )
    if FORM.transposed:  # noqa: SIM102 (a branch at compile time, and one of the program)
        if program >= row_programs:
            first = (program - row_programs) * SCALES
            partials = (rows + FORM.rows - 1) // FORM.rows
            scales_of_partials(column_amax_ptr, scale_t_ptr, first, columns, partials, FORM.largest, SCALES, PARTIALS)


@Kernel
@triton.jit
def cast_rows_kernel(
    matrix_ptr,
    plain_ptr,
    transposed_ptr,
    scale_ptr,
    scale_t_ptr,
    rows,
    columns,
    plain_length,
    transposed_length,
    FORM: tl.constexpr,
):
    """One program: one tile, with known scales fp32 [rows] and [columns]."""
    first_row, first_column = tile_of_program(columns, FORM.rows, FORM.columns)
    values = load_tile(matrix_ptr, first_row, first_column, rows, columns, FORM.rows, FORM.columns)
    if FORM.plain:
        row = first_row + tl.arange(0, FORM.rows)
        inverse = reciprocal(tl.load(scale_ptr + row, mask=row < rows, other=1.0))
        codes = codes_of(numbers_of(values), inverse[:, None], FORM.largest, FORM.native_fp8)
        store_tile(plain_ptr, codes, first_row, first_column, rows, plain_length)
    if FORM.transposed:
        column = first_column + tl.arange(0, FORM.columns)
        inverse = reciprocal(tl.load(scale_t_ptr + column, mask=column < columns, other=1.0))
        codes = codes_of(numbers_of(tl.trans(values)), inverse[:, None], FORM.largest, FORM.native_fp8)
        store_tile(transposed_ptr, codes, first_column, first_row, columns, transposed_length)


@Kernel
@triton.jit
def cast_whole_rows_kernel(
    matrix_ptr, plain_ptr, scale_ptr, rows, columns, plain_length, transposed_length, FORM: tl.constexpr
):
    """One program: whole rows of up to FORM.columns elements."""
    first_row = tl.program_id(0) * FORM.rows
    x = numbers_of(load_tile(matrix_ptr, first_row, 0, rows, columns, FORM.rows, FORM.columns))
    scale = scale_of_amax(amax_of(x, 1), FORM.largest)
    row = first_row + tl.arange(0, FORM.rows)
    tl.store(scale_ptr + row, scale, mask=row < rows)
    codes = codes_of(x, reciprocal(scale)[:, None], FORM.largest, FORM.native_fp8)
    store_tile(plain_ptr, codes, first_row, 0, rows, plain_length)


def cast_rows(
    matrix: Tensor, dtype: torch.dtype, plain: bool, transposed: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Cast a matrix with a scale per row of each copy.

    Arguments are those of `cast_tensor`, and there may be no copy to make.

    Returns:
        (codes [R, C rounded up to a multiple of 16], codes [C, R rounded up], contiguous; their scales, fp32 [R, 1] and
        [C, 1]), None for a copy that is not wanted.
    """
    if not (plain or transposed):
        return None, None, None, None
    rows, columns = matrix.shape
    key = matrix.shape, matrix.dtype, matrix.device, dtype, plain, transposed, (False, False), ALIGNMENT
    if not transposed and columns <= _LARGEST_ROW:
        plan = cast_plan(cast_whole_rows_kernel, _whole_rows(columns), *key)
        codes, _ = plan.empty()
        scale = _empty(matrix, rows, 1)
        plan.launch(matrix, codes, scale)
        return codes, None, scale, None
    plan = cast_plan(cast_rows_kernel, CAST, *key)
    find_amaxes, make_scales = _plans_of_scales(plan, rows, columns)
    codes, codes_t = plan.empty()
    scale = scale_t = row_amax = column_amax = None
    if plain:
        scale, row_amax = _empty(matrix, rows, 1), _empty(matrix, -(-columns // _AMAX_TILE), rows)
    if transposed:
        scale_t, column_amax = _empty(matrix, columns, 1), _empty(matrix, -(-rows // _AMAX_TILE), columns)
    find_amaxes(matrix, row_amax, column_amax)
    # The matrix stands for what is not made; nothing touches it.
    make_scales(*(matrix if tensor is None else tensor for tensor in (row_amax, column_amax, scale, scale_t)))
    plan.launch(matrix, codes, codes_t, scale, scale_t)
    return codes, codes_t, scale, scale_t


def _empty(matrix: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=matrix.device)


@functools.lru_cache(PLANS)
def _plans_of_scales(plan: CastPlan, rows: int, columns: int) -> tuple[Plan, Plan]:
    """Launches before a cast: one finds amaxes of tiles, the other one makes scales of these."""
    form = dataclasses.replace(plan.form, rows=_AMAX_TILE, columns=_AMAX_TILE)
    programs = (triton.cdiv(rows, _SCALES) if form.plain else 0) + (
        triton.cdiv(columns, _SCALES) if form.transposed else 0
    )
    amax_grid = (tiles(rows, columns, _AMAX_TILE, _AMAX_TILE),)
    constants = {"FORM": form, "SCALES": _SCALES, "PARTIALS": _PARTIALS, "num_warps": 4, "enable_fp_fusion": False}
    return (
        Plan(tile_amax_kernel, amax_grid, (rows, columns), {"FORM": form, "num_warps": _AMAX_WARPS}),
        Plan(scales_kernel, (programs,), (rows, columns), constants),
    )


@functools.cache
def _whole_rows(columns: int) -> Launch:
    # A row of the padded copy must fit, too: its length is at most the next power of two from 16 on.
    width = max(16, triton.next_power_of_2(columns))
    tile_rows = max(1, _ROWS_NUMEL // width)
    return Launch(tile_rows, width, max(4, tile_rows * width // 1024))
