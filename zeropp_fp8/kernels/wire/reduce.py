"""Payloads of several ranks -> the fp32 mean of what they decode to -> tensors, or a payload for the next hop.

    mean[r] = (decode(received[0, r]) + decode(received[1, r]) + ...) * (1 / ranks)      added in this order,
                                                          rotated numbers as they are and rotated back once, at the end
    out[r]  = encode(mean[r])          (reduce_to_payload: the hop between nodes follows)
    tensor  = mean[0], or tensor += it (reduce_to_tensors: the last hop)

Of FP8 codes with a scale per tensor that all ranks share it is the sum, which becomes codes without a multiplier,
or numbers by a factor (formats/shared_scale.py).

One pass: the mean lives in registers only. With 8 ranks of int8 and an int4 result that is 1.07 bytes an input element.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.formats.scale_table import OF_PARTIAL_SUMS, OF_RESULTS, SharedScales
from zeropp_fp8.kernels.elements import numbers_of, rotate
from zeropp_fp8.kernels.launching import Kernel, Plan
from zeropp_fp8.kernels.wire.dequantize import inside, load_codes, load_quantized, load_unquantized, write_tile
from zeropp_fp8.kernels.wire.launch_tables import SegmentTable, TensorTable
from zeropp_fp8.kernels.wire.quantize import segment_of_program, shared_codes, store_codes, store_tile


@triton.jit
def add_rank(total, received_ptr, tile, numel, num_blocks, code_bytes, FORMAT: tl.constexpr, WHOLE: tl.constexpr):
    """fp32 `total` plus one rank's tile, in the rotated domain where the format rotates."""
    if FORMAT.scale == "none":
        total += load_unquantized(received_ptr, tile, numel, FORMAT, WHOLE).to(tl.float32)
    elif FORMAT.scale == "shared":
        element: tl.constexpr = FORMAT.element
        codes = load_codes(received_ptr, tile, numel, FORMAT, WHOLE)
        total += numbers_of(codes, element, FORMAT.native_fp8, FORMAT.tile_blocks, FORMAT.width)
    else:
        numbers, scales = load_quantized(received_ptr, tile, num_blocks, code_bytes, FORMAT, WHOLE)
        if FORMAT.scale == "bf16":
            # Fused on purpose: number times scale has at most 16 significant bits, so the product is exact in fp32 and
            # one rounding is the same as two. A sum is bound by instructions: 4 an element here, 65 us of memory in
            # 2^28.
            total = tl.fma(numbers, tl.broadcast_to(scales[:, None], numbers.shape), total)
        else:
            # Exact too, but it may overflow to Inf, which a fused product would do only after the sum.
            total += numbers * scales[:, None]
    return total


@triton.jit
def mean_of_tiles(
    received_ptr,
    rank_bytes,
    inverse_ranks,
    tile,
    numel,
    num_blocks,
    code_bytes,
    RANKS: tl.constexpr,
    FORMAT: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """fp32 mean of the same tile of every rank; `received_ptr` is at rank 0's, `rank_bytes` from one to the next.

    Of codes with a shared scale it is the sum of their numbers.
    """
    BLOCKS: tl.constexpr = FORMAT.tile_blocks
    WIDTH: tl.constexpr = FORMAT.width
    # -0: the sum with the first rank's numbers is these, also where they are -0. (tl.full makes 0 of -0.0.) Sums of
    # codes begin with 0.
    zero: tl.constexpr = 0 if FORMAT.scale == "shared" else -0x80000000
    total = tl.full((BLOCKS, WIDTH), zero, tl.int32).to(tl.float32, bitcast=True)
    if RANKS <= 16:
        for rank in tl.static_range(RANKS):  # unrolled, so that all loads are under way before the first sum
            rank_ptr = received_ptr + tl.multiple_of(rank_bytes * rank, 16)
            total = add_rank(total, rank_ptr, tile, numel, num_blocks, code_bytes, FORMAT, WHOLE)
    else:
        for rank in range(RANKS):
            rank_ptr = received_ptr + tl.multiple_of(rank_bytes * rank, 16)
            total = add_rank(total, rank_ptr, tile, numel, num_blocks, code_bytes, FORMAT, WHOLE)
    if FORMAT.scale != "shared":
        total *= inverse_ranks
    if FORMAT.hadamard:
        total = rotate(total, BLOCKS, WIDTH)
    if FORMAT.fills_padding and (FORMAT.width != FORMAT.block_size or not WHOLE):
        # The next hop must see zeros there.
        total = tl.where(inside(numel, tile, FORMAT), total, 0.0)
    return total


@Kernel
@triton.jit(do_not_specialize_on_alignment=["counts_ptr"])
def reduce_to_payload_kernel(
    received_ptr,
    payload_ptr,
    counts_ptr,
    segments_in_ptr,
    segments_out_ptr,
    rank_bytes,
    row_bytes_in,
    row_bytes_out,
    inverse_ranks,
    RANKS: tl.constexpr,
    FORMAT_IN: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """One program: one tile (axis 0) of one tensor's slice (axis 2) in one row (axis 1)."""
    tile = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    segment = tl.program_id(2).to(tl.int64)
    element_in: tl.constexpr = FORMAT_IN.element
    element: tl.constexpr = FORMAT.element
    offset, numel, num_blocks, code_bytes, _ = segment_of_program(segments_in_ptr, segment, element_in)
    if tile * FORMAT.tile_numel >= numel:
        return
    received_ptr += tl.multiple_of(row * row_bytes_in, 16) + offset
    offset, _, _, code_bytes_out, total_bytes = segment_of_program(segments_out_ptr, segment, element)
    payload_ptr += tl.multiple_of(row * row_bytes_out, 16) + offset
    blocks_out = (numel + FORMAT.block_size - 1) // FORMAT.block_size
    # The body is compiled twice, so that a whole tile has neither masks nor branches.
    if numel - tile * FORMAT.tile_numel >= FORMAT.tile_numel:
        mean = mean_of_tiles(
            received_ptr, rank_bytes, inverse_ranks, tile, numel, num_blocks, code_bytes, RANKS, FORMAT_IN, True
        )
        store_tile(
            mean, payload_ptr, tile, numel, blocks_out, code_bytes_out, total_bytes, 1.0, counts_ptr, FORMAT, True
        )  # fmt: skip
    else:
        mean = mean_of_tiles(
            received_ptr, rank_bytes, inverse_ranks, tile, numel, num_blocks, code_bytes, RANKS, FORMAT_IN, False
        )
        store_tile(
            mean, payload_ptr, tile, numel, blocks_out, code_bytes_out, total_bytes, 1.0, counts_ptr, FORMAT, False
        )  # fmt: skip


@triton.jit
def write_mean(
    mean, tensor_ptr, end, tile, factor, counts_ptr, ACCUMULATE: tl.constexpr, FORMAT: tl.constexpr, WHOLE: tl.constexpr
):
    """A tile of a mean, or of a sum of codes with a shared scale, to a tensor's slice."""
    if tensor_ptr.dtype.element_ty == tl.uint8:
        # What lies beyond the end is padding: zeros, which are not counted.
        store_codes(shared_codes(mean, 1.0, counts_ptr, FORMAT), tensor_ptr, tile, end, FORMAT, WHOLE)
    else:
        if FORMAT.scale == "shared":
            mean *= factor
        write_tile(mean, tensor_ptr, end, tile, ACCUMULATE, FORMAT, WHOLE)


@Kernel
@triton.jit(do_not_specialize_on_alignment=["factors_ptr", "counts_ptr"])
def reduce_to_tensors_kernel(
    received_ptr,
    base_ptr,
    tensors_ptr,
    factors_ptr,
    counts_ptr,
    segments_ptr,
    rank_bytes,
    inverse_ranks,
    RANKS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program: one tile (axis 0) of one tensor's slice (axis 2)."""
    tile = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(2).to(tl.int64)
    element: tl.constexpr = FORMAT.element
    offset, numel, num_blocks, code_bytes, _ = segment_of_program(segments_ptr, segment, element)
    if tile * FORMAT.tile_numel >= numel:
        return
    start = tl.load(tensors_ptr + 2 * segment)
    if ALIGNED:
        start = tl.multiple_of(start, 16 // (base_ptr.dtype.element_ty.primitive_bitwidth // 8))
    end = tl.minimum(numel, tl.load(tensors_ptr + 2 * segment + 1))
    received_ptr += offset
    factor = 1.0 if FORMAT.scale != "shared" else tl.load(factors_ptr + segment)
    # The body is compiled twice, so that a whole tile has neither masks nor branches.
    if end - tile * FORMAT.tile_numel >= FORMAT.tile_numel:
        mean = mean_of_tiles(
            received_ptr, rank_bytes, inverse_ranks, tile, numel, num_blocks, code_bytes, RANKS, FORMAT, True
        )
        write_mean(mean, base_ptr + start, end, tile, factor, counts_ptr, ACCUMULATE, FORMAT, True)
    else:
        mean = mean_of_tiles(
            received_ptr, rank_bytes, inverse_ranks, tile, numel, num_blocks, code_bytes, RANKS, FORMAT, False
        )
        write_mean(mean, base_ptr + start, end, tile, factor, counts_ptr, ACCUMULATE, FORMAT, False)


def can_chain(first: SegmentTable, then: SegmentTable) -> bool:
    """Whether reduce_to_payload can go from one format to the other: their blocks must cover the same elements."""
    a, b = first.format, then.format
    return (a.block_size, a.width) == (b.block_size, b.width)


def reduce_to_payload(
    received: Tensor,
    segments_in: SegmentTable,
    segments_out: SegmentTable,
    payload: Tensor,
    shared: SharedScales | None = None,
) -> None:
    """Encode the mean over ranks, row by row.

    Args:
        received: uint8 [ranks, rows, row bytes in], contiguous.
        segments_in, segments_out: the same tensors in the two formats; `can_chain` must hold.
        payload: uint8 [rows, row bytes out], contiguous.
        shared: of these tensors, where their format's scale is shared; `counts` is brought up to date.
    """
    ranks, rows, row_bytes_in = received.shape
    counts = () if shared is None else (shared.counts[OF_PARTIAL_SUMS],)
    key = (reduce_to_payload_kernel, received.shape, payload.shape, segments_out, len(counts))
    plan = segments_in.plans.get(key)
    if plan is None:
        tile = max(segments_in.format, segments_out.format, key=lambda f: f.sum_blocks)
        unused = (None,) * (1 - len(counts))
        sizes = (rows * row_bytes_in, row_bytes_in, payload.shape[1], 1.0 / ranks)
        last = (*unused, segments_in.segments, segments_out.segments, *sizes)
        constants = {
            "RANKS": ranks,
            "FORMAT_IN": segments_in.format.with_tiles(tile.sum_blocks),
            "FORMAT": segments_out.format.with_tiles(tile.sum_blocks),
            "num_warps": tile.sum_warps,
            "enable_fp_fusion": False,
        }
        grid = segments_in.grid(rows, tile.sum_blocks)
        plan = segments_in.plans[key] = Plan(reduce_to_payload_kernel, grid, last, constants)
    plan(received, payload, *counts)


def reduce_to_tensors(
    received: Tensor,
    segments: SegmentTable,
    base: Tensor,
    tensors: TensorTable,
    accumulate: bool = False,
    shared: SharedScales | None = None,
) -> None:
    """Write the mean over ranks of the single row to tensors, or add it to them.

    Args:
        received: uint8 [ranks, row bytes], contiguous.
        base: the first of the destination tensors, fp32, bf16 or fp16; with a shared scale it may be uint8, which gets
            the codes of the sums.
        tensors: the places of all of them, each with at most its slice's elements.
        shared: of these tensors, where their format's scale is shared; `counts` is brought up to date.
    """
    ranks, row_bytes = received.shape
    scales = () if shared is None else (shared.decode, shared.counts[OF_RESULTS])
    key = (reduce_to_tensors_kernel, base.dtype, ranks, row_bytes, accumulate, tensors.aligned, len(scales))
    plan = segments.plans.get(key)
    if plan is None:
        form, unused = segments.format, (None,) * (2 - len(scales))
        last = (*unused, segments.segments, row_bytes, 1.0 / ranks)
        constants = {
            "RANKS": ranks,
            "ACCUMULATE": accumulate,
            "FORMAT": form.with_tiles(form.sum_blocks),
            "ALIGNED": tensors.aligned,
            "num_warps": form.sum_warps,
            "enable_fp_fusion": False,
        }
        grid = segments.grid(1, form.sum_blocks)
        plan = segments.plans[key] = Plan(reduce_to_tensors_kernel, grid, last, constants)
    plan(received, base, tensors.entries, *scales)
