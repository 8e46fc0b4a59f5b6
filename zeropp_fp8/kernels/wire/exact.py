"""Exact differences of 16-bit numbers from what is held of them, in the code of formats/exact.py: the same bytes.

A program handles one chunk of 1024 numbers of one tensor. Reading 4 bytes per number, `make_headers` finds how each
chunk is sent and `encode` sends it: a few numbers at a time are put together in registers, and what is not zero of them
is set by atomics, in a body of zeros. `add` reads 2 bytes per number where anything has changed, and writes what has.
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
_NO_NUMBER = tl.constexpr(1024)
_TOGETHER = tl.constexpr(4)  # numbers of up to 16 bits that are put in their place at once
_STRIDE = tl.constexpr(256)  # bits of a list's unary part that are read at once


@triton.jit
def length_of(magnitudes):
    """Bits that integers need."""
    exponents = (magnitudes.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
    return tl.where(magnitudes > 0, exponents, 0)


@triton.jit
def low_bits(count):
    return 10 - length_of(tl.maximum(count - 1, 0))


@triton.jit
def in_order(bits):
    return tl.where(bits < 0, -32769 - bits, bits)


@triton.jit
def wrapped(integers):
    """mod 2^16, with a sign."""
    return integers.to(tl.int16).to(tl.int32)


@triton.jit
def exponents_of(bits, exist, MANTISSA: tl.constexpr):
    of_numbers = (bits >> MANTISSA) & (_MAGNITUDE >> MANTISSA)
    return tl.where(exist, tl.maximum(of_numbers, 1), _NO_NUMBER)


@triton.jit
def near_bits(exponents, top, MANTISSA: tl.constexpr):
    power = top - exponents
    bits = tl.where(power < MANTISSA, tl.where(power > 0, power + 1, 0), _BITS)
    return tl.where(exponents < _NO_NUMBER, tl.where(top == _RAW, _BITS, bits), 0)


@triton.jit
def near_part(difference, bits):
    most = (1 << tl.maximum(bits - 1, 0)) - 1
    return tl.where(bits == _BITS, difference, tl.minimum(tl.maximum(difference, -most), most))


@triton.jit
def load_chunk(base_ptr, held_ptr, tensors_ptr, segments_ptr, tile, segment, MANTISSA: tl.constexpr):
    """(differences, exponents of what is held, how many numbers there are) of a chunk."""
    places = tile * _CHUNK + tl.arange(0, _CHUNK)
    numel = tl.load(segments_ptr + 5 * segment + 1)
    held_ptr = (held_ptr + tl.multiple_of(tl.load(segments_ptr + 5 * segment), 16)).to(tl.pointer_type(tl.int16))
    base_ptr += tl.load(tensors_ptr + 2 * segment)
    exist = places < numel
    held = tl.load(held_ptr + places, mask=exist, other=0).to(tl.int32)
    numbers = tl.load(base_ptr + places, mask=exist & (places < tl.load(tensors_ptr + 2 * segment + 1)), other=0)
    difference = wrapped(in_order(numbers.to(tl.int32)) - in_order(held))
    return difference, exponents_of(held, exist, MANTISSA), tl.minimum(numel - tile * _CHUNK, _CHUNK).to(tl.int32)


@triton.jit
def header_with(difference, exponents, top, MANTISSA: tl.constexpr):
    """(a header without its number of words, that number; too large where the fields cannot say what is left)."""
    bits = near_bits(exponents, top, MANTISSA)
    rest = difference - near_part(difference, bits)
    sums = tl.sum(bits + ((rest != 0).to(tl.int32) << 16), axis=0)
    count = sums >> 16
    width = tl.where(count > 0, 1 + length_of(tl.maximum(tl.max(tl.abs(rest), axis=0) - 1, 0)), 0)
    low = low_bits(count)
    listed = tl.where(count > 0, count * (1 + low + width) + (_CHUNK >> low), 0)
    words = ((sums & 0xFFFF) + listed + 31) >> 5
    return top | (count & 1023) << 8 | width << 18, tl.where(width <= 15, words, 2 * _CHUNK)


@Kernel
@triton.jit
def make_headers_kernel(
    base_ptr, held_ptr, headers_ptr, tensors_ptr, segments_ptr, tile_starts_ptr, MANTISSA: tl.constexpr,
    STARTS: tl.constexpr,
):  # fmt: skip
    tile, segment = tile_of_program(tile_starts_ptr, STARTS)
    difference, exponents, numel = load_chunk(base_ptr, held_ptr, tensors_ptr, segments_ptr, tile, segment, MANTISSA)
    lengths = length_of(tl.abs(difference))
    needed = tl.max(tl.where(lengths > 1, exponents + tl.minimum(lengths, MANTISSA), 0), axis=0)
    header, words = header_with(difference, exponents, tl.minimum(needed, _RAW), MANTISSA)
    other, other_words = header_with(difference, exponents, tl.minimum(tl.maximum(needed - 1, 0), _RAW), MANTISSA)
    header, words = tl.where(other_words < words, other, header), tl.minimum(words, other_words)
    raw_words = (numel * _BITS + 31) >> 5
    header, words = tl.where(raw_words < words, _RAW, header), tl.minimum(words, raw_words)
    tl.store(headers_ptr + tl.program_id(0), header | words << 22)


@triton.jit
def put(body_ptr, values, places, mask, WORDS: tl.constexpr):
    """Set the bits of uint64 values from bits `places` on, over so many words at most."""
    word, shift = places >> 5, (places & 31).to(tl.uint64)
    for i in tl.static_range(WORDS):
        if i == 0:
            part = values << shift
        else:
            part = tl.where(shift > 0, values >> (32 * i - shift), values >> (32 * i - 1) >> 1)
        part = part.to(tl.uint32).to(tl.int32, bitcast=True)
        tl.atomic_or(body_ptr + word + i, part, mask=mask & (part != 0), sem="relaxed")


@triton.jit
def get(body_ptr, bits, places, mask):
    """Values of so many bits, 31 at most, without a sign; 0 outside of the mask."""
    word, shift = places >> 5, places & 31
    lower = tl.load(body_ptr + word, mask=mask, other=0).to(tl.uint32, bitcast=True)
    upper = tl.load(body_ptr + word + 1, mask=mask & (shift + bits > 32), other=0).to(tl.uint32, bitcast=True)
    both = lower.to(tl.uint64) | upper.to(tl.uint64) << 32
    return (both >> shift.to(tl.uint64)).to(tl.int32) & ((1 << bits) - 1)


@triton.jit
def signed(values, bits):
    half = 1 << tl.maximum(bits - 1, 0)
    return tl.where((values >= half) & (bits > 0), values - 2 * half, values)


@triton.jit
def body_of(headers_ptr, ends_ptr, chunk):
    """(top, count, width, the body's first word, its words)."""
    header = tl.load(headers_ptr + chunk)
    width, words = (header >> 18) & 15, (header >> 22) & 1023
    count = (header >> 8) & 1023
    count = tl.where((count == 0) & (width > 0), _CHUNK, count)
    return header & 255, count, width, tl.load(ends_ptr + chunk) - words, words


@Kernel
@triton.jit
def encode_exact_kernel(
    base_ptr, held_ptr, headers_ptr, ends_ptr, body_ptr, tensors_ptr, segments_ptr, tile_starts_ptr,
    MANTISSA: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    top, count, width, start, words = body_of(headers_ptr, ends_ptr, tl.program_id(0))
    if words > 0:
        body_ptr += start
        tile, segment = tile_of_program(tile_starts_ptr, STARTS)
        difference, exponents, _ = load_chunk(base_ptr, held_ptr, tensors_ptr, segments_ptr, tile, segment, MANTISSA)
        bits = near_bits(exponents, top, MANTISSA)
        near = near_part(difference, bits)
        # The first body's word is a multiple of 32 bits; places count from there.
        places = tl.cumsum(bits, axis=0) - bits
        groups: tl.constexpr = _CHUNK // _TOGETHER
        grouped = tl.reshape(places, (groups, _TOGETHER))
        first = tl.min(grouped, axis=1)
        values = tl.reshape((near & ((1 << bits) - 1)).to(tl.uint64), (groups, _TOGETHER))
        together = tl.sum(values << (grouped - first[:, None]).to(tl.uint64), axis=1)
        put(body_ptr, together.to(tl.uint64), first, together != 0, 3)
        if count > 0:
            rest = difference - near
            listed = rest != 0
            index = tl.cumsum(listed.to(tl.int32), axis=0) - 1
            place, low, unary = tl.arange(0, _CHUNK), low_bits(count), tl.sum(bits, axis=0)
            at = unary + (place >> low) + index
            tl.atomic_or(body_ptr + (at >> 5), 1 << (at & 31), mask=listed, sem="relaxed")
            value = tl.where(rest > 0, rest - 1, rest) & ((1 << width) - 1)
            entry = (place & ((1 << low) - 1)) | value << low
            at = unary + count + (_CHUNK >> low) + index * (low + width)
            put(body_ptr, entry.to(tl.uint64), at, listed, 2)


@Kernel
@triton.jit(do_not_specialize=["chunks"])
def add_exact_kernel(
    held_ptr, brought_ptr, ends_ptr, segments_ptr, tile_starts_ptr, held_row_bytes, row_bytes, headers_at, body_at,
    chunks, MANTISSA: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    brought_ptr += row * row_bytes
    headers_ptr = (brought_ptr + headers_at).to(tl.pointer_type(tl.int32))
    top, count, width, start, words = body_of(headers_ptr, ends_ptr + row * chunks, tl.program_id(0))
    if words > 0:
        tile, segment = tile_of_program(tile_starts_ptr, STARTS)
        body_ptr = (brought_ptr + body_at).to(tl.pointer_type(tl.int32)) + start
        held_at = tl.multiple_of(tl.load(segments_ptr + 5 * segment), 16)
        numbers_ptr = (held_ptr + row * held_row_bytes + held_at).to(tl.pointer_type(tl.int16)) + tile * _CHUNK
        numel = tl.load(segments_ptr + 5 * segment + 1) - tile * _CHUNK
        unary = 0
        if top > 0:
            place = tl.arange(0, _CHUNK)
            held = tl.load(numbers_ptr + place, mask=place < numel, other=0).to(tl.int32)
            bits = near_bits(exponents_of(held, place < numel, MANTISSA), top, MANTISSA)
            difference = signed(get(body_ptr, bits, tl.cumsum(bits, axis=0) - bits, bits > 0), bits)
            changed = in_order(wrapped(in_order(held) + difference))
            tl.store(numbers_ptr + place, changed.to(tl.int16), mask=difference != 0)
            unary = tl.sum(bits, axis=0)
            tl.debug_barrier()  # below other threads change the same numbers
        low = low_bits(count)
        length = tl.where(count > 0, count + (_CHUNK >> low), 0)
        found = 0
        for first in range(0, length, _STRIDE):
            bit = first + tl.arange(0, _STRIDE)
            at = unary + bit
            is_set = (tl.load(body_ptr + (at >> 5), mask=bit < length, other=0) >> (at & 31)) & 1
            index = found + tl.cumsum(is_set, axis=0) - 1
            at = unary + length + index * (low + width)
            listed = is_set > 0
            entry = get(body_ptr, low + width, at, listed)
            place = ((bit - index) << low) | (entry & ((1 << low) - 1))
            rest = signed(entry >> low, width)
            rest = tl.where(rest >= 0, rest + 1, rest)
            held = tl.load(numbers_ptr + place, mask=listed, other=0).to(tl.int32)
            changed = in_order(wrapped(in_order(held) + rest))
            tl.store(numbers_ptr + place, changed.to(tl.int16), mask=listed)
            found += tl.sum(is_set, axis=0)


def _tables(segments: SegmentTable) -> tuple[Tensor, Tensor, int, dict]:
    """(where tensors lie in what is held, their first chunks, chunks, constants)."""
    starts, chunks = segments.tile_starts(1)
    return segments.segments, starts, chunks, {"STARTS": starts.numel(), "num_warps": 4}


def make_headers(tensors: list[Tensor], table: TensorTable, segments: SegmentTable, held: Tensor) -> Tensor:
    """int32 [chunks of all tensors]: how 16-bit tensors of one dtype are sent.

    Args:
        segments: of unquantized numbers, where they lie in `held`, uint8 [bytes].
    """
    places, starts, chunks, constants = _tables(segments)
    headers = torch.empty(chunks, dtype=torch.int32, device=held.device)
    base, constants["MANTISSA"] = tensors[0].view(torch.int16), MANTISSA[tensors[0].dtype]
    make_headers_kernel[(chunks,)](base, held, headers, table.entries, places, starts, **constants)
    return headers


def encode_exact(
    tensors: list[Tensor], table: TensorTable, segments: SegmentTable, held: Tensor, headers: Tensor, ends: Tensor,
    body: Tensor,
) -> None:  # fmt: skip
    """Write the bodies that `headers` and `ends`, int32 [chunks], are of to int32 `body`, which holds zeros."""
    places, starts, chunks, constants = _tables(segments)
    base, constants["MANTISSA"] = tensors[0].view(torch.int16), MANTISSA[tensors[0].dtype]
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
