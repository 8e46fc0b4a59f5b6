"""Payload rows -> tensors, in one pass: read a code per element and 1 to 4 bytes per block, write the value.

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
from zeropp_fp8.kernels.elements import clamp_keeping_nan, load_some, narrowed, numbers_of, rotate, store_some
from zeropp_fp8.kernels.launching import Kernel, Plan
from zeropp_fp8.kernels.mx_elements import load_six_bits, mx_numbers_of, mx_scale_values, mx_times_scales
from zeropp_fp8.kernels.nf4_levels import nf4_numbers_of
from zeropp_fp8.kernels.wire.launch_tables import SegmentTable, TensorTable
from zeropp_fp8.kernels.wire.quantize import places_of_codes, segment_of_program, slice_of_tensor

NF4_LEVELS = tl.constexpr(16)  # in the lookup table, before the levels of the dynamic type
SCALE_GROUP = tl.constexpr(SCALE_GROUP)
ZERO_CODE = tl.constexpr(ZERO_CODE)
LARGEST_FP32 = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def load_unquantized(payload_ptr, tile, numel, FORMAT: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of one tensor's slice that is sent in its own dtype."""
    numbers: tl.constexpr = FORMAT.tile_blocks * FORMAT.width
    local = tl.arange(0, FORMAT.tile_blocks)[:, None] * FORMAT.width + tl.arange(0, FORMAT.width)[None, :]
    start = tile * numbers
    left = tl.minimum(numel - start, numbers).to(tl.int32)
    return load_some(payload_ptr.to(tl.pointer_type(FORMAT.dtype)) + start + local, local, left, True, WHOLE, False)


@triton.jit
def load_codes(codes_ptr, tile, code_bytes, FORMAT: tl.constexpr, WHOLE: tl.constexpr):
    """A tile's codes as `codes_of` gives them; not those of 6 bits."""
    first_byte, local, left, width_ok = places_of_codes(tile, code_bytes, FORMAT)
    padded: tl.constexpr = FORMAT.width != FORMAT.block_size
    return load_some(codes_ptr + first_byte + local, local, left, width_ok, WHOLE, padded)


@triton.jit
def inside(numel, tile, FORMAT: tl.constexpr):
    """bool [tile_blocks, width]: which elements of a tile a slice of `numel` has."""
    columns = tl.arange(0, FORMAT.width)[None, :]
    local = tl.arange(0, FORMAT.tile_blocks)[:, None] * FORMAT.block_size + columns
    left = tl.minimum(numel - tile * FORMAT.tile_numel, FORMAT.tile_numel).to(tl.int32)
    return (local < left) & (columns < FORMAT.block_size)


@triton.jit
def load_quantized(payload_ptr, tile, num_blocks, code_bytes, FORMAT: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of one tensor's slice as (numbers fp32 [tile_blocks, width] before scaling, scales fp32 [tile_blocks])."""
    element: tl.constexpr = FORMAT.element
    blocks = tl.arange(0, FORMAT.tile_blocks)
    first_block = tile * FORMAT.tile_blocks
    blocks_left = tl.minimum(num_blocks - first_block, FORMAT.tile_blocks).to(tl.int32)
    scale_dtype: tl.constexpr = tl.int16 if FORMAT.scale == "bf16" else tl.uint8
    scales_ptr = payload_ptr.to(tl.pointer_type(scale_dtype)) + first_block
    scale_bits = tl.load(scales_ptr + blocks, mask=blocks < blocks_left, other=0).to(tl.int32)
    if FORMAT.scale == "bf16":
        scales = (scale_bits << 16).to(tl.float32, bitcast=True)
    else:
        scales = mx_scale_values(scale_bits)
    scale_bytes: tl.constexpr = 2 if FORMAT.scale == "bf16" else 1
    codes_ptr = payload_ptr + tl.multiple_of((num_blocks * scale_bytes + 15) // 16 * 16, 16)
    if element == "mxfp6_e2m3" or element == "mxfp6_e3m2":
        words = blocks[:, None] * 6 + 3 * tl.arange(0, 2)[None, :]
        words_ptr = (codes_ptr + first_block * 24).to(tl.pointer_type(tl.int32))
        codes = load_six_bits(words_ptr + words, blocks[:, None] < blocks_left, FORMAT.tile_blocks)
    else:
        codes = load_codes(codes_ptr, tile, code_bytes, FORMAT, WHOLE)
    if FORMAT.scale == "bf16":
        numbers = numbers_of(codes, element, FORMAT.native_fp8, FORMAT.tile_blocks, FORMAT.width)
    else:
        numbers = mx_numbers_of(codes, element, FORMAT.native_fp8, FORMAT.tile_blocks)
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
def load_looked_up(payload_ptr, lookup_ptr, tile, num_blocks, code_bytes, FORMAT: tl.constexpr, WHOLE: tl.constexpr):
    """`load_quantized` for fp32 and double-quantized scales, the formats whose levels may be in a table."""
    element: tl.constexpr = FORMAT.element
    first_block = tile * FORMAT.tile_blocks
    blocks = first_block + tl.arange(0, FORMAT.tile_blocks)
    if FORMAT.scale == "fp32":
        scales_ptr = payload_ptr.to(tl.pointer_type(tl.float32))
        scales = tl.load(scales_ptr + blocks, mask=blocks < num_blocks, other=0.0)
        codes_start = (num_blocks * 4 + 15) // 16 * 16
    else:
        levels_ptr = lookup_ptr + NF4_LEVELS
        scales, codes_start = load_double_quantized(payload_ptr, levels_ptr, num_blocks, blocks, blocks < num_blocks)
    codes_ptr = payload_ptr + tl.multiple_of(codes_start, 16)
    codes = load_codes(codes_ptr, tile, code_bytes, FORMAT, WHOLE)
    if element == "nf4":
        # What has FP8 instructions is an NVIDIA GPU of compute capability 8.9 or later.
        numbers = nf4_numbers_of(codes, lookup_ptr, FORMAT.native_fp8, FORMAT.tile_blocks, FORMAT.width)
    else:
        numbers = numbers_of(codes, element, FORMAT.native_fp8, FORMAT.tile_blocks, FORMAT.width)
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
    FORMAT: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """A tile of one tensor's slice: fp32 within [-LIMIT, LIMIT], or an unquantized element's own dtype."""
    element: tl.constexpr = FORMAT.element
    if FORMAT.scale == "none":
        values = load_unquantized(payload_ptr, tile, numel, FORMAT, WHOLE)
    elif FORMAT.scale == "fp32" or FORMAT.scale == "double":
        numbers, scales = load_looked_up(payload_ptr, lookup_ptr, tile, num_blocks, code_bytes, FORMAT, WHOLE)
        values = clamp_keeping_nan(numbers * scales[:, None], LIMIT)
    else:
        numbers, scales = load_quantized(payload_ptr, tile, num_blocks, code_bytes, FORMAT, WHOLE)
        if FORMAT.hadamard:
            numbers = rotate(numbers, FORMAT.tile_blocks, FORMAT.width)
        if FORMAT.scale == "bf16":
            values = clamp_keeping_nan(numbers * scales[:, None], LIMIT)
        else:
            values = mx_times_scales(numbers, scales, LIMIT, element)
    return values


@triton.jit
def write_tile(values, tensor_ptr, end, tile, ACCUMULATE: tl.constexpr, FORMAT: tl.constexpr, WHOLE: tl.constexpr):
    """Write a tile to tensor_ptr[tile's first element ..], nothing at or beyond `end`; or add it to what is there."""
    dtype: tl.constexpr = tensor_ptr.dtype.element_ty
    padded: tl.constexpr = FORMAT.width != FORMAT.block_size
    columns = tl.arange(0, FORMAT.width)
    start = tile * FORMAT.tile_numel
    left = tl.maximum(tl.minimum(end - start, FORMAT.tile_numel), 0).to(tl.int32)
    local = tl.arange(0, FORMAT.tile_blocks)[:, None] * FORMAT.block_size + columns[None, :]
    width_ok = columns[None, :] < FORMAT.block_size
    pointers = tensor_ptr + start + local
    if ACCUMULATE:
        # Rounded to the buffer's dtype before the addition, as the torch code does.
        before = load_some(pointers, local, left, width_ok, WHOLE, padded)
        values = narrowed(values, dtype, FORMAT.interpreted).to(tl.float32) + before.to(tl.float32)
    if values.dtype != dtype:
        values = narrowed(values.to(tl.float32), dtype, FORMAT.interpreted)
    store_some(pointers, values, local, left, width_ok, WHOLE, padded)


@triton.jit
def tile_of_program(tile_starts_ptr, STARTS: tl.constexpr):
    """(tile in its tensor, tensor) of a program, int64."""
    program = tl.program_id(0)
    starts = tl.load(tile_starts_ptr + tl.arange(0, STARTS))
    segment = tl.sum((starts <= program).to(tl.int32), axis=0) - 1
    return (program - tl.load(tile_starts_ptr + segment)).to(tl.int64), segment.to(tl.int64)


@Kernel
@triton.jit
def dequantize_kernel(
    base_ptr,
    payload_ptr,
    tensors_ptr,
    slices_ptr,
    segments_ptr,
    tile_starts_ptr,
    lookup_ptr,
    row_bytes,
    LIMIT: tl.constexpr,
    FORMAT: tl.constexpr,
    STARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: one tile of one tensor's slice (axis 0, tensor after tensor) in one row (axis 1)."""
    tile, segment = tile_of_program(tile_starts_ptr, STARTS)
    row = tl.program_id(1).to(tl.int64)
    layout: tl.constexpr = "int4" if FORMAT.element == "nf4" else FORMAT.element  # codes of 4 bits, two to a byte
    offset, slice_numel, num_blocks, code_bytes, _ = segment_of_program(segments_ptr, segment, layout)
    slice_index = tl.load(slices_ptr + row).to(tl.int64)
    tensor_ptr, end = slice_of_tensor(base_ptr, tensors_ptr, segment, slice_index, slice_numel, ALIGNED)
    payload_ptr += tl.multiple_of(row * row_bytes, 16) + offset
    # The body is compiled twice, so that a whole tile has neither masks nor branches.
    if end - tile * FORMAT.tile_numel >= FORMAT.tile_numel:
        values = decode_tile(payload_ptr, lookup_ptr, tile, slice_numel, num_blocks, code_bytes, LIMIT, FORMAT, True)
        write_tile(values, tensor_ptr, end, tile, False, FORMAT, True)
    else:
        values = decode_tile(payload_ptr, lookup_ptr, tile, slice_numel, num_blocks, code_bytes, LIMIT, FORMAT, False)
        write_tile(values, tensor_ptr, end, tile, False, FORMAT, False)


def dequantize(base: Tensor, tensors: TensorTable, segments: SegmentTable, slices: Tensor, payload: Tensor) -> None:
    """Decode payload rows into slices of tensors.

    Args:
        base: the first of the destination tensors, fp32, bf16 or fp16.
        tensors: the places of all of them.
        slices: int32 [rows], which slice each row holds.
        payload: uint8 [rows, row bytes], contiguous.
    """
    rows, row_bytes = payload.shape
    key = (dequantize_kernel, base.dtype, rows, row_bytes, tensors.aligned)
    plan = segments.plans.get(key)
    if plan is None:
        form = segments.format
        tile_starts, tiles = segments.tile_starts(form.tile_blocks)
        last = (segments.decoded_segments, tile_starts, segments.lookup, row_bytes)
        constants = {
            "LIMIT": torch.finfo(base.dtype).max,
            "FORMAT": form,
            "STARTS": tile_starts.numel(),
            "ALIGNED": tensors.aligned,
            "num_warps": form.num_warps,
            "enable_fp_fusion": False,
        }
        plan = segments.plans[key] = Plan(dequantize_kernel, (tiles, rows), last, constants)
    plan(base, payload, tensors.entries, slices)
