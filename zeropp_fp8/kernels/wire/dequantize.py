"""Payload rows -> tensors, in one pass: read a code an element and 1 to 4 bytes a block, write the value.

    tensor.flat[s * S : (s + 1) * S] = decode(payload[r]) with s = slices[r], S = the tensor's slice size

What lies beyond a tensor's end (the padding of its last slices) is not written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.formats.double_quantized import SCALE_GROUP
from zeropp_fp8.formats.dynamic_map import ZERO_CODE
from zeropp_fp8.kernels.elements import (
    clamp_keeping_nan,
    load_some,
    narrowed,
    numbers_of,
    rotate,
    store_some,
)
from zeropp_fp8.kernels.mx_elements import load_six_bits, mx_numbers_of, mx_scale_values, mx_times_scales
from zeropp_fp8.kernels.nf4_levels import nf4_numbers_of
from zeropp_fp8.kernels.wire.launch_tables import SegmentTable, TensorTable, interpreted, native_float8
from zeropp_fp8.kernels.wire.quantize import segment_of_program

NF4_LEVELS = tl.constexpr(16)  # in the lookup table, before the levels of the dynamic type
SCALE_GROUP = tl.constexpr(SCALE_GROUP)
ZERO_CODE = tl.constexpr(ZERO_CODE)
LARGEST_FP32 = tl.constexpr(torch.finfo(torch.float32).max)


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
def load_codes(
    codes_ptr,
    first_block,
    code_bytes,
    ELEMENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The bytes of a tile's codes of 4 or 8 bits, uint8 [TILE_BLOCKS, WIDTH / codes per byte]."""
    per_byte: tl.constexpr = 2 if ELEMENT == "int4" or ELEMENT == "mxfp4" or ELEMENT == "nf4" else 1
    columns = tl.arange(0, WIDTH // per_byte)
    first_byte = first_block * (BLOCK_SIZE // per_byte)
    local = tl.arange(0, TILE_BLOCKS)[:, None] * (BLOCK_SIZE // per_byte) + columns[None, :]
    bytes_left = tl.minimum(code_bytes - first_byte, TILE_BLOCKS * (BLOCK_SIZE // per_byte)).to(tl.int32)
    return load_some(
        codes_ptr + first_byte + local,
        local,
        bytes_left,
        columns[None, :] < BLOCK_SIZE // per_byte,
        WHOLE,
        WIDTH != BLOCK_SIZE,
    )


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
        codes = load_codes(codes_ptr, first_block, code_bytes, ELEMENT, BLOCK_SIZE, WIDTH, TILE_BLOCKS, WHOLE)
    if SCALE == "bf16":
        numbers = numbers_of(codes, ELEMENT, NATIVE_FP8, TILE_BLOCKS, WIDTH)
    else:
        numbers = mx_numbers_of(codes, ELEMENT, NATIVE_FP8, TILE_BLOCKS)
    return numbers, scales


@triton.jit
def load_double_quantized(payload_ptr, levels_ptr, num_blocks, blocks, block_ok):
    """(fp32 scales of some blocks, bytes before the codes) of a payload with double-quantized scales."""
    groups = (num_blocks + SCALE_GROUP - 1) // SCALE_GROUP
    groups_start = tl.multiple_of((num_blocks + 15) // 16 * 16, 16)
    numbers_ptr = (payload_ptr + groups_start).to(tl.pointer_type(tl.float32))
    scale_codes = tl.load(payload_ptr + blocks, mask=block_ok, other=0).to(tl.int32)
    group_bits = tl.load((numbers_ptr + blocks // SCALE_GROUP).to(tl.pointer_type(tl.int32)), mask=block_ok, other=0)
    group_scales = (group_bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    scales = tl.load(levels_ptr + scale_codes) * group_scales + tl.load(numbers_ptr + groups)
    scales = tl.minimum(tl.maximum(scales, 0.0), LARGEST_FP32)
    scales = tl.where((group_bits < 0) & (scale_codes == ZERO_CODE), float("nan"), scales)
    return scales, groups_start + (4 * (groups + 1) + 15) // 16 * 16


@triton.jit
def load_looked_up(
    payload_ptr,
    lookup_ptr,
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
    """`load_quantized` for fp32 and double-quantized scales, the formats whose levels may be in a table."""
    first_block = tile * TILE_BLOCKS
    blocks = first_block + tl.arange(0, TILE_BLOCKS)
    if SCALE == "fp32":
        scales_ptr = payload_ptr.to(tl.pointer_type(tl.float32))
        scales = tl.load(scales_ptr + blocks, mask=blocks < num_blocks, other=0.0)
        codes_start = (num_blocks * 4 + 15) // 16 * 16
    else:
        levels_ptr = lookup_ptr + NF4_LEVELS
        scales, codes_start = load_double_quantized(payload_ptr, levels_ptr, num_blocks, blocks, blocks < num_blocks)
    codes_ptr = payload_ptr + tl.multiple_of(codes_start, 16)
    codes = load_codes(codes_ptr, first_block, code_bytes, ELEMENT, BLOCK_SIZE, WIDTH, TILE_BLOCKS, WHOLE)
    if ELEMENT == "nf4":
        # What has FP8 instructions is an NVIDIA GPU of compute capability 8.9 or later.
        numbers = nf4_numbers_of(codes, lookup_ptr, NATIVE_FP8, TILE_BLOCKS, WIDTH)
    else:
        numbers = numbers_of(codes, ELEMENT, NATIVE_FP8, TILE_BLOCKS, WIDTH)
    return numbers, scales


@triton.jit
def decode_tile(
    payload_ptr,
    lookup_ptr,
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
    elif SCALE == "fp32" or SCALE == "double":
        numbers, scales = load_looked_up(
            payload_ptr, lookup_ptr, tile, num_blocks, code_bytes,
            ELEMENT, BLOCK_SIZE, WIDTH, TILE_BLOCKS, SCALE, NATIVE_FP8, WHOLE,
        )  # fmt: skip
        values = clamp_keeping_nan(numbers * scales[:, None], LIMIT)
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
def tile_of_program(tile_starts_ptr, STARTS: tl.constexpr):
    """(tile in its tensor, tensor) of a program, int64."""
    program = tl.program_id(0)
    starts = tl.load(tile_starts_ptr + tl.arange(0, STARTS))
    segment = tl.sum((starts <= program).to(tl.int32), axis=0) - 1
    return (program - tl.load(tile_starts_ptr + segment)).to(tl.int64), segment.to(tl.int64)


@triton.jit
def dequantize_kernel(
    base_ptr,
    payload_ptr,
    slices_ptr,
    tensors_ptr,
    segments_ptr,
    tile_starts_ptr,
    lookup_ptr,
    row_bytes,
    LIMIT: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    HADAMARD: tl.constexpr,
    SCALE: tl.constexpr,
    STARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program: one tile of one tensor's slice (axis 0, tensor after tensor) in one row (axis 1)."""
    tile, segment = tile_of_program(tile_starts_ptr, STARTS)
    row = tl.program_id(1).to(tl.int64)
    layout: tl.constexpr = "int4" if ELEMENT == "nf4" else ELEMENT  # codes of 4 bits, two to a byte
    offset, slice_numel, num_blocks, code_bytes, _ = segment_of_program(segments_ptr, segment, layout)
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
            payload_ptr, lookup_ptr, tile, slice_numel, num_blocks, code_bytes,
            LIMIT, ELEMENT, BLOCK_SIZE, WIDTH, TILE_BLOCKS, HADAMARD, SCALE, NATIVE_FP8, True,
        )  # fmt: skip
        write_tile(values, base_ptr + start, end, tile, False, BLOCK_SIZE, WIDTH, TILE_BLOCKS, INTERPRETED, True)
    else:
        values = decode_tile(
            payload_ptr, lookup_ptr, tile, slice_numel, num_blocks, code_bytes,
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
    tile_starts, tiles = segments.tile_starts(form.tile_blocks)
    with torch.cuda.device_of(payload):
        dequantize_kernel[tiles, rows](
            base,
            payload,
            slices,
            tensors.entries,
            segments.decoded_segments,
            tile_starts,
            segments.lookup,
            row_bytes,
            LIMIT=torch.finfo(base.dtype).max,
            ELEMENT=form.element,
            BLOCK_SIZE=form.block_size,
            WIDTH=form.width,
            TILE_BLOCKS=form.tile_blocks,
            HADAMARD=form.hadamard,
            SCALE=form.scale,
            STARTS=tile_starts.numel(),
            ALIGNED=tensors.aligned,
            NATIVE_FP8=native_float8(payload.device),
            INTERPRETED=interpreted(),
            num_warps=form.num_warps,
            enable_fp_fusion=False,
        )
