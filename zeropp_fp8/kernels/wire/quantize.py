"""Tensors -> payload rows, in one pass: read 2 (or 4) bytes per element, write its code and 1 or 2 bytes per block.

    payload[r] = for each tensor: encode(tensor.flat[s * S : (s + 1) * S]) with s = slices[r], S = its slice size

With a scale per tensor that all ranks share (formats/shared_scale.py), the kernel also finds the tensor's amax, and
counts codes at the largest magnitude and numbers that became zero, by integer atomics in any order.

The order of `slices` is qgZ's slice reordering (ZeRO++ section 3.3). Elements beyond a tensor's end count as zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.formats.scale_table import OF_GRADIENTS, SharedScales
from zeropp_fp8.kernels.elements import EXPONENT_OF_INF, block_scales, codes_of, load_some, narrowed, rotate, store_some
from zeropp_fp8.kernels.launching import Kernel, Plan
from zeropp_fp8.kernels.mx_elements import mx_codes_of, mx_scale_blocks, pack_four_bits, store_six_bits
from zeropp_fp8.kernels.wire.launch_tables import SegmentTable, TensorTable


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
def slice_of_tensor(base_ptr, tensors_ptr, segment, slice_index, slice_numel, ALIGNED: tl.constexpr):
    """(where a slice of a tensor starts, how many of its elements lie before the tensor's end: none if negative)."""
    numel = tl.load(tensors_ptr + 2 * segment + 1)
    # Said of the sum: what is said of an argument is lost when Triton inlines a function.
    start = tl.load(tensors_ptr + 2 * segment) + slice_index * slice_numel
    if ALIGNED:
        start = tl.multiple_of(start, 16 // (base_ptr.dtype.element_ty.primitive_bitwidth // 8))
    return base_ptr + start, tl.minimum(slice_numel, numel - slice_index * slice_numel)


@triton.jit
def store_zeros(payload_ptr, start, end):
    """Zeros in the less than 16 bytes from `start` to `end`."""
    pad = tl.arange(0, 16)
    tl.store(payload_ptr + start + pad, tl.zeros((16,), tl.uint8), mask=pad < (end - start).to(tl.int32))


@triton.jit
def places_of_codes(tile, code_bytes, FORMAT: tl.constexpr):
    """Codes of a tile: (first byte, the bytes from there [tile_blocks, width / packed], how many, which exist)."""
    block_bytes: tl.constexpr = FORMAT.block_size // FORMAT.packed
    columns = tl.arange(0, FORMAT.width // FORMAT.packed)
    first_byte = tile * (FORMAT.tile_blocks * block_bytes)
    local = tl.arange(0, FORMAT.tile_blocks)[:, None] * block_bytes + columns[None, :]
    left = tl.minimum(code_bytes - first_byte, FORMAT.tile_blocks * block_bytes).to(tl.int32)
    return first_byte, local, left, columns[None, :] < block_bytes


@triton.jit
def store_codes(codes, codes_ptr, tile, code_bytes, FORMAT: tl.constexpr, WHOLE: tl.constexpr):
    """The inverse of `load_codes` (dequantize.py), for what is encoded: nothing at or beyond `code_bytes`."""
    first_byte, local, left, width_ok = places_of_codes(tile, code_bytes, FORMAT)
    padded: tl.constexpr = FORMAT.width != FORMAT.block_size
    codes = codes.to(tl.uint8)
    store_some(codes_ptr + first_byte + local, codes, local, left, width_ok, WHOLE, padded)


@triton.jit
def shared_codes(values, multiplier, counts_ptr, FORMAT: tl.constexpr):
    """uint8 codes of fp32 values, counted."""
    element: tl.constexpr = FORMAT.element
    bad = (values.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= EXPONENT_OF_INF
    scaled = tl.where(bad, 0.0, values * multiplier)
    codes = codes_of(scaled, element, FORMAT.native_fp8, FORMAT.tile_blocks, FORMAT.width)
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
def encode_blocks(values, FORMAT: tl.constexpr):
    """(codes, scales) of fp32 [tile_blocks, width], as they are stored; of a format with a scale per block."""
    element: tl.constexpr = FORMAT.element
    x = values.to(tl.float32)
    if FORMAT.hadamard:
        x = rotate(x * (1.0 / 32.0), FORMAT.tile_blocks, FORMAT.width)
    if FORMAT.scale == "bf16":
        scales, factors, bad = block_scales(x, FORMAT.largest)
        scaled = tl.where(bad[:, None], 0.0, x * factors[:, None])
    else:
        mode: tl.constexpr = FORMAT.scale
        scales, scaled = mx_scale_blocks(x, element, mode)
    if FORMAT.scale == "bf16":
        codes = codes_of(scaled, element, FORMAT.native_fp8, FORMAT.tile_blocks, FORMAT.width)
    else:
        codes = mx_codes_of(scaled, element, FORMAT.native_fp8)
        if element == "mxfp4":
            codes = pack_four_bits(codes, FORMAT.tile_blocks)
    return codes, scales


@triton.jit
def store_blocks(
    codes, scales, payload_ptr, tile, num_blocks, code_bytes, total_bytes, FORMAT: tl.constexpr, WHOLE: tl.constexpr
):
    """Write what `encode_blocks` gave to the payload of one tensor's slice, with the padding around it."""
    element: tl.constexpr = FORMAT.element
    blocks = tl.arange(0, FORMAT.tile_blocks)
    first_block = tile * FORMAT.tile_blocks
    scale_bytes: tl.constexpr = 2 if FORMAT.scale == "bf16" else 1
    scale_dtype: tl.constexpr = tl.int16 if FORMAT.scale == "bf16" else tl.uint8
    scales_ptr = payload_ptr.to(tl.pointer_type(scale_dtype))
    blocks_left = tl.minimum(num_blocks - first_block, FORMAT.tile_blocks).to(tl.int32)
    tl.store(scales_ptr + first_block + blocks, scales.to(scale_dtype), mask=blocks < blocks_left)
    codes_start = tl.multiple_of((num_blocks * scale_bytes + 15) // 16 * 16, 16)

    if element == "mxfp6_e2m3" or element == "mxfp6_e3m2":
        words = blocks[:, None] * 6 + 3 * tl.arange(0, 2)[None, :]
        words_ptr = (payload_ptr + codes_start + first_block * 24).to(tl.pointer_type(tl.int32))
        store_six_bits(words_ptr + words, codes, blocks[:, None] < blocks_left, FORMAT.tile_blocks)
    else:
        store_codes(codes, payload_ptr + codes_start, tile, code_bytes, FORMAT, WHOLE)

    if tile == 0:  # zeros between scales and codes
        pad = tl.arange(0, 16 // scale_bytes)
        tl.store(
            scales_ptr + num_blocks + pad,
            tl.zeros((16 // scale_bytes,), scale_dtype),
            mask=pad < (codes_start // scale_bytes - num_blocks).to(tl.int32),
        )
        store_zeros(payload_ptr, codes_start + code_bytes, total_bytes)


@triton.jit
def store_tile(
    values,
    payload_ptr,
    tile,
    numel,
    num_blocks,
    code_bytes,
    total_bytes,
    multiplier,
    counts_ptr,
    FORMAT: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Encode fp32 [tile_blocks, width] (zeros beyond the slice) into the payload of one tensor's slice.

    `multiplier`, `counts_ptr`: of a shared scale, see `shared_codes`.
    """
    if FORMAT.scale == "none":
        dtype: tl.constexpr = FORMAT.dtype
        local = tl.arange(0, FORMAT.tile_blocks)[:, None] * FORMAT.width + tl.arange(0, FORMAT.width)[None, :]
        first = tile * FORMAT.tile_blocks * FORMAT.block_size
        left = tl.minimum(numel - first, FORMAT.tile_blocks * FORMAT.width).to(tl.int32)
        if values.dtype != dtype:
            values = narrowed(values, dtype, FORMAT.interpreted)
        store_some(payload_ptr.to(tl.pointer_type(dtype)) + first + local, values, local, left, True, WHOLE, False)
        if tile == 0:
            store_zeros(payload_ptr, code_bytes, total_bytes)
    elif FORMAT.scale == "shared":
        codes = shared_codes(values, multiplier, counts_ptr, FORMAT)
        store_codes(codes, payload_ptr, tile, numel, FORMAT, WHOLE)
        if tile == 0:
            store_zeros(payload_ptr, code_bytes, total_bytes)
    else:
        codes, scales = encode_blocks(values, FORMAT)
        store_blocks(codes, scales, payload_ptr, tile, num_blocks, code_bytes, total_bytes, FORMAT, WHOLE)


@triton.jit
def load_tile(tensor_ptr, end, tile, FORMAT: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of a tensor's slice as it is stored, zeros at and beyond element `end` of the slice."""
    columns = tl.arange(0, FORMAT.width)
    start = tile * FORMAT.tile_numel
    # Tile-local offsets fit 32 bits; only the base is computed in 64.
    left = tl.maximum(tl.minimum(end - start, FORMAT.tile_numel), 0).to(tl.int32)
    local = tl.arange(0, FORMAT.tile_blocks)[:, None] * FORMAT.block_size + columns[None, :]
    width_ok = columns[None, :] < FORMAT.block_size
    return load_some(tensor_ptr + start + local, local, left, width_ok, WHOLE, FORMAT.width != FORMAT.block_size)


@Kernel
@triton.jit(do_not_specialize_on_alignment=["multipliers_ptr", "amax_ptr", "counts_ptr"])
def quantize_kernel(
    base_ptr,
    payload_ptr,
    tensors_ptr,
    slices_ptr,
    multipliers_ptr,
    amax_ptr,
    counts_ptr,
    segments_ptr,
    row_bytes,
    FORMAT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: one tile (axis 0) of one tensor's slice (axis 2) in one row (axis 1)."""
    tile = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    segment = tl.program_id(2).to(tl.int64)
    element: tl.constexpr = FORMAT.element
    offset, slice_numel, num_blocks, code_bytes, total_bytes = segment_of_program(segments_ptr, segment, element)
    if tile * FORMAT.tile_numel >= slice_numel:
        return
    slice_index = tl.load(slices_ptr + row).to(tl.int64)
    tensor_ptr, end = slice_of_tensor(base_ptr, tensors_ptr, segment, slice_index, slice_numel, ALIGNED)
    payload_ptr += tl.multiple_of(row * row_bytes, 16) + offset
    multiplier = 1.0 if FORMAT.scale != "shared" else tl.load(multipliers_ptr + segment)
    # The body is compiled twice, so that a whole tile has neither masks nor branches.
    if end - tile * FORMAT.tile_numel >= FORMAT.tile_numel:
        x = load_tile(tensor_ptr, end, tile, FORMAT, True)
        if FORMAT.scale == "shared":
            x = x.to(tl.float32)
        store_tile(
            x, payload_ptr, tile, slice_numel, num_blocks, code_bytes, total_bytes, multiplier, counts_ptr, FORMAT,
            True,
        )  # fmt: skip
    else:
        x = load_tile(tensor_ptr, end, tile, FORMAT, False)
        if FORMAT.scale == "shared":
            x = x.to(tl.float32)
        store_tile(
            x, payload_ptr, tile, slice_numel, num_blocks, code_bytes, total_bytes, multiplier, counts_ptr, FORMAT,
            False,
        )  # fmt: skip
    if FORMAT.scale == "shared":
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        finite = tl.where(bits < EXPONENT_OF_INF, bits, 0)
        tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)) + segment, tl.max(tl.max(finite, axis=1), axis=0))


def quantize(
    base: Tensor,
    tensors: TensorTable,
    segments: SegmentTable,
    slices: Tensor,
    payload: Tensor,
    shared: SharedScales | None = None,
) -> None:
    """Encode slices of tensors into payload rows.

    Args:
        base: the first of the source tensors, fp32, bf16 or fp16.
        tensors: the places of all of them.
        slices: int32 [rows], which slice each row holds.
        payload: uint8 [rows, row bytes], contiguous; only the bytes of these tensors are written.
        shared: of these tensors, where their format's scale is shared; `amax` and `counts` are brought up to date.
    """
    rows, row_bytes = payload.shape
    scales = () if shared is None else (shared.encode, shared.amax, shared.counts[OF_GRADIENTS])
    key = (quantize_kernel, base.dtype, rows, row_bytes, tensors.aligned, len(scales))
    plan = segments.plans.get(key)
    if plan is None:
        form, unused = segments.format, (None,) * (3 - len(scales))
        last = (*unused, segments.segments, row_bytes)
        constants = {"FORMAT": form, "ALIGNED": tensors.aligned, "num_warps": form.num_warps, "enable_fp_fusion": False}
        grid = segments.grid(rows, form.tile_blocks)
        plan = segments.plans[key] = Plan(quantize_kernel, grid, last, constants)
    plan(base, payload, tensors.entries, slices, *scales)
