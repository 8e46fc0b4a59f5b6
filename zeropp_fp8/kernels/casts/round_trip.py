"""A matrix rounded to an MX format, along its rows, its columns, or both: one read, up to two writes.

    rows[m, :]    = the blocks of 32 of x[m, :], each quantized and dequantized        [M, K]
    columns[k, :] = the blocks of 32 of x[:, k], each quantized and dequantized        [K, M], that is transposed

Both results have the summed axis last, as operands of matrix products: of a weight [out, in] `rows` is for the forward
and `columns` for the gradient of the input. This emulates MX arithmetic on hardware without it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.formats import MXFormat
from zeropp_fp8.formats.base import check_encodable
from zeropp_fp8.kernels.elements import narrowed
from zeropp_fp8.kernels.launching import Kernel
from zeropp_fp8.kernels.mx_elements import mx_round, mx_scale_blocks, mx_scale_values, mx_times_scales
from zeropp_fp8.kernels.wire.launch_tables import KernelFormat

# 64 numbers of 16 bits are 128 bytes, a cache line, on both sides; a thread holds 32 numbers.
SIDE = 64
NUM_WARPS = 4


@triton.jit
def round_tile(x, LIMIT: tl.constexpr, FORMAT: tl.constexpr, SIDE: tl.constexpr):
    """[SIDE, SIDE] rounded in blocks of 32 along its second axis, as fp32."""
    element: tl.constexpr = FORMAT.element
    mode: tl.constexpr = FORMAT.scale
    blocks: tl.constexpr = SIDE * SIDE // 32
    x = tl.reshape(x, (blocks, 32)).to(tl.float32)
    scales, scaled = mx_scale_blocks(x, element, mode)
    numbers = mx_round(scaled, element, FORMAT.native_fp8)
    values = mx_times_scales(numbers, mx_scale_values(scales), LIMIT, element)
    return tl.reshape(values, (SIDE, SIDE))


@Kernel
@triton.jit
def round_trip_kernel(
    matrix_ptr,
    rows_ptr,
    columns_ptr,
    num_rows,
    num_columns,
    ALONG_ROWS: tl.constexpr,
    ALONG_COLUMNS: tl.constexpr,
    LIMIT: tl.constexpr,
    FORMAT: tl.constexpr,
    SIDE: tl.constexpr,
):
    """One program: a tile of SIDE x SIDE; tiles of the same rows follow each other."""
    tiles_across = tl.cdiv(num_columns, SIDE)
    row = tl.program_id(0) // tiles_across * SIDE
    column = tl.program_id(0) % tiles_across * SIDE
    places = tl.arange(0, SIDE)
    rows, columns = row + places, column + places
    # Only the offset of a tile needs 64 bits. A size divisible by 16 is known as such to the compiler, which then sees
    # that 16 neighbours are masked alike.
    ok = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    offset = row.to(tl.int64) * num_columns + column
    local = places[:, None] * num_columns + places[None, :]
    x = tl.load(matrix_ptr + offset + local, mask=ok, other=0.0)
    dtype: tl.constexpr = matrix_ptr.dtype.element_ty
    if ALONG_ROWS:
        values = round_tile(x, LIMIT, FORMAT, SIDE)
        tl.store(rows_ptr + offset + local, narrowed(values, dtype, FORMAT.interpreted), mask=ok)
    if ALONG_COLUMNS:
        values = round_tile(tl.trans(x), LIMIT, FORMAT, SIDE)
        ok = (columns[:, None] < num_columns) & (rows[None, :] < num_rows)
        offset = column.to(tl.int64) * num_rows + row
        local = places[:, None] * num_rows + places[None, :]
        tl.store(columns_ptr + offset + local, narrowed(values, dtype, FORMAT.interpreted), mask=ok)


def round_trip(
    matrix: Tensor, mx_format: MXFormat, along_rows: bool = True, along_columns: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Quantize and dequantize a matrix along one axis or both; equal to `MXFormat.round_trip`.

    Args:
        matrix: [M, K], contiguous, fp32, bf16 or fp16, of any size, also empty.
        mx_format: what to round to.
        along_rows: return blocks along K.
        along_columns: return blocks along M.

    Returns:
        (`mx_format.round_trip(matrix)` [M, K] or None, `mx_format.round_trip(matrix.t())` [K, M] or None), contiguous,
        of the matrix's dtype.

    Raises:
        ValueError: not a contiguous matrix.
        TypeError: another dtype.
    """
    if matrix.dim() != 2 or not matrix.is_contiguous():
        raise ValueError(f"round_trip needs a contiguous matrix, got shape {tuple(matrix.shape)}")
    check_encodable(matrix, mx_format.name)
    num_rows, num_columns = matrix.shape
    rows = torch.empty_like(matrix) if along_rows else None
    columns = matrix.new_empty(num_columns, num_rows) if along_columns else None
    if matrix.numel() == 0 or not (along_rows or along_columns):
        return rows, columns
    round_trip_kernel[(triton.cdiv(num_rows, SIDE) * triton.cdiv(num_columns, SIDE),)](
        matrix,
        matrix if rows is None else rows,
        matrix if columns is None else columns,
        num_rows,
        num_columns,
        ALONG_ROWS=along_rows,
        ALONG_COLUMNS=along_columns,
        LIMIT=torch.finfo(matrix.dtype).max,
        FORMAT=KernelFormat.of(mx_format).on(matrix.device),
        SIDE=SIDE,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    return rows, columns
