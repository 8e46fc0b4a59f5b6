"""Differences between tensors and what is held of them, as codes: made by the sender, added by all, in one pass each.

    payload[r] = encode(slice of the tensor - decode(held[r]))          (quantize_differences)
    held[r]    = encode(decode(payload[r]) + decode(held[r]))           (add_differences)

With INT4 and bf16 the first reads 4 bytes per element and writes 0.5, the second reads 2.5 and writes 2. The formulas
and orders of operations are those of comm/payload.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.kernels.launching import Kernel, Plan
from zeropp_fp8.kernels.wire.dequantize import LARGEST_FP32, decode_tile, inside, tile_of_program, write_tile
from zeropp_fp8.kernels.wire.launch_tables import KernelFormat, SegmentTable, TensorTable
from zeropp_fp8.kernels.wire.quantize import load_tile, segment_of_program, slice_of_tensor, store_tile

# Elements that a program handles, 16 per thread: two tiles are there at once.
_TILE = 1024


@triton.jit
def load_held(
    held_ptr, tile, numel, num_blocks, code_bytes, HELD: tl.constexpr, FORMAT: tl.constexpr, WHOLE: tl.constexpr
):
    """A tile of what is held of a slice, fp32 in the tile of FORMAT, zeros beyond the slice's end."""
    if HELD.scale == "none":
        values = load_tile(held_ptr.to(tl.pointer_type(HELD.dtype)), numel, tile, FORMAT, WHOLE).to(tl.float32)
    else:
        values = decode_tile(held_ptr, None, tile, numel, num_blocks, code_bytes, LARGEST_FP32, HELD, WHOLE)
        values = tl.reshape(values, (FORMAT.tile_blocks, FORMAT.width))
        if HELD.fills_padding and (FORMAT.width != FORMAT.block_size or not WHOLE):
            values = tl.where(inside(numel, tile, FORMAT), values, 0.0)
    return values


@triton.jit
def quantize_tile(
    tensor_ptr,
    end,
    payload_ptr,
    held_ptr,
    tile,
    numel,
    num_blocks,
    code_bytes,
    total_bytes,
    held_blocks,
    held_code_bytes,
    FORMAT: tl.constexpr,
    HELD: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One tile of how a tensor's slice differs from what is held of it."""
    held = load_held(held_ptr, tile, numel, held_blocks, held_code_bytes, HELD, FORMAT, WHOLE)
    values = load_tile(tensor_ptr, end, tile, FORMAT, WHOLE).to(tl.float32) - held
    store_tile(values, payload_ptr, tile, numel, num_blocks, code_bytes, total_bytes, 1.0, None, FORMAT, WHOLE)


@Kernel
@triton.jit
def quantize_differences_kernel(
    base_ptr,
    payload_ptr,
    held_ptr,
    tensors_ptr,
    slices_ptr,
    segments_ptr,
    held_segments_ptr,
    tile_starts_ptr,
    row_bytes,
    held_row_bytes,
    FORMAT: tl.constexpr,
    HELD: tl.constexpr,
    STARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: one tile of one tensor's slice (axis 0, tensor after tensor) in one row (axis 1)."""
    tile, segment = tile_of_program(tile_starts_ptr, STARTS)
    row = tl.program_id(1).to(tl.int64)
    element: tl.constexpr = FORMAT.element
    held_element: tl.constexpr = HELD.element
    offset, numel, num_blocks, code_bytes, total_bytes = segment_of_program(segments_ptr, segment, element)
    held_at, _, held_blocks, held_code_bytes, _ = segment_of_program(held_segments_ptr, segment, held_element)
    slice_index = tl.load(slices_ptr + row).to(tl.int64)
    tensor_ptr, end = slice_of_tensor(base_ptr, tensors_ptr, segment, slice_index, numel, ALIGNED)
    payload_ptr += tl.multiple_of(row * row_bytes, 16) + offset
    held_ptr += tl.multiple_of(row * held_row_bytes, 16) + held_at
    # The body is compiled twice, so that a whole tile has neither masks nor branches.
    if end - tile * FORMAT.tile_numel >= FORMAT.tile_numel:
        quantize_tile(
            tensor_ptr, end, payload_ptr, held_ptr, tile, numel, num_blocks, code_bytes, total_bytes, held_blocks,
            held_code_bytes, FORMAT, HELD, True,
        )  # fmt: skip
    else:
        quantize_tile(
            tensor_ptr, end, payload_ptr, held_ptr, tile, numel, num_blocks, code_bytes, total_bytes, held_blocks,
            held_code_bytes, FORMAT, HELD, False,
        )  # fmt: skip


@triton.jit
def keep_largest(largest_ptr, values):
    """The largest magnitude so far, by its bits: as integers NaN > Inf > every finite number."""
    bits = tl.max(tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1), axis=0)
    largest_ptr = largest_ptr.to(tl.pointer_type(tl.int32))
    tl.atomic_max(largest_ptr, bits, mask=bits > tl.load(largest_ptr), sem="relaxed")


@triton.jit
def add_tile(
    payload_ptr,
    held_ptr,
    largest_ptr,
    largest_stride,
    tile,
    numel,
    num_blocks,
    code_bytes,
    held_blocks,
    held_code_bytes,
    held_total_bytes,
    FORMAT: tl.constexpr,
    HELD: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Add one tile to what is held; unquantized it takes its place."""
    values = decode_tile(payload_ptr, None, tile, numel, num_blocks, code_bytes, LARGEST_FP32, FORMAT, WHOLE)
    if FORMAT.scale != "none":
        if FORMAT.fills_padding and (FORMAT.width != FORMAT.block_size or not WHOLE):
            values = tl.where(inside(numel, tile, FORMAT), values, 0.0)
        held = load_held(held_ptr, tile, numel, held_blocks, held_code_bytes, HELD, FORMAT, WHOLE)
        # Other threads write there than read: all have read before one writes.
        tl.debug_barrier()
        keep_largest(largest_ptr, values)
        keep_largest(largest_ptr + largest_stride, held)
        values += held
    if HELD.scale == "none":
        write_tile(values, held_ptr.to(tl.pointer_type(HELD.dtype)), numel, tile, False, FORMAT, WHOLE)
    else:
        values = tl.reshape(values, (HELD.tile_blocks, HELD.width))
        store_tile(
            values, held_ptr, tile, numel, held_blocks, held_code_bytes, held_total_bytes, 1.0, None, HELD, WHOLE
        )  # fmt: skip


@Kernel
@triton.jit(do_not_specialize=["largest_stride"], do_not_specialize_on_alignment=["largest_ptr"])
def add_differences_kernel(
    payload_ptr,
    held_ptr,
    largest_ptr,
    segments_ptr,
    held_segments_ptr,
    tile_starts_ptr,
    row_bytes,
    held_row_bytes,
    largest_stride,
    FORMAT: tl.constexpr,
    HELD: tl.constexpr,
    STARTS: tl.constexpr,
):
    """One program: one tile of one tensor's slice (axis 0, tensor after tensor) in one row (axis 1)."""
    tile, segment = tile_of_program(tile_starts_ptr, STARTS)
    row = tl.program_id(1).to(tl.int64)
    element: tl.constexpr = FORMAT.element
    held_element: tl.constexpr = HELD.element
    offset, numel, num_blocks, code_bytes, _ = segment_of_program(segments_ptr, segment, element)
    held_at, _, held_blocks, held_code_bytes, held_bytes = segment_of_program(held_segments_ptr, segment, held_element)
    payload_ptr += tl.multiple_of(row * row_bytes, 16) + offset
    held_ptr += tl.multiple_of(row * held_row_bytes, 16) + held_at
    largest_ptr += segment
    # The body is compiled twice, so that a whole tile has neither masks nor branches.
    if numel - tile * FORMAT.tile_numel >= FORMAT.tile_numel:
        add_tile(
            payload_ptr, held_ptr, largest_ptr, largest_stride, tile, numel, num_blocks, code_bytes, held_blocks,
            held_code_bytes, held_bytes, FORMAT, HELD, True,
        )  # fmt: skip
    else:
        add_tile(
            payload_ptr, held_ptr, largest_ptr, largest_stride, tile, numel, num_blocks, code_bytes, held_blocks,
            held_code_bytes, held_bytes, FORMAT, HELD, False,
        )  # fmt: skip


def can_add(differences: SegmentTable, held: SegmentTable) -> bool:
    """Whether differences can be made and added here: integers, or numbers as they are, in blocks that fit each other.

    No FP8, which a kernel must not both store and decode (`fp8_codes`).
    """
    mine, kept = differences.format, held.format
    known = all(form.scale == "none" or form.element.startswith("int") for form in (mine, kept))
    same_blocks = (mine.block_size, mine.width) == (kept.block_size, kept.width)
    powers_of_two = all(form.block_size == form.width for form in (mine, kept))
    return known and (kept.scale == "none" or same_blocks or powers_of_two)


def with_equal_tiles(mine: KernelFormat, kept: KernelFormat) -> tuple[KernelFormat, KernelFormat, int]:
    """Both formats with tiles of the same elements, and the warps of a program."""
    forms = (mine,) if kept.scale == "none" else (mine, kept)  # unquantized numbers are taken by the tiles of `mine`
    numel = max(max(1, _TILE // form.width) * form.block_size for form in forms)
    mine, kept = (form.with_tiles(max(1, numel // form.block_size)) for form in (mine, kept))
    return mine, kept, min(16, max(2, mine.tile_blocks * mine.width // 512))


def _launch_of(segments: SegmentTable, held_segments: SegmentTable) -> tuple[int, tuple[Tensor, ...], dict]:
    """(tiles, where things lie, constants) of both kernels."""
    form, kept, num_warps = with_equal_tiles(segments.format, held_segments.format)
    tile_starts, tiles = segments.tile_starts(form.tile_blocks)
    places = (segments.segments, held_segments.segments, tile_starts)
    constants = {"FORMAT": form, "HELD": kept, "STARTS": tile_starts.numel(), "num_warps": num_warps}
    return tiles, places, {**constants, "enable_fp_fusion": False}


def quantize_differences(
    base: Tensor,
    tensors: TensorTable,
    segments: SegmentTable,
    slices: Tensor,
    payload: Tensor,
    held_segments: SegmentTable,
    held: Tensor,
) -> None:
    """`quantize` of how slices differ from what `held` has of them.

    Args:
        held_segments: the same tensors where `held` has them; `can_add` must hold.
        held: uint8 [rows, bytes], contiguous.
    """
    rows, row_bytes = payload.shape
    sizes = (payload.shape, held.shape)
    key = (quantize_differences_kernel, base.dtype, *sizes, tensors.aligned, held_segments)
    plan = segments.plans.get(key)
    if plan is None:
        tiles, places, constants = _launch_of(segments, held_segments)
        last, constants = (*places, row_bytes, held.shape[1]), {**constants, "ALIGNED": tensors.aligned}
        plan = segments.plans[key] = Plan(quantize_differences_kernel, (tiles, rows), last, constants)
    plan(base, payload, held, tensors.entries, slices)


def add_differences(
    payload: Tensor, segments: SegmentTable, held: Tensor, held_segments: SegmentTable, largest: Tensor
) -> None:
    """Add what rows of `payload` decode to to what those of `held` do; unquantized tensors take their place.

    Args:
        payload, held: uint8 [rows, row bytes], contiguous.
        segments, held_segments: the same tensors in both; `can_add` must hold.
        largest: fp32 [2, tensors], rows of adjacent numbers: raised to the largest magnitude of a tensor's differences,
            and of what was held.
    """
    rows, row_bytes = payload.shape
    key = (add_differences_kernel, payload.shape, held.shape, largest.stride(0), held_segments)
    plan = segments.plans.get(key)
    if plan is None:
        tiles, places, constants = _launch_of(segments, held_segments)
        last = (*places, row_bytes, held.shape[1], largest.stride(0))
        plan = segments.plans[key] = Plan(add_differences_kernel, (tiles, rows), last, constants)
    plan(payload, held, largest)
