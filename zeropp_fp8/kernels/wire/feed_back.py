"""Tensors and what earlier rounding dropped of them -> payload rows, and what this rounding drops, in one pass.

    wanted      = slice of the tensor + decode(residual)
    payload[r]  = encode(wanted)
    residual    = encode(wanted - decode(payload[r])), numbers that are not finite as zeros

Read 2 (or 4) bytes per element and a code of 8 bits, write two codes: 4.5 bytes with INT4 and bf16. The formulas and
orders of operations are those of comm/payload.py.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.kernels.elements import EXPONENT_OF_INF, clamp_keeping_nan, numbers_of, rotate
from zeropp_fp8.kernels.launching import Kernel, Plan
from zeropp_fp8.kernels.wire.dequantize import LARGEST_FP32, inside, load_quantized
from zeropp_fp8.kernels.wire.launch_tables import KernelFormat, SegmentTable, TensorTable
from zeropp_fp8.kernels.wire.quantize import (
    encode_blocks,
    load_tile,
    segment_of_program,
    slice_of_tensor,
    store_blocks,
    store_tile,
)


@triton.jit
def feed_back_tile(
    tensor_ptr,
    end,
    payload_ptr,
    residual_ptr,
    tile,
    numel,
    num_blocks,
    code_bytes,
    total_bytes,
    residual_code_bytes,
    residual_total_bytes,
    FORMAT: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One tile of one tensor's slice in one row."""
    element: tl.constexpr = FORMAT.element
    BLOCKS: tl.constexpr = FORMAT.tile_blocks
    WIDTH: tl.constexpr = FORMAT.width
    kept, kept_scales = load_quantized(residual_ptr, tile, num_blocks, residual_code_bytes, RESIDUAL, WHOLE)
    # Other threads write there than read: all have read before one writes.
    tl.debug_barrier()
    wanted = load_tile(tensor_ptr, end, tile, FORMAT, WHOLE).to(tl.float32)
    wanted += clamp_keeping_nan(kept * kept_scales[:, None], LARGEST_FP32)

    codes, scales = encode_blocks(wanted, FORMAT)
    store_blocks(codes, scales, payload_ptr, tile, num_blocks, code_bytes, total_bytes, FORMAT, WHOLE)

    numbers = numbers_of(codes, element, FORMAT.native_fp8, BLOCKS, WIDTH)
    if FORMAT.hadamard:
        numbers = rotate(numbers, BLOCKS, WIDTH)
    scale_values = (scales.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    dropped = wanted - clamp_keeping_nan(numbers * scale_values[:, None], LARGEST_FP32)
    finite = (dropped.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < EXPONENT_OF_INF
    # The rotation leaves numbers in the padding of the last group.
    dropped = tl.where(finite & inside(numel, tile, FORMAT), dropped, 0.0)
    store_tile(
        dropped, residual_ptr, tile, numel, num_blocks, residual_code_bytes, residual_total_bytes, 1.0, None, RESIDUAL,
        WHOLE,
    )  # fmt: skip


@Kernel
@triton.jit
def feed_back_kernel(
    base_ptr,
    payload_ptr,
    residual_ptr,
    tensors_ptr,
    slices_ptr,
    segments_ptr,
    residual_segments_ptr,
    row_bytes,
    residual_row_bytes,
    FORMAT: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: one tile (axis 0) of one tensor's slice (axis 2) in one row (axis 1)."""
    tile = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    segment = tl.program_id(2).to(tl.int64)
    element: tl.constexpr = FORMAT.element
    element_kept: tl.constexpr = RESIDUAL.element
    offset, numel, num_blocks, code_bytes, total_bytes = segment_of_program(segments_ptr, segment, element)
    if tile * FORMAT.tile_numel >= numel:
        return
    kept_at, _, _, kept_code_bytes, kept_bytes = segment_of_program(residual_segments_ptr, segment, element_kept)
    slice_index = tl.load(slices_ptr + row).to(tl.int64)
    tensor_ptr, end = slice_of_tensor(base_ptr, tensors_ptr, segment, slice_index, numel, ALIGNED)
    payload_ptr += tl.multiple_of(row * row_bytes, 16) + offset
    residual_ptr += tl.multiple_of(row * residual_row_bytes, 16) + kept_at
    # The body is compiled twice, so that a whole tile has neither masks nor branches.
    if end - tile * FORMAT.tile_numel >= FORMAT.tile_numel:
        feed_back_tile(
            tensor_ptr, end, payload_ptr, residual_ptr, tile, numel, num_blocks, code_bytes, total_bytes,
            kept_code_bytes, kept_bytes, FORMAT, RESIDUAL, True,
        )  # fmt: skip
    else:
        feed_back_tile(
            tensor_ptr, end, payload_ptr, residual_ptr, tile, numel, num_blocks, code_bytes, total_bytes,
            kept_code_bytes, kept_bytes, FORMAT, RESIDUAL, False,
        )  # fmt: skip


def can_feed_back(segments: SegmentTable, residuals: SegmentTable) -> bool:
    """Whether `quantize_with_residuals` knows the format: scales in bf16, in the blocks of the residuals."""
    mine, kept = segments.format, residuals.format
    return mine.scale == "bf16" and (mine.block_size, mine.width) == (kept.block_size, kept.width)


@functools.cache
def _stored_and_decoded(form: KernelFormat, blocks: int) -> KernelFormat:
    """A format with other tiles whose codes are not made by FP8 instructions: see `fp8_codes`."""
    return replace(form.with_tiles(blocks), native_fp8=False)


def quantize_with_residuals(
    base: Tensor,
    tensors: TensorTable,
    segments: SegmentTable,
    slices: Tensor,
    payload: Tensor,
    residual_segments: SegmentTable,
    residuals: Tensor,
) -> None:
    """`quantize` of slices and what `residuals` holds of them, which gets what that drops.

    Args:
        residual_segments: the same tensors where `residuals` has them; `can_feed_back` must hold.
        residuals: uint8 [rows, bytes], contiguous, overwritten.
    """
    rows, row_bytes = payload.shape
    sizes = (payload.shape, residuals.shape)
    key = (feed_back_kernel, base.dtype, *sizes, tensors.aligned, residual_segments)
    plan = segments.plans.get(key)
    if plan is None:
        # Tiles as of sums: 2048 elements at 2 warps spill registers, 512 take 91 with INT4 and its rotation.
        tables = (segments, residual_segments)
        form, kept = (_stored_and_decoded(table.format, table.format.sum_blocks) for table in tables)
        places = (segments.segments, residual_segments.segments)
        constants = {
            "FORMAT": form,
            "RESIDUAL": kept,
            "ALIGNED": tensors.aligned,
            "num_warps": form.sum_warps,
            "enable_fp_fusion": False,
        }
        grid, last = segments.grid(rows, form.tile_blocks), (*places, row_bytes, residuals.shape[1])
        plan = segments.plans[key] = Plan(feed_back_kernel, grid, last, constants)
    plan(base, payload, residuals, tensors.entries, slices)
