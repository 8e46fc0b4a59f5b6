"""A matrix to FP8 with a scale per 1 x 128 block or per 128 x 128 tile, plain and transposed, in one read.

    blocks:  codes[r, c] = FP8(x[r, c] / scale[r, c // 128]),          amax along a row
             codes_t[c, r] = FP8(x[r, c] / scale_t[c, r // 128]),      amax along a column
    tiles:   codes[r, c] = codes_t[c, r] = FP8(x[r, c] / scale[r // 128, c // 128])

A program has a whole 128 x 128 tile, hence all groups of both copies that touch it: nothing is read twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.kernels.casts.cast_tensor import cast_tile
from zeropp_fp8.kernels.casts.matrices import (
    BLOCK,
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
)
from zeropp_fp8.kernels.launching import Kernel

# A thread holds 64 values. Left alone, the compiler takes 153 registers per thread for blocks in both copies, and one
# program would run on a multiprocessor at a time; with 128 (and 3 registers spilled) it is two.
CAST = Launch(tile_rows=BLOCK, tile_columns=BLOCK, num_warps=8, max_registers=128)
TILE_SCALE_ALIGNMENT = tl.constexpr(4)  # the rows of scales per tile are padded to a multiple of this; see operand.py


@triton.jit
def store_tile_scale(scale_ptr, scale, tile_row, tile_column, columns, scale_length, SIZE: tl.constexpr):
    """scale[tile_row, tile_column] of fp32 [tile rows, scale_length]; the last one of a row writes 1 to the padding."""
    place = tl.arange(0, TILE_SCALE_ALIGNMENT)
    count = tl.where((tile_column + 1) * SIZE >= columns, scale_length - tile_column, 1)
    pointers = scale_ptr + tile_row.to(tl.int64) * scale_length + tile_column + place
    tl.store(pointers, tl.where(place == 0, scale, 1.0), mask=place < count)


@Kernel
@triton.jit
def cast_blocks_kernel(
    matrix_ptr,
    plain_ptr,
    transposed_ptr,
    scale_ptr,
    scale_t_ptr,
    rows,
    columns,
    plain_length,
    transposed_length,
    scale_length,
    scale_t_length,
    TILES: tl.constexpr,
    FORM: tl.constexpr,
):
    """One program: one tile of 128 x 128.

    Scales of blocks are fp32 [blocks, rows] and, transposed, [blocks, columns]; those of tiles (TILES) [tile rows,
    scale_length] and the like.
    """
    first_row, first_column = tile_of_program(columns, FORM.rows, FORM.columns)
    values = load_tile(matrix_ptr, first_row, first_column, rows, columns, FORM.rows, FORM.columns)
    if TILES:
        scale = scale_of_amax(amax_of(tl.max(tl.abs(numbers_of(values)), axis=1), 0), FORM.largest)
        tile_row, tile_column = first_row // FORM.rows, first_column // FORM.rows
        if FORM.plain:
            store_tile_scale(scale_ptr, scale, tile_row, tile_column, columns, scale_length, FORM.rows)
        if FORM.transposed:
            store_tile_scale(scale_t_ptr, scale, tile_column, tile_row, rows, scale_t_length, FORM.rows)
        cast_tile(
            values, reciprocal(scale), plain_ptr, transposed_ptr, first_row, first_column, rows, columns, plain_length,
            transposed_length, FORM,
        )  # fmt: skip
    else:
        if FORM.plain:
            x = numbers_of(values)
            scale = scale_of_amax(amax_of(x, 1), FORM.largest)
            row = first_row + tl.arange(0, FORM.rows)
            tl.store(scale_ptr + (first_column // FORM.rows).to(tl.int64) * rows + row, scale, mask=row < rows)
            codes = codes_of(x, reciprocal(scale)[:, None], FORM.largest, FORM.native_fp8)
            store_tile(plain_ptr, codes, first_row, first_column, rows, plain_length)
        if FORM.transposed:
            scale = scale_of_amax(amax_of(numbers_of(values), 0), FORM.largest)
            column = first_column + tl.arange(0, FORM.rows)
            pointers = scale_t_ptr + (first_row // FORM.rows).to(tl.int64) * columns + column
            tl.store(pointers, scale, mask=column < columns)
            # Read back what this program wrote: Triton then moves the tile to the other layout before it is encoded, in
            # 16 bits (see cast_tensor.py `cast_tile`), which it does not where the scale comes out of a reduction.
            tl.debug_barrier()
            scale = tl.load(pointers, mask=column < columns, other=1.0)
            codes = codes_of(numbers_of(tl.trans(values)), reciprocal(scale)[:, None], FORM.largest, FORM.native_fp8)
            store_tile(transposed_ptr, codes, first_column, first_row, columns, transposed_length)


def cast_blocks(
    matrix: Tensor, dtype: torch.dtype, plain: bool, transposed: bool, tiles: bool = False
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Cast a matrix with a scale per 1 x 128 elements along each copy's rows, or per 128 x 128.

    Arguments are those of `cast_tensor`, and there may be no copy to make.

    Returns:
        (codes [R, C rounded up to a multiple of 128], codes [C, R rounded up], contiguous; their scales, fp32
        [R, ceil(C / 128)] and [C, ceil(R / 128)], the first axis contiguous; of tiles [ceil(R / 128), ceil(C / 128)]
        and its transpose, whose rows are padded), None for a copy that is not wanted.
    """
    if not (plain or transposed):
        return None, None, None, None
    (rows, columns), device = matrix.shape, matrix.device
    scale = _empty_scale(rows, columns, tiles, device) if plain else None
    scale_t = _empty_scale(columns, rows, tiles, device) if transposed else None
    lengths = scale.stride(0) if tiles and plain else 0, scale_t.stride(0) if tiles and transposed else 0
    wanted = dtype, plain, transposed, (False, False), BLOCK, lengths
    plan = cast_plan(cast_blocks_kernel, CAST, matrix.shape, matrix.dtype, device, *wanted, TILES=tiles)
    codes, codes_t = plan.empty()
    plan.launch(matrix, codes, codes_t, scale, scale_t)
    return codes, codes_t, scale, scale_t


def _empty_scale(rows: int, summed: int, tiles: bool, device: torch.device) -> Tensor:
    blocks, alignment = -(-summed // BLOCK), TILE_SCALE_ALIGNMENT.value
    if not tiles:
        return torch.empty_strided((rows, blocks), (1, rows), dtype=torch.float32, device=device)
    length = -(-blocks // alignment) * alignment
    return torch.empty(-(-rows // BLOCK), length, dtype=torch.float32, device=device)[:, :blocks]
