"""FP8 codes with a scale a tensor that all ranks know: encode, add as codes, decode; one pass each.

    encode   row[r] of a tensor = FP8(clamp(slice[slices[r]] * multiplier)), and the tensor's amax on the way
    sum      row = FP8(clamp(number(code of rank 0) + number(code of rank 1) + ...))       added in this order, in fp32
    decode   tensor = sum * factor, or tensor += it, or (for tensors of bytes) the code of the sum

The formulas are those of formats/shared_scale.py. Codes at the largest magnitude and numbers that became zero are
counted: two integer atomics a program, so the counts do not depend on the order of programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.kernels.elements import EXPONENT_OF_INF, codes_of
from zeropp_fp8.kernels.wire.dequantize import write_tile
from zeropp_fp8.kernels.wire.launch_tables import SegmentTable, TensorTable
from zeropp_fp8.kernels.wire.quantize import load_tile, segment_of_program, slice_of_tensor, store_codes, store_zeros
from zeropp_fp8.kernels.wire.reduce import mean_of_tiles


@triton.jit
def shared_codes(values, multiplier, counts_ptr, FORMAT: tl.constexpr):
    """uint8 codes of fp32 values, counted."""
    element: tl.constexpr = FORMAT.element
    bad = (values.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= EXPONENT_OF_INF
    scaled = tl.where(bad, 0.0, values * multiplier)
    codes = codes_of(scaled, scaled, element, "nearest", FORMAT.native_fp8, FORMAT.tile_blocks, FORMAT.width)
    codes = tl.where(bad, 0x7F, codes).to(tl.uint8)
    magnitudes = codes & 0x7F
    top: tl.constexpr = 0x7E if element == "fp8_e4m3" else 0x7B
    saturated = tl.sum(tl.sum((magnitudes == top).to(tl.int32), axis=1), axis=0)
    vanished = tl.sum(tl.sum(((magnitudes == 0) & (values != 0.0)).to(tl.int32), axis=1), axis=0)
    if saturated > 0:
        tl.atomic_add(counts_ptr, saturated.to(tl.int64))
    if vanished > 0:
        tl.atomic_add(counts_ptr + 1, vanished.to(tl.int64))
    return codes


@triton.jit
def encode_kernel(
    base_ptr,
    payload_ptr,
    slices_ptr,
    tensors_ptr,
    segments_ptr,
    multipliers_ptr,
    amax_ptr,
    counts_ptr,
    row_bytes,
    FORMAT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: one tile (axis 0) of one tensor's slice (axis 2) in one row (axis 1)."""
    tile = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    segment = tl.program_id(2).to(tl.int64)
    element: tl.constexpr = FORMAT.element
    offset, slice_numel, _, _, total_bytes = segment_of_program(segments_ptr, segment, element)
    if tile * FORMAT.tile_numel >= slice_numel:
        return
    slice_index = tl.load(slices_ptr + row).to(tl.int64)
    tensor_ptr, end = slice_of_tensor(base_ptr, tensors_ptr, segment, slice_index, slice_numel, ALIGNED)
    payload_ptr += tl.multiple_of(row * row_bytes, 16) + offset
    multiplier = tl.load(multipliers_ptr + segment)
    # The body is compiled twice, so that a whole tile has neither masks nor branches.
    if end - tile * FORMAT.tile_numel >= FORMAT.tile_numel:
        x = load_tile(tensor_ptr, end, tile, FORMAT, True).to(tl.float32)
        store_codes(shared_codes(x, multiplier, counts_ptr, FORMAT), payload_ptr, tile, slice_numel, FORMAT, True)
    else:
        x = load_tile(tensor_ptr, end, tile, FORMAT, False).to(tl.float32)
        store_codes(shared_codes(x, multiplier, counts_ptr, FORMAT), payload_ptr, tile, slice_numel, FORMAT, False)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    finite = tl.where(bits < EXPONENT_OF_INF, bits, 0)
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)) + segment, tl.max(tl.max(finite, axis=1), axis=0))
    if tile == 0:
        store_zeros(payload_ptr, slice_numel, total_bytes)


@triton.jit
def sum_to_payload_kernel(
    received_ptr,
    payload_ptr,
    segments_in_ptr,
    segments_out_ptr,
    counts_ptr,
    rank_bytes,
    row_bytes_in,
    row_bytes_out,
    RANKS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """One program: one tile (axis 0) of one tensor's slice (axis 2) in one row (axis 1)."""
    tile = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    segment = tl.program_id(2).to(tl.int64)
    element: tl.constexpr = FORMAT.element
    offset, numel, _, _, _ = segment_of_program(segments_in_ptr, segment, element)
    if tile * FORMAT.tile_numel >= numel:
        return
    received_ptr += tl.multiple_of(row * row_bytes_in, 16) + offset
    offset, _, _, _, total_bytes = segment_of_program(segments_out_ptr, segment, element)
    payload_ptr += tl.multiple_of(row * row_bytes_out, 16) + offset
    if numel - tile * FORMAT.tile_numel >= FORMAT.tile_numel:
        total = mean_of_tiles(received_ptr, rank_bytes, 1.0, tile, numel, 0, numel, RANKS, FORMAT, True)
        store_codes(shared_codes(total, 1.0, counts_ptr, FORMAT), payload_ptr, tile, numel, FORMAT, True)
    else:
        total = mean_of_tiles(received_ptr, rank_bytes, 1.0, tile, numel, 0, numel, RANKS, FORMAT, False)
        store_codes(shared_codes(total, 1.0, counts_ptr, FORMAT), payload_ptr, tile, numel, FORMAT, False)
    if tile == 0:
        store_zeros(payload_ptr, numel, total_bytes)


@triton.jit
def sum_to_tensors_kernel(
    received_ptr,
    base_ptr,
    tensors_ptr,
    segments_ptr,
    factors_ptr,
    counts_ptr,
    rank_bytes,
    RANKS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    KEEP_CODES: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: one tile (axis 0) of one tensor's slice (axis 2)."""
    tile = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(2).to(tl.int64)
    element: tl.constexpr = FORMAT.element
    offset, numel, _, _, _ = segment_of_program(segments_ptr, segment, element)
    if tile * FORMAT.tile_numel >= numel:
        return
    start = tl.load(tensors_ptr + 2 * segment)
    if ALIGNED:
        start = tl.multiple_of(start, 16 // (base_ptr.dtype.element_ty.primitive_bitwidth // 8))
    end = tl.minimum(numel, tl.load(tensors_ptr + 2 * segment + 1))
    received_ptr += offset
    factor = tl.load(factors_ptr + segment)
    if end - tile * FORMAT.tile_numel >= FORMAT.tile_numel:
        total = mean_of_tiles(received_ptr, rank_bytes, 1.0, tile, numel, 0, numel, RANKS, FORMAT, True)
        if KEEP_CODES:
            store_codes(shared_codes(total, 1.0, counts_ptr, FORMAT), base_ptr + start, tile, end, FORMAT, True)
        else:
            write_tile(total * factor, base_ptr + start, end, tile, ACCUMULATE, FORMAT, True)
    else:
        total = mean_of_tiles(received_ptr, rank_bytes, 1.0, tile, numel, 0, numel, RANKS, FORMAT, False)
        if KEEP_CODES:
            # What lies beyond the end is padding: zeros, which are not counted.
            store_codes(shared_codes(total, 1.0, counts_ptr, FORMAT), base_ptr + start, tile, end, FORMAT, False)
        else:
            write_tile(total * factor, base_ptr + start, end, tile, ACCUMULATE, FORMAT, False)


def encode_shared(
    base: Tensor,
    tensors: TensorTable,
    segments: SegmentTable,
    slices: Tensor,
    payload: Tensor,
    multipliers: Tensor,
    amax: Tensor,
    counts: Tensor,
) -> None:
    """Encode slices of tensors into payload rows.

    Args:
        base: the first of the source tensors, fp32, bf16 or fp16.
        tensors: the places of all of them.
        slices: int32 [rows], which slice each row holds.
        payload: uint8 [rows, row bytes], contiguous; only the bytes of these tensors are written.
        multipliers: fp32 [tensors], contiguous.
        amax: fp32 [tensors], contiguous; becomes the larger of itself and the tensor's largest finite magnitude.
        counts: int64 [2].
    """
    rows, row_bytes = payload.shape
    form = segments.format
    with torch.cuda.device_of(payload):
        encode_kernel[segments.grid(rows, form.tile_blocks)](
            base,
            payload,
            slices,
            tensors.entries,
            segments.segments,
            multipliers,
            amax,
            counts,
            row_bytes,
            FORMAT=form,
            ALIGNED=tensors.aligned,
            num_warps=form.num_warps,
            enable_fp_fusion=False,
        )


def sum_to_payload(
    received: Tensor, segments_in: SegmentTable, segments_out: SegmentTable, payload: Tensor, counts: Tensor
) -> None:
    """Encode the sum over ranks of uint8 `received` [ranks, rows, bytes in] into `payload` [rows, bytes out]."""
    ranks, rows, row_bytes_in = received.shape
    form = segments_out.format
    with torch.cuda.device_of(payload):
        sum_to_payload_kernel[segments_in.grid(rows, form.sum_blocks)](
            received,
            payload,
            segments_in.segments,
            segments_out.segments,
            counts,
            rows * row_bytes_in,
            row_bytes_in,
            payload.shape[1],
            RANKS=ranks,
            FORMAT=form.with_tiles(form.sum_blocks),
            num_warps=form.sum_warps,
            enable_fp_fusion=False,
        )


def sum_to_tensors(
    received: Tensor,
    segments: SegmentTable,
    base: Tensor,
    tensors: TensorTable,
    factors: Tensor,
    counts: Tensor,
    accumulate: bool = False,
) -> None:
    """Write the sum over ranks of the single row to tensors, or add it to them.

    Args:
        received: uint8 [ranks, row bytes], contiguous.
        base: the first of the destination tensors: fp32, bf16 or fp16 get sum * factor, uint8 the code of the sum.
        tensors: the places of all of them, each with at most its slice's elements.
        factors: fp32 [tensors], contiguous.
        counts: int64 [2], of codes that are made here.
    """
    ranks, row_bytes = received.shape
    form = segments.format
    with torch.cuda.device_of(received):
        sum_to_tensors_kernel[segments.grid(1, form.sum_blocks)](
            received,
            base,
            tensors.entries,
            segments.segments,
            factors,
            counts,
            row_bytes,
            RANKS=ranks,
            ACCUMULATE=accumulate,
            KEEP_CODES=base.dtype == torch.uint8,
            FORMAT=form.with_tiles(form.sum_blocks),
            ALIGNED=tensors.aligned,
            num_warps=form.sum_warps,
            enable_fp_fusion=False,
        )
