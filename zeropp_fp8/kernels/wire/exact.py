"""Exact differences of 16-bit numbers from what is held of them, in the code of formats/exact.py: the same bytes.

A program, one warp, handles one chunk of 1024 numbers of one tensor. `make_headers` reads 4 bytes per number to find
how a chunk is sent; `encode` reads them again and sends it, in a body of zeros: what 8 numbers have to say is put
together in registers where it fits into 64 bits, and what is not zero of it set by atomics. `add` reads and writes 2
bytes per number, or only listed numbers where nothing else has changed. Instructions bound them, not memory: 50 to 80
per number, where a copy's bandwidth leaves time for about 25 on an H100.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.formats.exact import MANTISSA
from zeropp_fp8.kernels.launching import Kernel
from zeropp_fp8.kernels.wire.dequantize import tile_of_program
from zeropp_fp8.kernels.wire.launch_tables import SegmentTable, TensorTable

_CHUNK = tl.constexpr(1024)
_BITS = tl.constexpr(16)
_MAGNITUDE = tl.constexpr(32767)
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
def in_order(bits):
    """Upper halves of int32, and back; the lower ones are zeros. So sums and differences are mod 2^16 by themselves."""
    return bits ^ ((bits >> 31) & (_MAGNITUDE << 16))


@triton.jit
def near_bits(power, MANTISSA: tl.constexpr):
    return tl.where(power < MANTISSA, tl.where(power > 0, power + 1, 0), _BITS)


@triton.jit
def near_part(difference, power, MANTISSA: tl.constexpr):
    most = (1 << tl.minimum(tl.maximum(power, 0), MANTISSA)) - 1
    return tl.where(power < MANTISSA, tl.minimum(tl.maximum(difference, -most), most), difference)


@triton.jit
def load_numbers(base_ptr, numel, NUMBERS: tl.constexpr):
    """int32 with 16-bit numbers as their upper halves; 0 where there are none."""
    places = tl.arange(0, NUMBERS)
    if numel >= NUMBERS:
        numbers = tl.load(base_ptr + places).to(tl.int32)
    else:
        numbers = tl.load(base_ptr + places, mask=places < numel, other=0).to(tl.int32)
    return numbers << 16


@triton.jit
def exponents_of(numbers, numel, NUMBERS: tl.constexpr, MANTISSA: tl.constexpr):
    exponents = (numbers >> (16 + MANTISSA)) & (_MAGNITUDE >> MANTISSA)
    if numel < NUMBERS:
        exponents = tl.where(tl.arange(0, NUMBERS) < numel, exponents, _NO_NUMBER)
    return exponents


@triton.jit
def chunk_of(base_ptr, held_ptr, tensors_ptr, segments_ptr, tile, segment, ALIGNED: tl.constexpr):
    """(where a chunk's numbers are, where what is held of them, how many are left of each from there on)."""
    first = tile * _CHUNK
    held_ptr = (held_ptr + tl.multiple_of(tl.load(segments_ptr + 5 * segment), 16)).to(tl.pointer_type(tl.int16))
    start = tl.load(tensors_ptr + 2 * segment) + first
    if ALIGNED:
        start = tl.multiple_of(start, 8)
    numel = (tl.load(segments_ptr + 5 * segment + 1) - first).to(tl.int32)
    there = (tl.load(tensors_ptr + 2 * segment + 1) - first).to(tl.int32)
    return base_ptr + start, held_ptr + first, there, numel


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
    base_ptr, held_ptr, headers_ptr, tensors_ptr, segments_ptr, tile_starts_ptr, MANTISSA: tl.constexpr,
    ALIGNED: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    tile, segment = tile_of_program(tile_starts_ptr, STARTS)
    new_ptr, old_ptr, there, numel = chunk_of(base_ptr, held_ptr, tensors_ptr, segments_ptr, tile, segment, ALIGNED)
    held = load_numbers(old_ptr, numel, _CHUNK)
    difference = in_order(load_numbers(new_ptr, there, _CHUNK)) - in_order(held) >> 16
    exponents = exponents_of(held, numel, _CHUNK, MANTISSA)
    lengths = float_exponent(difference)
    needed = tl.max(tl.where(lengths > 127, exponents + tl.minimum(lengths, MANTISSA + 126), 126), axis=0) - 126
    magnitudes = tl.abs(difference)
    # Only single units are left.
    top = tl.minimum(needed, _RAW)
    power = tl.where(top < _RAW, top, _NO_NUMBER) - exponents
    left = (power <= 0) & (magnitudes == 1)
    sums = tl.sum(near_bits(power, MANTISSA) + tl.where(left, 1 << 16, 0), axis=0)
    count = sums >> 16
    header, words = header_of(top, sums & 0xFFFF, count, tl.minimum(count, 1))
    # One bit less for each.
    top = tl.minimum(tl.maximum(needed - 1, 0), _RAW)
    power = tl.where(top < _RAW, top, _NO_NUMBER) - exponents
    rest = magnitudes + 1 - (1 << tl.minimum(tl.maximum(power, 0), MANTISSA))
    rest = tl.where(power < MANTISSA, rest, 0)
    sums = tl.sum(near_bits(power, MANTISSA) + tl.where(rest > 0, 1 << 16, 0), axis=0)
    count = sums >> 16
    width = tl.where(count > 0, 1 + length_of(tl.max(rest, axis=0) - 1), 0)
    other, other_words = header_of(top, sums & 0xFFFF, count, width)
    header, words = tl.where(other_words < words, other, header), tl.minimum(words, other_words)
    raw_words = (tl.minimum(numel, _CHUNK) * _BITS + 31) >> 5
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
def upper_half(values, bits):
    """int32 with the lowest `bits` of values, 16 at most and one of them a sign, as its upper half."""
    unused = 31 - bits
    return (values << 1 << unused.to(tl.uint32)).to(tl.int32, bitcast=True) >> (unused - 15)


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
    base_ptr, held_ptr, headers_ptr, ends_ptr, body_ptr, tensors_ptr, segments_ptr, tile_starts_ptr,
    MANTISSA: tl.constexpr, ALIGNED: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    top, count, width, low, start, words, unary = body_of(headers_ptr, ends_ptr, tl.program_id(0))
    if words > 0:
        body_ptr += start
        tile, segment = tile_of_program(tile_starts_ptr, STARTS)
        new_ptr, old_ptr, there, numel = chunk_of(base_ptr, held_ptr, tensors_ptr, segments_ptr, tile, segment, ALIGNED)
        top = tl.where(top < _RAW, top, _NO_NUMBER)
        place, indices, list_at, near_at = tl.arange(0, _PIECE), 0, unary, unary + count * (low + width)
        for first in range(0, _CHUNK, _PIECE):
            held = load_numbers(old_ptr + first, numel - first, _PIECE)
            difference = in_order(load_numbers(new_ptr + first, there - first, _PIECE)) - in_order(held) >> 16
            power = top - exponents_of(held, numel - first, _PIECE, MANTISSA)
            bits, near = near_bits(power, MANTISSA), near_part(difference, power, MANTISSA)
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
@triton.jit(do_not_specialize=["chunks"])
def add_exact_kernel(
    held_ptr, brought_ptr, ends_ptr, segments_ptr, tile_starts_ptr, held_row_bytes, row_bytes, headers_at, body_at,
    chunks, MANTISSA: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    brought_ptr += row * row_bytes
    headers_ptr = (brought_ptr + headers_at).to(tl.pointer_type(tl.int32))
    top, count, width, low, start, words, unary = body_of(headers_ptr, ends_ptr + row * chunks, tl.program_id(0))
    if words > 0:
        tile, segment = tile_of_program(tile_starts_ptr, STARTS)
        body_ptr = (brought_ptr + body_at).to(tl.pointer_type(tl.int32)) + start
        held_at = tl.multiple_of(tl.load(segments_ptr + 5 * segment), 16)
        held_ptr += tl.multiple_of(row * held_row_bytes, 16) + held_at
        numbers_ptr = held_ptr.to(tl.pointer_type(tl.int16)) + tile * _CHUNK
        numel = (tl.load(segments_ptr + 5 * segment + 1) - tile * _CHUNK).to(tl.int32)
        if top > 0:
            top, near_at = tl.where(top < _RAW, top, _NO_NUMBER), unary + count * (low + width)
            for first in range(0, tl.minimum(_CHUNK, numel), _PIECE):
                held = load_numbers(numbers_ptr + first, numel - first, _PIECE)
                bits = near_bits(top - exponents_of(held, numel - first, _PIECE, MANTISSA), MANTISSA)
                ends = tl.cumsum(bits, axis=0)
                values = get(body_ptr, near_at + ends - bits)
                near_at += tl.sum(bits, axis=0)
                changed = in_order(in_order(held) + upper_half(values, bits))
                changed, places = (changed >> 16).to(tl.int16), first + tl.arange(0, _PIECE)
                if numel - first < _PIECE:
                    tl.store(numbers_ptr + places, changed, mask=places < numel)
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
            rest = upper_half(entry >> low.to(tl.uint32), width) >> 16
            rest = tl.where(rest >= 0, rest + 1, rest) << 16
            held = tl.load(numbers_ptr + place, mask=listed, other=0).to(tl.int32) << 16
            changed = in_order(in_order(held) + rest) >> 16
            tl.store(numbers_ptr + place, changed.to(tl.int16), mask=listed)
            found += tl.sum(is_set, axis=0)


def _tables(segments: SegmentTable) -> tuple[Tensor, Tensor, int, dict]:
    """(where tensors lie in what is held, their first chunks, chunks, constants)."""
    starts, chunks = segments.tile_starts(1)
    return segments.segments, starts, chunks, {"STARTS": starts.numel(), "num_warps": 1}


def make_headers(tensors: list[Tensor], table: TensorTable, segments: SegmentTable, held: Tensor) -> Tensor:
    """int32 [chunks of all tensors]: how 16-bit tensors of one dtype are sent.

    Args:
        segments: of unquantized numbers, where they lie in `held`, uint8 [bytes].
    """
    places, starts, chunks, constants = _tables(segments)
    headers = torch.empty(chunks, dtype=torch.int32, device=held.device)
    base, constants["MANTISSA"] = tensors[0].view(torch.int16), MANTISSA[tensors[0].dtype]
    constants["ALIGNED"] = table.aligned
    make_headers_kernel[(chunks,)](base, held, headers, table.entries, places, starts, **constants)
    return headers


def encode_exact(
    tensors: list[Tensor], table: TensorTable, segments: SegmentTable, held: Tensor, headers: Tensor, ends: Tensor,
    body: Tensor,
) -> None:  # fmt: skip
    """Write the bodies that `headers` and `ends`, int32 [chunks], are of to int32 `body`, which holds zeros."""
    places, starts, chunks, constants = _tables(segments)
    base, constants["MANTISSA"] = tensors[0].view(torch.int16), MANTISSA[tensors[0].dtype]
    constants["ALIGNED"] = table.aligned
    encode_exact_kernel[(chunks,)](base, held, headers, ends, body, table.entries, places, starts, **constants)


def add_exact(
    brought: Tensor, headers_at: int, body_at: int, ends: Tensor, held: Tensor, segments: SegmentTable,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Add what rows of `brought`, uint8 [rows, bytes], have from two places on to those of `held`.

    Args:
        ends: int32 [rows, chunks], contiguous.
    """
    places, starts, chunks, constants = _tables(segments)
    sizes = held.stride(0), brought.stride(0), headers_at, body_at, chunks
    constants["MANTISSA"] = MANTISSA[dtype]
    add_exact_kernel[(chunks, len(held))](held, brought, ends, places, starts, *sizes, **constants)
