"""Tensors -> payload rows, in one pass: read 2 (or 4) bytes an element, write its code and 1 or 2 bytes a block.

    payload[r] = for each tensor: encode(tensor.flat[s * S : (s + 1) * S]) with s = slices[r], S = its slice size

The order of `slices` is qgZ's slice reordering (ZeRO++ section 3.3), which costs nothing here. Elements beyond a
tensor's end count as zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.formats.noise import Seed
from zeropp_fp8.kernels.elements import block_scales, codes_of, load_some, narrowed, rotate, store_some, uniform
from zeropp_fp8.kernels.mx_elements import mx_codes_of, mx_scale_blocks, pack_four_bits, store_six_bits
from zeropp_fp8.kernels.wire.launch_tables import SegmentTable, TensorTable, interpreted, native_float8


@triton.jit
def segment_of_program(segments_ptr, segment, ELEMENT: tl.constexpr):
    """(payload offset, slice numel, blocks, code bytes, bytes) of a segment."""
    # Bytes that an access to codes is aligned to: those of 8 codes, for then a thread handles 8 values on both sides.
    # With 16 (what the payload allows) a thread would handle 16 or 32 values, and its neighbours' accesses to the
    # 16-bit tensor would lie 32 or 64 bytes apart. Unquantized numbers are accessed 16 bytes at a time.
    unquantized: tl.constexpr = ELEMENT == "bf16" or ELEMENT == "fp16" or ELEMENT == "fp32"
    halves: tl.constexpr = ELEMENT == "int4" or ELEMENT == "mxfp4"
    alignment: tl.constexpr = 4 if halves else (16 if unquantized else 8)
    entry = segments_ptr + 5 * segment
    offset = tl.multiple_of(tl.load(entry), alignment)
    return offset, tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)


@triton.jit
def store_tile(
    values,
    payload_ptr,
    row,
    tile,
    numel,
    num_blocks,
    code_bytes,
    total_bytes,
    seed_low,
    seed_high,
    ELEMENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    HADAMARD: tl.constexpr,
    ROUNDING: tl.constexpr,
    LARGEST: tl.constexpr,
    SCALE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Encode fp32 [TILE_BLOCKS, WIDTH] (zeros beyond the slice) into the payload of one tensor's slice."""
    blocks = tl.arange(0, TILE_BLOCKS)
    columns = tl.arange(0, WIDTH)
    first_block = tile * TILE_BLOCKS
    if ELEMENT == "bf16" or ELEMENT == "fp16" or ELEMENT == "fp32":
        dtype: tl.constexpr = tl.bfloat16 if ELEMENT == "bf16" else (tl.float16 if ELEMENT == "fp16" else tl.float32)
        local = blocks[:, None] * WIDTH + columns[None, :]
        left = tl.minimum(numel - first_block * BLOCK_SIZE, TILE_BLOCKS * WIDTH).to(tl.int32)
        out = payload_ptr.to(tl.pointer_type(dtype)) + first_block * BLOCK_SIZE
        if values.dtype != dtype:
            values = narrowed(values, dtype, INTERPRETED)
        store_some(out + local, values, local, left, True, WHOLE, False)
        codes_start = num_blocks * 0
    else:
        x = values.to(tl.float32)
        if HADAMARD:
            x = rotate(x * (1.0 / 32.0), TILE_BLOCKS, WIDTH)
        if SCALE == "bf16":
            scales, factors, bad = block_scales(x, LARGEST)
            scaled = tl.where(bad[:, None], 0.0, x * factors[:, None])
        else:
            scales, scaled = mx_scale_blocks(x, ELEMENT, SCALE)
        noise = scaled
        if ROUNDING == "stochastic":
            noise = uniform(
                seed_low,
                seed_high,
                row,
                (first_block * BLOCK_SIZE).to(tl.int32) + blocks[:, None] * BLOCK_SIZE + columns,
            )
        if SCALE == "bf16":
            codes = codes_of(scaled, noise, ELEMENT, ROUNDING, NATIVE_FP8, TILE_BLOCKS, WIDTH)
        else:
            codes = mx_codes_of(scaled, noise, ELEMENT, ROUNDING, NATIVE_FP8)
            if ELEMENT == "mxfp4":
                codes = pack_four_bits(codes, TILE_BLOCKS)

        scale_bytes: tl.constexpr = 2 if SCALE == "bf16" else 1
        scale_dtype: tl.constexpr = tl.int16 if SCALE == "bf16" else tl.uint8
        scales_ptr = payload_ptr.to(tl.pointer_type(scale_dtype))
        blocks_left = tl.minimum(num_blocks - first_block, TILE_BLOCKS).to(tl.int32)
        tl.store(scales_ptr + first_block + blocks, scales.to(scale_dtype), mask=blocks < blocks_left)
        codes_start = tl.multiple_of((num_blocks * scale_bytes + 15) // 16 * 16, 16)

        if ELEMENT == "mxfp6_e2m3" or ELEMENT == "mxfp6_e3m2":
            words = blocks[:, None] * 6 + 3 * tl.arange(0, 2)[None, :]
            words_ptr = (payload_ptr + codes_start + first_block * 24).to(tl.pointer_type(tl.int32))
            store_six_bits(words_ptr + words, codes, blocks[:, None] < blocks_left, TILE_BLOCKS)
        else:
            per_byte: tl.constexpr = 2 if ELEMENT == "int4" or ELEMENT == "mxfp4" else 1
            byte_columns = tl.arange(0, WIDTH // per_byte)
            first_byte = first_block * (BLOCK_SIZE // per_byte)
            local = blocks[:, None] * (BLOCK_SIZE // per_byte) + byte_columns[None, :]
            bytes_left = tl.minimum(code_bytes - first_byte, TILE_BLOCKS * (BLOCK_SIZE // per_byte)).to(tl.int32)
            store_some(
                payload_ptr + codes_start + first_byte + local,
                codes.to(tl.uint8),
                local,
                bytes_left,
                byte_columns[None, :] < BLOCK_SIZE // per_byte,
                WHOLE,
                WIDTH != BLOCK_SIZE,
            )

        if tile == 0:  # zeros between scales and codes
            pad = tl.arange(0, 16 // scale_bytes)
            tl.store(
                scales_ptr + num_blocks + pad,
                tl.zeros((16 // scale_bytes,), scale_dtype),
                mask=pad < (codes_start // scale_bytes - num_blocks).to(tl.int32),
            )
    if tile == 0:  # zeros after the codes
        pad = tl.arange(0, 16)
        end = codes_start + code_bytes
        tl.store(payload_ptr + end + pad, tl.zeros((16,), tl.uint8), mask=pad < (total_bytes - end).to(tl.int32))


@triton.jit
def load_tile(
    tensor_ptr,
    numel,
    slice_numel,
    slice_index,
    tile,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The tile of a tensor's slice as it is stored, zeros beyond the slice and the tensor."""
    blocks = tl.arange(0, TILE_BLOCKS)
    columns = tl.arange(0, WIDTH)
    start = tile * (TILE_BLOCKS * BLOCK_SIZE)
    end = tl.minimum(slice_numel, numel - slice_index * slice_numel)
    # Tile-local offsets fit 32 bits; only the base is computed in 64.
    left = tl.maximum(tl.minimum(end - start, TILE_BLOCKS * BLOCK_SIZE), 0).to(tl.int32)
    local = blocks[:, None] * BLOCK_SIZE + columns[None, :]
    return load_some(
        tensor_ptr + start + local,
        local,
        left,
        columns[None, :] < BLOCK_SIZE,
        WHOLE,
        WIDTH != BLOCK_SIZE,
    )


# Seeds are random: specializing on "divisible by 16" would compile the kernel twice.
@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def quantize_kernel(
    base_ptr,
    payload_ptr,
    slices_ptr,
    tensors_ptr,
    segments_ptr,
    row_bytes,
    seed_low,
    seed_high,
    ELEMENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    HADAMARD: tl.constexpr,
    ROUNDING: tl.constexpr,
    LARGEST: tl.constexpr,
    SCALE: tl.constexpr,
    ALIGNED: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program: one tile (axis 0) of one tensor's slice (axis 2) in one row (axis 1)."""
    tile = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    segment = tl.program_id(2).to(tl.int64)
    offset, slice_numel, num_blocks, code_bytes, total_bytes = segment_of_program(segments_ptr, segment, ELEMENT)
    if tile * (TILE_BLOCKS * BLOCK_SIZE) >= slice_numel:
        return
    slice_index = tl.load(slices_ptr + row).to(tl.int64)
    numel = tl.load(tensors_ptr + 2 * segment + 1)
    start = tl.load(tensors_ptr + 2 * segment) + slice_index * slice_numel
    if ALIGNED:
        start = tl.multiple_of(start, 16 // (base_ptr.dtype.element_ty.primitive_bitwidth // 8))
    payload_ptr += tl.multiple_of(row * row_bytes, 16) + offset
    seed_low = (seed_low.to(tl.int64) + segment) & 0x7FFFFFFF
    end = tl.minimum(slice_numel, numel - slice_index * slice_numel)
    # The body is compiled twice, so that a whole tile has neither masks nor branches.
    if end - tile * (TILE_BLOCKS * BLOCK_SIZE) >= TILE_BLOCKS * BLOCK_SIZE:
        x = load_tile(base_ptr + start, numel, slice_numel, slice_index, tile, BLOCK_SIZE, WIDTH, TILE_BLOCKS, True)
        store_tile(
            x, payload_ptr, row, tile, slice_numel, num_blocks, code_bytes, total_bytes, seed_low, seed_high,
            ELEMENT, BLOCK_SIZE, WIDTH, TILE_BLOCKS, HADAMARD, ROUNDING, LARGEST, SCALE, NATIVE_FP8, INTERPRETED, True,
        )  # fmt: skip
    else:
        x = load_tile(base_ptr + start, numel, slice_numel, slice_index, tile, BLOCK_SIZE, WIDTH, TILE_BLOCKS, False)
        store_tile(
            x, payload_ptr, row, tile, slice_numel, num_blocks, code_bytes, total_bytes, seed_low, seed_high,
            ELEMENT, BLOCK_SIZE, WIDTH, TILE_BLOCKS, HADAMARD, ROUNDING, LARGEST, SCALE, NATIVE_FP8, INTERPRETED, False,
        )  # fmt: skip


def quantize(
    base: Tensor,
    tensors: TensorTable,
    segments: SegmentTable,
    slices: Tensor,
    payload: Tensor,
    seed: Seed | None = None,
) -> None:
    """Encode slices of tensors into payload rows.

    Args:
        base: the first of the source tensors, fp32, bf16 or fp16.
        tensors: the places of all of them.
        slices: int32 [rows], which slice each row holds.
        payload: uint8 [rows, row bytes], contiguous; only the bytes of these tensors are written.
        seed: for stochastic rounding; tensor i of the launch uses `seed.of_tensor(i)`.
    """
    rows, row_bytes = payload.shape
    seed = seed or Seed(0, 0)
    form = segments.format
    with torch.cuda.device_of(payload):
        quantize_kernel[segments.grid(rows, segments.format.tile_blocks)](
            base,
            payload,
            slices,
            tensors.entries,
            segments.segments,
            row_bytes,
            seed.low,
            seed.high,
            ELEMENT=form.element,
            BLOCK_SIZE=form.block_size,
            WIDTH=form.width,
            TILE_BLOCKS=form.tile_blocks,
            HADAMARD=form.hadamard,
            ROUNDING=form.rounding,
            LARGEST=form.largest,
            SCALE=form.scale,
            ALIGNED=tensors.aligned,
            NATIVE_FP8=native_float8(payload.device),
            INTERPRETED=interpreted(),
            num_warps=form.num_warps,
            enable_fp_fusion=False,
        )
