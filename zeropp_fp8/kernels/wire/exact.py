"""Exact differences of numbers from what the receiver has of them, in the code of formats/exact.py: the same bytes.

A program, one warp, handles one chunk of 1024 numbers of one tensor. `make_headers` reads new and old numbers to find
how a chunk is sent; `encode` reads both again and writes it to a body of zeros: bits of 8 numbers are put together in
registers where they fit into 64, and set by atomics. `add` reads and writes old numbers, or only listed ones where
nothing else has changed. Instructions bound them, not memory (benchmarks/results/kernels).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.formats.exact import MANTISSA, bits_of
from zeropp_fp8.kernels.launching import Kernel
from zeropp_fp8.kernels.wire.dequantize import tile_of_program
from zeropp_fp8.kernels.wire.launch_tables import SegmentTable

_CHUNK = tl.constexpr(1024)
_RAW = tl.constexpr(255)
_NO_NUMBER = tl.constexpr(1024)  # the exponent of a number beyond the end of its tensor
_PIECE = tl.constexpr(256)  # numbers that are written or added at once: 8 per thread, which reads 16 bytes of each
_GROUP = tl.constexpr(8)  # of them that are put together, if 64 bits do
_STRIDE = tl.constexpr(128)  # bits of a list's unary part that are read at once


@triton.jit
def length_of(magnitudes):
    """Bits that integers need."""
    return (float_exponent(magnitudes) - 126) * (magnitudes > 0)


@triton.jit
def float_exponent(integers):
    """126 more than the bits that the magnitudes of integers of 24 bits at most need; 0 of 0."""
    return (integers.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255


@triton.jit
def low_bits(count):
    return 10 - length_of(tl.maximum(count - 1, 0))


@triton.jit
def in_order(numbers, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """And back. Numbers are the upper bits of int32, whose lower ones are zeros; so they count mod 2^BITS."""
    MAGNITUDE: tl.constexpr = 0x80000000 - (1 << (32 - BITS))
    if MANTISSA < BITS - 1:  # floats
        numbers = numbers ^ ((numbers >> 31) & MAGNITUDE)
    return numbers


@triton.jit
def near_bits(power, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    return tl.where(power < MANTISSA, tl.where(power > 0, power + 1, 0), BITS)


@triton.jit
def near_part(difference, power, MANTISSA: tl.constexpr):
    most = (1 << tl.minimum(tl.maximum(power, 0), MANTISSA)) - 1
    return tl.where(power < MANTISSA, tl.minimum(tl.maximum(difference, -most), most), difference)


@triton.jit
def numbers_at(row_ptr, segments_ptr, tile, segment, BITS: tl.constexpr):
    """(where a chunk's numbers are in a row, how many are left of the tensor from there on)."""
    start = row_ptr + tl.multiple_of(tl.load(segments_ptr + 5 * segment), 16)
    if BITS == 16:
        numbers_ptr = start.to(tl.pointer_type(tl.int16))
    else:
        numbers_ptr = start.to(tl.pointer_type(tl.int8))
    left = tl.load(segments_ptr + 5 * segment + 1) - tile * _CHUNK
    return numbers_ptr + tile * _CHUNK, left.to(tl.int32)


@triton.jit
def load_numbers(numbers_ptr, left, NUMBERS: tl.constexpr, BITS: tl.constexpr):
    """int32 with numbers as their upper bits; 0 where there are none."""
    places = tl.arange(0, NUMBERS)
    if left >= NUMBERS:
        numbers = tl.load(numbers_ptr + places).to(tl.int32)
    else:
        numbers = tl.load(numbers_ptr + places, mask=places < left, other=0).to(tl.int32)
    return numbers << (32 - BITS)


@triton.jit
def exponents_of(numbers, left, NUMBERS: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    exponents = (numbers >> (32 - BITS + MANTISSA)) & ((1 << (BITS - 1 - MANTISSA)) - 1)
    if left < NUMBERS:
        exponents = tl.where(tl.arange(0, NUMBERS) < left, exponents, _NO_NUMBER)
    return exponents


@triton.jit
def header_of(top, bits, count, width):
    """(a header without its number of words, that number; too large where the fields cannot say what is left)."""
    low = low_bits(count)
    listed = tl.where(count > 0, count * (1 + low + width) + (_CHUNK >> low), 0)
    words = (bits + listed + 31) >> 5
    return top | (count & 1023) << 8 | width << 18, tl.where(width <= 15, words, 2 * _CHUNK)


@Kernel
@triton.jit
def make_headers_kernel(
    row_ptr, held_ptr, headers_ptr, segments_ptr, tile_starts_ptr, BITS: tl.constexpr, MANTISSA: tl.constexpr,
    STARTS: tl.constexpr,
):  # fmt: skip
    tile, segment = tile_of_program(tile_starts_ptr, STARTS)
    new_ptr, left = numbers_at(row_ptr, segments_ptr, tile, segment, BITS)
    old_ptr, _ = numbers_at(held_ptr, segments_ptr, tile, segment, BITS)
    held = load_numbers(old_ptr, left, _CHUNK, BITS)
    new = load_numbers(new_ptr, left, _CHUNK, BITS)
    difference = in_order(new, BITS, MANTISSA) - in_order(held, BITS, MANTISSA) >> (32 - BITS)
    exponents = exponents_of(held, left, _CHUNK, BITS, MANTISSA)
    lengths = float_exponent(difference)
    needed = tl.max(tl.where(lengths > 127, exponents + tl.minimum(lengths, MANTISSA + 126), 126), axis=0) - 126
    magnitudes = tl.abs(difference)
    # Only single units are left.
    top = tl.minimum(needed, _RAW)
    power = tl.where(top < _RAW, top, _NO_NUMBER) - exponents
    listed = (power <= 0) & (magnitudes == 1)
    sums = tl.sum(near_bits(power, BITS, MANTISSA) + tl.where(listed, 1 << 16, 0), axis=0)
    count = sums >> 16
    header, words = header_of(top, sums & 0xFFFF, count, tl.minimum(count, 1))
    # One bit less for each.
    top = tl.minimum(tl.maximum(needed - 1, 0), _RAW)
    power = tl.where(top < _RAW, top, _NO_NUMBER) - exponents
    rest = magnitudes + 1 - (1 << tl.minimum(tl.maximum(power, 0), MANTISSA))
    rest = tl.where(power < MANTISSA, rest, 0)
    sums = tl.sum(near_bits(power, BITS, MANTISSA) + tl.where(rest > 0, 1 << 16, 0), axis=0)
    count = sums >> 16
    width = tl.where(count > 0, 1 + length_of(tl.max(rest, axis=0) - 1), 0)
    other, other_words = header_of(top, sums & 0xFFFF, count, width)
    header, words = tl.where(other_words < words, other, header), tl.minimum(words, other_words)
    raw_words = (tl.minimum(left, _CHUNK) * BITS + 31) >> 5
    header, words = tl.where(raw_words < words, _RAW, header), tl.minimum(words, raw_words)
    tl.store(headers_ptr + tl.program_id(0), header | words << 22)


@triton.jit
def put_word(body_ptr, word, bits):
    tl.atomic_or(body_ptr + word, bits, mask=bits != 0, sem="relaxed")


@triton.jit
def put(body_ptr, values, places, WORDS: tl.constexpr):
    """Set the bits of uint64 values from bits `places` on, over so many words at most."""
    word, shift = places >> 5, (places & 31).to(tl.uint64)
    put_word(body_ptr, word, (values << shift).to(tl.uint32).to(tl.int32, bitcast=True))
    rest = values >> 1 >> (31 - shift)
    put_word(body_ptr, word + 1, rest.to(tl.uint32).to(tl.int32, bitcast=True))
    if WORDS > 2:
        put_word(body_ptr, word + 2, (rest >> 32).to(tl.uint32).to(tl.int32, bitcast=True))


@triton.jit
def put_run(body_ptr, values, lengths, first):
    """Set uint32 values of so many bits, one after the other from bit `first` on; give the bit after them."""
    grouped = tl.reshape(lengths, (_PIECE // _GROUP, _GROUP))
    of_groups = tl.sum(grouped, axis=1)
    if tl.max(of_groups, axis=0) <= 64:
        places = tl.cumsum(grouped, axis=1) - grouped
        together = tl.sum(tl.reshape(values, (_PIECE // _GROUP, _GROUP)).to(tl.uint64) << places.to(tl.uint64), axis=1)
        put(body_ptr, together.to(tl.uint64), first + tl.cumsum(of_groups, axis=0) - of_groups, 3)
    else:
        put(body_ptr, values.to(tl.uint64), first + tl.cumsum(lengths, axis=0) - lengths, 2)
    return first + tl.sum(of_groups, axis=0)


@triton.jit
def get(body_ptr, places):
    """uint32 from bits `places` on; a row ends with a word that no body has."""
    word, shift = places >> 5, (places & 31).to(tl.uint64)
    lower = tl.load(body_ptr + word).to(tl.uint32, bitcast=True)
    upper = tl.load(body_ptr + word + 1).to(tl.uint32, bitcast=True)
    return ((lower.to(tl.uint64) | upper.to(tl.uint64) << 32) >> shift).to(tl.uint32)


@triton.jit
def upper_bits(values, bits, BITS: tl.constexpr):
    """int32 with the lowest `bits` of values, BITS at most and one of them a sign, as an integer of its upper BITS."""
    unused = 31 - bits
    return (values << 1 << unused.to(tl.uint32)).to(tl.int32, bitcast=True) >> (unused - (31 - BITS))


@triton.jit
def body_of(headers_ptr, ends_ptr, chunk):
    """(top, count, width, low, the body's first word, its words, bits of the list's unary part)."""
    header = tl.load(headers_ptr + chunk)
    width, words = (header >> 18) & 15, (header >> 22) & 1023
    count = (header >> 8) & 1023
    count = tl.where((count == 0) & (width > 0), _CHUNK, count)
    low = low_bits(count)
    unary = tl.where(count > 0, count + (_CHUNK >> low), 0)
    return header & 255, count, width, low, tl.load(ends_ptr + chunk) - words, words, unary


@Kernel
@triton.jit
def encode_exact_kernel(
    row_ptr, held_ptr, headers_ptr, ends_ptr, body_ptr, segments_ptr, tile_starts_ptr, BITS: tl.constexpr,
    MANTISSA: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    top, count, width, low, start, words, unary = body_of(headers_ptr, ends_ptr, tl.program_id(0))
    if words > 0:
        body_ptr += start
        tile, segment = tile_of_program(tile_starts_ptr, STARTS)
        new_ptr, left = numbers_at(row_ptr, segments_ptr, tile, segment, BITS)
        old_ptr, _ = numbers_at(held_ptr, segments_ptr, tile, segment, BITS)
        top = tl.where(top < _RAW, top, _NO_NUMBER)
        place, indices, list_at, near_at = tl.arange(0, _PIECE), 0, unary, unary + count * (low + width)
        for first in range(0, _CHUNK, _PIECE):
            held = load_numbers(old_ptr + first, left - first, _PIECE, BITS)
            new = load_numbers(new_ptr + first, left - first, _PIECE, BITS)
            difference = in_order(new, BITS, MANTISSA) - in_order(held, BITS, MANTISSA) >> (32 - BITS)
            power = top - exponents_of(held, left - first, _PIECE, BITS, MANTISSA)
            bits, near = near_bits(power, BITS, MANTISSA), near_part(difference, power, MANTISSA)
            if top > 0:
                near_at = put_run(body_ptr, (near & ((1 << bits) - 1)).to(tl.uint32), bits, near_at)
            if count > 0:
                rest = difference - near
                listed = (rest != 0).to(tl.int32)
                # The unary part of 8 places: as many bits at most, and one for each that is listed
                grouped = tl.reshape(listed, (_PIECE // _GROUP, _GROUP))
                of_groups = tl.sum(grouped, axis=1)
                groups = tl.arange(0, _PIECE // _GROUP) * _GROUP + first >> low
                at = (tl.reshape(first + place >> low, (_PIECE // _GROUP, _GROUP))) - groups[:, None]
                at += tl.cumsum(grouped, axis=1) - grouped
                unary_bits = tl.sum(grouped << at, axis=1)
                put(body_ptr, unary_bits.to(tl.uint64), indices + groups + tl.cumsum(of_groups, axis=0) - of_groups, 2)
                indices += tl.sum(of_groups, axis=0)
                value = tl.where(rest > 0, rest - 1, rest) & ((1 << width) - 1)
                entry = tl.where(rest != 0, (first + place & ((1 << low) - 1)) | value << low, 0)
                list_at = put_run(body_ptr, entry.to(tl.uint32), listed * (low + width), list_at)


@Kernel
@triton.jit(do_not_specialize=["chunks", "own"])
def add_exact_kernel(
    held_ptr, brought_ptr, ends_ptr, segments_ptr, tile_starts_ptr, held_row_bytes, row_bytes, headers_at, body_at,
    chunks, own, BITS: tl.constexpr, MANTISSA: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    row += (row >= own).to(tl.int64)
    brought_ptr += row * row_bytes
    headers_ptr = (brought_ptr + headers_at).to(tl.pointer_type(tl.int32))
    top, count, width, low, start, words, unary = body_of(headers_ptr, ends_ptr + row * chunks, tl.program_id(0))
    if words > 0:
        tile, segment = tile_of_program(tile_starts_ptr, STARTS)
        body_ptr = (brought_ptr + body_at).to(tl.pointer_type(tl.int32)) + start
        held_ptr += tl.multiple_of(row * held_row_bytes, 16)
        numbers_ptr, left = numbers_at(held_ptr, segments_ptr, tile, segment, BITS)
        if top > 0:
            top, near_at = tl.where(top < _RAW, top, _NO_NUMBER), unary + count * (low + width)
            for first in range(0, tl.minimum(_CHUNK, left), _PIECE):
                held = load_numbers(numbers_ptr + first, left - first, _PIECE, BITS)
                exponents = exponents_of(held, left - first, _PIECE, BITS, MANTISSA)
                bits = near_bits(top - exponents, BITS, MANTISSA)
                ends = tl.cumsum(bits, axis=0)
                values = get(body_ptr, near_at + ends - bits)
                near_at += tl.sum(bits, axis=0)
                changed = in_order(in_order(held, BITS, MANTISSA) + upper_bits(values, bits, BITS), BITS, MANTISSA)
                changed = (changed >> (32 - BITS)).to(numbers_ptr.dtype.element_ty)
                places = first + tl.arange(0, _PIECE)
                if left - first < _PIECE:
                    tl.store(numbers_ptr + places, changed, mask=places < left)
                else:
                    tl.store(numbers_ptr + places, changed)
            tl.debug_barrier()  # below other threads change the same numbers
        found = 0
        for first in range(0, unary, _STRIDE):
            bit = first + tl.arange(0, _STRIDE)
            is_set = (tl.load(body_ptr + (bit >> 5), mask=bit < unary, other=0) >> (bit & 31)) & 1
            index = found + tl.cumsum(is_set, axis=0) - 1
            listed = is_set > 0
            entry = get(body_ptr, unary + tl.maximum(index, 0) * (low + width))
            place = ((bit - index) << low) | (entry & ((1 << low) - 1)).to(tl.int32)
            rest = upper_bits(entry >> low.to(tl.uint32), width, BITS) >> (32 - BITS)
            rest = tl.where(rest >= 0, rest + 1, rest) << (32 - BITS)
            held = tl.load(numbers_ptr + place, mask=listed, other=0).to(tl.int32) << (32 - BITS)
            changed = in_order(in_order(held, BITS, MANTISSA) + rest, BITS, MANTISSA) >> (32 - BITS)
            tl.store(numbers_ptr + place, changed.to(numbers_ptr.dtype.element_ty), mask=listed)
            found += tl.sum(is_set, axis=0)


def _tables(segments: SegmentTable, dtype: torch.dtype) -> tuple[Tensor, Tensor, int, dict]:
    """(where tensors lie in a row, their first chunks, chunks, constants)."""
    starts, chunks = segments.tile_starts(1)
    constants = {"BITS": bits_of(dtype), "MANTISSA": MANTISSA[dtype], "STARTS": starts.numel(), "num_warps": 1}
    return segments.segments, starts, chunks, constants


def make_headers(row: Tensor, held: Tensor, segments: SegmentTable, dtype: torch.dtype) -> Tensor:
    """int32 [chunks of all tensors]: how `row`, uint8 [1, bytes], is sent to ranks that have `held`.

    Args:
        segments: where tensors lie in both, in numbers of `dtype`.
    """
    places, starts, chunks, constants = _tables(segments, dtype)
    headers = torch.empty(chunks, dtype=torch.int32, device=held.device)
    make_headers_kernel[(chunks,)](row, held, headers, places, starts, **constants)
    return headers


def encode_exact(
    row: Tensor, held: Tensor, segments: SegmentTable, dtype: torch.dtype, headers: Tensor, ends: Tensor, body: Tensor
) -> None:
    """Write the bodies that `headers` and `ends`, int32 [chunks], are of to int32 `body`, which holds zeros."""
    places, starts, chunks, constants = _tables(segments, dtype)
    encode_exact_kernel[(chunks,)](row, held, headers, ends, body, places, starts, **constants)


def add_exact(
    brought: Tensor, headers_at: int, body_at: int, ends: Tensor, held: Tensor, segments: SegmentTable,
    dtype: torch.dtype, own: int | None,
) -> None:  # fmt: skip
    """Add what rows of `brought`, uint8 [rows, bytes], have from two places on to those of `held`, but for row `own`.

    Args:
        ends: int32 [rows, chunks], contiguous.
    """
    places, starts, chunks, constants = _tables(segments, dtype)
    rows = len(held) - (own is not None)
    sizes = held.stride(0), brought.stride(0), headers_at, body_at, chunks, len(held) if own is None else own
    if rows:
        add_exact_kernel[(chunks, rows)](held, brought, ends, places, starts, *sizes, **constants)
