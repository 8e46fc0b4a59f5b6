"""Payload rows -> tensors, in one pass: read a code an element and 1 or 2 bytes a block, write the value.

    tensor.flat[s * S : (s + 1) * S] = decode(payload[r]) with s = slices[r], S = the tensor's slice size

What lies beyond a tensor's end (the padding of its last slices) is not written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.kernels.elements import (
    clamp_keeping_nan,
    load_some,
    narrowed,
    numbers_of,
    rotate,
    store_some,
)
from zeropp_fp8.kernels.mx_elements import load_six_bits, mx_numbers_of, mx_scale_values, mx_times_scales
from zeropp_fp8.kernels.quantize import segment_of_program
from zeropp_fp8.kernels.tables import SegmentTable, TensorTable, interpreted, native_float8


@triton.jit
def load_unquantized(
    payload_ptr,
    tile,
    numel,
    ELEMENT: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """A tile of one tensor's slice that travels in its own dtype."""
    dtype: tl.constexpr = tl.bfloat16 if ELEMENT == "bf16" else (tl.float16 if ELEMENT == "fp16" else tl.float32)
    local = tl.arange(0, TILE_BLOCKS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    start = tile * (TILE_BLOCKS * WIDTH)
    left = tl.minimum(numel - start, TILE_BLOCKS * WIDTH).to(tl.int32)
    return load_some(payload_ptr.to(tl.pointer_type(dtype)) + start + local, local, left, True, WHOLE, False)


@triton.jit
def load_quantized(
    payload_ptr,
    tile,
    num_blocks,
    code_bytes,
    ELEMENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    SCALE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """A tile of one tensor's slice as (numbers fp32 [TILE_BLOCKS, WIDTH] before scaling, scales fp32 [TILE_BLOCKS])."""
    blocks = tl.arange(0, TILE_BLOCKS)
    first_block = tile * TILE_BLOCKS
    blocks_left = tl.minimum(num_blocks - first_block, TILE_BLOCKS).to(tl.int32)
    scale_dtype: tl.constexpr = tl.int16 if SCALE == "bf16" else tl.uint8
    scales_ptr = payload_ptr.to(tl.pointer_type(scale_dtype)) + first_block
    scale_bits = tl.load(scales_ptr + blocks, mask=blocks < blocks_left, other=0).to(tl.int32)
    if SCALE == "bf16":
        scales = (scale_bits << 16).to(tl.float32, bitcast=True)
    else:
        scales = mx_scale_values(scale_bits)
    scale_bytes: tl.constexpr = 2 if SCALE == "bf16" else 1
    codes_ptr = payload_ptr + tl.multiple_of((num_blocks * scale_bytes + 15) // 16 * 16, 16)
    if ELEMENT == "mxfp6_e2m3" or ELEMENT == "mxfp6_e3m2":
        words = blocks[:, None] * 6 + 3 * tl.arange(0, 2)[None, :]
        words_ptr = (codes_ptr + first_block * 24).to(tl.pointer_type(tl.int32))
        codes = load_six_bits(words_ptr + words, blocks[:, None] < blocks_left, TILE_BLOCKS)
    else:
        per_byte: tl.constexpr = 2 if ELEMENT == "int4" or ELEMENT == "mxfp4" else 1
        columns = tl.arange(0, WIDTH // per_byte)
        first_byte = first_block * (BLOCK_SIZE // per_byte)
        local = blocks[:, None] * (BLOCK_SIZE // per_byte) + columns[None, :]
        bytes_left = tl.minimum(code_bytes - first_byte, TILE_BLOCKS * (BLOCK_SIZE // per_byte)).to(tl.int32)
        codes = load_some(
            codes_ptr + first_byte + local,
            local,
            bytes_left,
            columns[None, :] < BLOCK_SIZE // per_byte,
            WHOLE,
            WIDTH != BLOCK_SIZE,
        )
    if SCALE == "bf16":
        numbers = numbers_of(codes, ELEMENT, NATIVE_FP8, TILE_BLOCKS, WIDTH)
    else:
        numbers = mx_numbers_of(codes, ELEMENT, NATIVE_FP8, TILE_BLOCKS)
    return numbers, scales


@triton.jit
def decode_tile(
    payload_ptr,
    tile,
    numel,
    num_blocks,
    code_bytes,
    LIMIT: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    HADAMARD: tl.constexpr,
    SCALE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """A tile of one tensor's slice: fp32 within [-LIMIT, LIMIT], or an unquantized element's own dtype."""
    if ELEMENT == "bf16" or ELEMENT == "fp16" or ELEMENT == "fp32":
        values = load_unquantized(payload_ptr, tile, numel, ELEMENT, WIDTH, TILE_BLOCKS, WHOLE)
    else:
        numbers, scales = load_quantized(
            payload_ptr, tile, num_blocks, code_bytes,
            ELEMENT, BLOCK_SIZE, WIDTH, TILE_BLOCKS, SCALE, NATIVE_FP8, WHOLE,
        )  # fmt: skip
        if HADAMARD:
            numbers = rotate(numbers, TILE_BLOCKS, WIDTH)
        if SCALE == "bf16":
            values = clamp_keeping_nan(numbers * scales[:, None], LIMIT)
        else:
            values = mx_times_scales(numbers, scales, LIMIT, ELEMENT)
    return values


@triton.jit
def write_tile(
    values,
    tensor_ptr,
    end,
    tile,
    ACCUMULATE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Write a tile to tensor_ptr[tile's first element ..], nothing at or beyond `end`; or add it to what is there."""
    dtype: tl.constexpr = tensor_ptr.dtype.element_ty
    columns = tl.arange(0, WIDTH)
    start = tile * (TILE_BLOCKS * BLOCK_SIZE)
    left = tl.maximum(tl.minimum(end - start, TILE_BLOCKS * BLOCK_SIZE), 0).to(tl.int32)
    local = tl.arange(0, TILE_BLOCKS)[:, None] * BLOCK_SIZE + columns[None, :]
    width_ok = columns[None, :] < BLOCK_SIZE
    pointers = tensor_ptr + start + local
    if ACCUMULATE:
        # Rounded to the buffer's dtype before the addition, as the torch code does.
        before = load_some(pointers, local, left, width_ok, WHOLE, WIDTH != BLOCK_SIZE)
        values = narrowed(values, dtype, INTERPRETED).to(tl.float32) + before.to(tl.float32)
    if values.dtype != dtype:
        values = narrowed(values.to(tl.float32), dtype, INTERPRETED)
    store_some(pointers, values, local, left, width_ok, WHOLE, WIDTH != BLOCK_SIZE)


@triton.jit
def dequantize_kernel(
    base_ptr,
    payload_ptr,
    slices_ptr,
    tensors_ptr,
    segments_ptr,
    row_bytes,
    LIMIT: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    HADAMARD: tl.constexpr,
    SCALE: tl.constexpr,
    ALIGNED: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program: one tile (axis 0) of one tensor's slice (axis 2) in one row (axis 1)."""
    tile = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    segment = tl.program_id(2).to(tl.int64)
    offset, slice_numel, num_blocks, code_bytes, _ = segment_of_program(segments_ptr, segment, ELEMENT)
    if tile * (TILE_BLOCKS * BLOCK_SIZE) >= slice_numel:
        return
    slice_index = tl.load(slices_ptr + row).to(tl.int64)
    numel = tl.load(tensors_ptr + 2 * segment + 1)
    start = tl.load(tensors_ptr + 2 * segment) + slice_index * slice_numel
    if ALIGNED:
        start = tl.multiple_of(start, 16 // (base_ptr.dtype.element_ty.primitive_bitwidth // 8))
    payload_ptr += tl.multiple_of(row * row_bytes, 16) + offset
    end = tl.minimum(slice_numel, numel - slice_index * slice_numel)
    # The body is compiled twice, so that a whole tile has neither masks nor branches.
    if end - tile * (TILE_BLOCKS * BLOCK_SIZE) >= TILE_BLOCKS * BLOCK_SIZE:
        values = decode_tile(
            payload_ptr, tile, slice_numel, num_blocks, code_bytes,
            LIMIT, ELEMENT, BLOCK_SIZE, WIDTH, TILE_BLOCKS, HADAMARD, SCALE, NATIVE_FP8, True,
        )  # fmt: skip
        write_tile(values, base_ptr + start, end, tile, False, BLOCK_SIZE, WIDTH, TILE_BLOCKS, INTERPRETED, True)
    else:
        values = decode_tile(
            payload_ptr, tile, slice_numel, num_blocks, code_bytes,
            LIMIT, ELEMENT, BLOCK_SIZE, WIDTH, TILE_BLOCKS, HADAMARD, SCALE, NATIVE_FP8, False,
        )  # fmt: skip
        write_tile(values, base_ptr + start, end, tile, False, BLOCK_SIZE, WIDTH, TILE_BLOCKS, INTERPRETED, False)


def dequantize(base: Tensor, tensors: TensorTable, segments: SegmentTable, slices: Tensor, payload: Tensor) -> None:
    """Decode payload rows into slices of tensors.

    Args:
        base: the first of the destination tensors, fp32, bf16 or fp16.
        tensors: the places of all of them.
        slices: int32 [rows], which slice each row holds.
        payload: uint8 [rows, row bytes], contiguous.
    """
    rows, row_bytes = payload.shape
    form = segments.format
    with torch.cuda.device_of(payload):
        dequantize_kernel[segments.grid(rows, segments.format.tile_blocks)](
            base,
            payload,
            slices,
            tensors.entries,
            segments.segments,
            row_bytes,
            LIMIT=torch.finfo(base.dtype).max,
            ELEMENT=form.element,
            BLOCK_SIZE=form.block_size,
            WIDTH=form.width,
            TILE_BLOCKS=form.tile_blocks,
            HADAMARD=form.hadamard,
            SCALE=form.scale,
            ALIGNED=tensors.aligned,
            NATIVE_FP8=native_float8(payload.device),
            INTERPRETED=interpreted(),
            num_warps=form.num_warps,
            enable_fp_fusion=False,
        )
