"""Exact differences of 16-bit numbers, or 8-bit codes, from what is held of them: few bits where few have changed.

A number counts as an integer, in the order of the numbers (`in_order`), and its difference is taken mod 2^16 or 2^8. An
update moves the numbers of a tensor about equally far, and how many units in the last place that is depends on the
exponent of the held number, which both sides know; that of an INT8 code is 0. Each chunk of 1024 numbers has a header,
and a body of whole 32-bit words in which bits follow each other, the lowest first:

    rest   what near bits cannot say, of so few numbers that their places are listed, in the code of Elias and Fano
           (P. Elias, "Efficient storage and retrieval by content and address of static files", J. ACM 21, 1974): of
           `count` places in ascending order the upper bits in unary (the i-th sets bit (place >> low) + i), then for
           each its `low` lower bits and `width` bits of the rest
    near   for each number with an exponent e below `top`, as much of the difference as k = top - e bits and a sign can
           say; all 16 or 8 bits where k reaches the mantissa's

The sender takes the `top` that leaves no rest beyond one unit, or one less, whichever makes the smaller body; or all
bits of every number, if that is less. So no change is too large. kernels/wire/exact.py does the same on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1024
WORD = 32  # bits
MANTISSA = {torch.bfloat16: 7, torch.float16: 10, torch.float8_e4m3fn: 3, torch.int8: 7}
_INTEGERS = {1: torch.int8, 2: torch.int16}
RAW = 255  # the `top` of a chunk that has all bits of its numbers
# Bits of a header: of `top`, of `count`, which is 0 for 1024 too, of `width`, and of the number of words
TOP, COUNT, WIDTH, WORDS = range(4)
PLACES = (0, 8, 18, 22)
MASKS = (255, 1023, 15, 1023)
_NO_NUMBER = 1 << 10  # the exponent of a number beyond the end of its tensor


def field(headers: Tensor, index: int) -> Tensor:
    """One field of int32 headers."""
    return (headers >> PLACES[index]) & MASKS[index]


def ends_of(headers: Tensor) -> Tensor:
    """int32 [rows, chunks]: the word of a row's bodies at which each ends."""
    return field(headers, WORDS).cumsum(-1, dtype=torch.int32)


def in_order(numbers: Tensor) -> Tensor:
    """int32 of numbers, in their order: -0 and 0 are neighbours, and every bit pattern has its own."""
    return _turned(_integers(numbers), numbers.dtype).int()


def from_order(integers: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of integers, which count mod 2^16 or 2^8."""
    return _turned(integers.to(_INTEGERS[dtype.itemsize]), dtype).view(dtype)


def _integers(numbers: Tensor) -> Tensor:
    return numbers.view(_INTEGERS[numbers.dtype.itemsize])


def _turned(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Floats are a sign and a magnitude: negative ones are turned around, and back."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits) if dtype.is_floating_point else bits


def make_headers(numbers: Tensor, held: Tensor) -> Tensor:
    """int32 [rows, chunks] of numbers [rows, n] and what is held of them, of one dtype."""
    difference, exponents = _difference(numbers, held), _exponents(held)
    lengths = _length(difference.abs())
    needed = torch.where(lengths > 1, exponents + lengths.clamp(max=MANTISSA[held.dtype]), 0).amax(-1)
    best = None
    for top in (needed, (needed - 1).clamp(min=0), torch.full_like(needed, RAW)):
        top = top.clamp(max=RAW)
        bits = near_bits(exponents, top, held.dtype)
        rest = difference - _near(difference, bits, held.dtype)
        count, largest = (rest != 0).sum(-1), rest.abs().amax(-1)
        width = torch.where(count > 0, 1 + _length((largest - 1).clamp(min=0)), 0)
        words = -(-(bits.sum(-1) + rest_bits(count, width)) // WORD)
        fits = (width <= MASKS[WIDTH]) & (words <= bits_of(held.dtype) * CHUNK // WORD)
        fields = (top, count % CHUNK, width, torch.where(fits, words, 2 * CHUNK))
        best = best or fields
        best = [torch.where(fields[WORDS] < best[WORDS], new, old) for new, old in zip(fields, best)]
    return sum(each << place for each, place in zip(best, PLACES)).int().view(held.shape[0], -1)


def encode(numbers: Tensor, held: Tensor, headers: Tensor, ends: Tensor, body: Tensor) -> None:
    """Write the bodies of a tensor's chunks.

    Args:
        numbers, held, headers: as in `make_headers`.
        ends: int32 [rows, chunks], where each body ends, in words.
        body: uint8 [rows, bits], a bit each; zeros, written.
    """
    difference, exponents = _difference(numbers, held), _exponents(held)
    top, count, width, low = _fields(headers)
    bits = near_bits(exponents, top, held.dtype)
    near = _near(difference, bits, held.dtype)
    flat, starts = body.view(-1), _starts(headers, ends, body)
    near_at = starts + rest_bits(count, width)
    _put(flat, near, bits, near_at.unsqueeze(-1) + bits.cumsum(-1) - bits)
    rest = difference - near
    chunk, place = rest.nonzero(as_tuple=True)
    if not chunk.numel():
        return
    index = ((rest != 0).cumsum(-1) - 1)[chunk, place]
    flat[starts[chunk] + (place >> low[chunk]) + index] = 1
    rest, width, low = rest[chunk, place], width[chunk], low[chunk]
    at = (starts + count + (CHUNK >> low_bits(count)))[chunk] + index * (low + width)
    _put(flat, place & ((1 << low) - 1), low, at)
    _put(flat, torch.where(rest > 0, rest - 1, rest), width, at + low)


def add(headers: Tensor, ends: Tensor, body: Tensor, held: Tensor) -> None:
    """Make `held` [rows, n] the numbers of which the headers and bodies were made; bits as in `encode`."""
    exponents = _exponents(held)
    top, count, width, low = _fields(headers)
    bits = near_bits(exponents, top, held.dtype)
    flat, starts = body.view(-1), _starts(headers, ends, body)
    near_at = starts + rest_bits(count, width)
    difference = _signed(_get(flat, bits, near_at.unsqueeze(-1) + bits.cumsum(-1) - bits), bits)
    numel = (count + (CHUNK >> low)) * (count > 0)
    chunk = torch.arange(len(numel), device=held.device).repeat_interleave(numel)
    bit = torch.arange(len(chunk), device=held.device) - (numel.cumsum(0) - numel)[chunk]
    is_set = flat[starts[chunk] + bit] != 0
    chunk, bit = chunk[is_set], bit[is_set]
    index = torch.arange(len(chunk), device=held.device) - (count.cumsum(0) - count)[chunk]
    at = (starts + numel)[chunk] + index * (low + width)[chunk]
    place = ((bit - index) << low[chunk]) + _get(flat, low[chunk], at)
    rest = _signed(_get(flat, width[chunk], at + low[chunk]), width[chunk])
    difference[chunk, place] += torch.where(rest >= 0, rest + 1, rest)
    numbers = from_order(in_order(held) + difference.view(held.shape[0], -1)[:, : held.shape[1]], held.dtype)
    held.copy_(numbers)


# -- what both sides work out -----------------------------------------------------------------------------------------


def bits_of(dtype: torch.dtype) -> int:
    return 8 * dtype.itemsize


def near_bits(exponents: Tensor, top: Tensor, dtype: torch.dtype) -> Tensor:
    """Bits of each number's difference that are sent with those of all others near it, int32 [..., CHUNK]."""
    power = top.unsqueeze(-1) - exponents
    bits = torch.where(power < MANTISSA[dtype], (power + 1) * (power > 0), bits_of(dtype))
    return torch.where(top.unsqueeze(-1) == RAW, bits_of(dtype), bits) * (exponents < _NO_NUMBER)


def low_bits(count: Tensor) -> Tensor:
    """Lower bits of a place in a list of so many: the logarithm of 1024 / count, rounded down; 10 for an empty one."""
    return 10 - _length((count - 1).clamp(min=0))


def rest_bits(count: Tensor, width: Tensor) -> Tensor:
    """Bits of a list of so many numbers."""
    low = low_bits(count)
    return (count * (1 + low + width) + (CHUNK >> low)) * (count > 0)


def _length(magnitudes: Tensor) -> Tensor:
    """Bits that integers need: 0 for 0, 1 for 1, 2 for 2 and 3."""
    return magnitudes.float().frexp().exponent


def _fields(headers: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(top, count, width, low) of chunks."""
    top, count, width, _ = (field(headers, index).view(-1).long() for index in range(4))
    count = torch.where((count == 0) & (width > 0), CHUNK, count)
    return top, count, width, low_bits(count).long()


def _starts(headers: Tensor, ends: Tensor, body: Tensor) -> Tensor:
    """int64 [chunks]: the first bit of each body in all rows' bits, one after the other."""
    rows = torch.arange(body.shape[0], device=body.device).unsqueeze(-1) * body.shape[1]
    return (rows + WORD * (ends - field(headers, WORDS)).long()).view(-1)


def _in_chunks(values: Tensor, beyond: int) -> Tensor:
    """[rows * chunks, CHUNK] of [rows, n]."""
    missing = -values.shape[1] % CHUNK
    return torch.nn.functional.pad(values, (0, missing), value=beyond).view(-1, CHUNK)


def _difference(numbers: Tensor, held: Tensor) -> Tensor:
    wrapped = (in_order(numbers) - in_order(held)).to(_INTEGERS[held.dtype.itemsize])
    return _in_chunks(wrapped.int(), 0)


def _exponents(held: Tensor) -> Tensor:
    mantissa = MANTISSA[held.dtype]
    exponents = (_integers(held).int() >> mantissa) & ((1 << (bits_of(held.dtype) - 1 - mantissa)) - 1)
    return _in_chunks(exponents, _NO_NUMBER)


def _near(difference: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """As much of the differences as so many bits, one of them a sign, can say."""
    most = (1 << (bits - 1).clamp(min=0)) - 1
    return torch.where(bits == bits_of(dtype), difference, difference.clamp(-most, most))


# -- bits -------------------------------------------------------------------------------------------------------------


def _put(flat: Tensor, values: Tensor, bits: Tensor, places: Tensor) -> None:
    for bit in range(int(bits.amax())):
        has = bits > bit
        flat[places[has] + bit] = ((values[has] >> bit) & 1).to(torch.uint8)


def _get(flat: Tensor, bits: Tensor, places: Tensor) -> Tensor:
    """int64 values without a sign."""
    values = torch.zeros_like(places)
    for bit in range(int(bits.amax()) if bits.numel() else 0):
        has = bits > bit
        values[has] += flat[places[has] + bit].long() << bit
    return values


def _signed(values: Tensor, bits: Tensor) -> Tensor:
    """Values in two's complement, of so many bits."""
    half = 1 << (bits - 1).clamp(min=0)
    return torch.where(values >= half, values - 2 * half, values) * (bits > 0)


def unpacked(packed: Tensor) -> Tensor:
    """uint8 [rows, bits] of uint8 [rows, bytes]."""
    return ((packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1).flatten(1)


def packed(bits: Tensor) -> Tensor:
    """The inverse of `unpacked`."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.unflatten(1, (-1, 8)) << places).sum(-1, dtype=torch.uint8)
