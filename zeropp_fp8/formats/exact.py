"""Exact differences of 16-bit numbers, or 8-bit codes, from those that the receiver has: few bits for few changes.

A number counts as an integer, in the order of the numbers (`in_order`), and its difference is taken mod 2^16 or 2^8. An
update moves the numbers of a tensor about equally far, and how many units in the last place that is depends on the
exponent of the old number, which both sides know; that of an INT8 code is 0. Each chunk of 1024 numbers has a header,
and a body of whole 32-bit words in which bits follow each other, the lowest first:

    rest   what near bits cannot say, of so few numbers that their places are listed, in the code of Elias and Fano
           (P. Elias, "Efficient storage and retrieval by content and address of static files", J. ACM 21, 1974): of
           `count` places in ascending order the upper bits in unary (the i-th sets bit (place >> low) + i), then for
           each its `low` lower bits and `width` bits of the rest
    near   for each number with an exponent e below `top`, as much of the difference as k = top - e bits and a sign can
           say; all 16 or 8 bits where k reaches the mantissa's

The sender takes the `top` that leaves no rest beyond one unit, or one less, or all bits of every number: the shortest.
"""

from __future__ import annotations

from collections.abc import Sequence

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
Parts = Sequence[slice]
WHOLE = (slice(None),)


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


def make_headers(numbers: Tensor, held: Tensor, parts: Parts = WHOLE) -> Tensor:
    """int32 [rows, chunks] of numbers [rows, n] and what the receiver has of them, of one dtype.

    Args:
        parts: the places of tensors in a row; chunks are of one tensor each.
    """
    difference, exponents = _difference(numbers, held, parts), _exponents(held, parts)
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


def encode(numbers: Tensor, held: Tensor, headers: Tensor, ends: Tensor, parts: Parts = WHOLE) -> Tensor:
    """The bodies of a row's chunks: int32 [rows, words], as many words as the longest row has.

    Args:
        numbers, held, headers, parts: as in `make_headers`.
        ends: int32 [rows, chunks], where each body ends, in words.
    """
    difference, exponents = _difference(numbers, held, parts), _exponents(held, parts)
    top, count, width, low = _fields(headers)
    bits = near_bits(exponents, top, held.dtype)
    near = _near(difference, bits, held.dtype)
    row_words = int(ends[:, -1].amax())
    body, starts = _Bits(len(held) * row_words, held.device), _starts(headers, ends, row_words)
    near_at = starts + rest_bits(count, width)
    body.put(near, bits, near_at.unsqueeze(-1) + bits.cumsum(-1) - bits)
    rest = difference - near
    chunk, place = rest.nonzero(as_tuple=True)
    index = ((rest != 0).cumsum(-1) - 1)[chunk, place]
    rest, width, low = rest[chunk, place], width[chunk], low[chunk]
    body.put(torch.ones_like(index), 1, starts[chunk] + (place >> low) + index)
    at = (starts + count + (CHUNK >> low_bits(count)))[chunk] + index * (low + width)
    body.put(place, low, at)
    body.put(torch.where(rest > 0, rest - 1, rest), width, at + low)
    return body.words().view(len(held), row_words)


def add(headers: Tensor, ends: Tensor, body: Tensor, held: Tensor, parts: Parts = WHOLE) -> None:
    """Make `held` [rows, n] the numbers of which the headers and bodies were made.

    Args:
        headers, ends, parts: as in `encode`; body: its result, or more words of each row.
    """
    exponents = _exponents(held, parts)
    top, count, width, low = _fields(headers)
    bits = near_bits(exponents, top, held.dtype)
    body, starts = _Bits.of(body), _starts(headers, ends, body.shape[1])
    near_at = starts + rest_bits(count, width)
    difference = _signed(body.get(bits, near_at.unsqueeze(-1) + bits.cumsum(-1) - bits), bits)
    numel = (count + (CHUNK >> low)) * (count > 0)
    chunk = torch.arange(len(numel), device=held.device).repeat_interleave(numel)
    bit = torch.arange(len(chunk), device=held.device) - (numel.cumsum(0) - numel)[chunk]
    is_set = body.get(1, starts[chunk] + bit) != 0
    chunk, bit = chunk[is_set], bit[is_set]
    index = torch.arange(len(chunk), device=held.device) - (count.cumsum(0) - count)[chunk]
    at = (starts + numel)[chunk] + index * (low + width)[chunk]
    place = ((bit - index) << low[chunk]) + body.get(low[chunk], at)
    rest = _signed(body.get(width[chunk], at + low[chunk]), width[chunk])
    difference[chunk, place] += torch.where(rest >= 0, rest + 1, rest)
    difference, numbers, first = difference.view(len(held), -1), in_order(held), 0
    for part in parts:
        of_part = numbers[:, part]
        of_part += difference[:, first : first + of_part.shape[1]]
        first += of_part.shape[1] + -of_part.shape[1] % CHUNK
    held.copy_(from_order(numbers, held.dtype))


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


def _starts(headers: Tensor, ends: Tensor, row_words: int) -> Tensor:
    """int64 [chunks]: the first bit of each body in all rows' bits, one after the other."""
    rows = torch.arange(len(headers), device=headers.device).unsqueeze(-1) * row_words
    return (WORD * (rows + ends - field(headers, WORDS)).long()).view(-1)


def _in_chunks(values: Tensor, parts: Parts, beyond: int) -> Tensor:
    """[rows * chunks, CHUNK] of the parts of [rows, n]."""
    of_parts = [values[:, part] for part in parts]
    padded = [torch.nn.functional.pad(each, (0, -each.shape[1] % CHUNK), value=beyond) for each in of_parts]
    return torch.cat(padded, dim=1).view(-1, CHUNK)


def _difference(numbers: Tensor, held: Tensor, parts: Parts) -> Tensor:
    wrapped = (in_order(numbers) - in_order(held)).to(_INTEGERS[held.dtype.itemsize])
    return _in_chunks(wrapped.int(), parts, 0)


def _exponents(held: Tensor, parts: Parts) -> Tensor:
    mantissa = MANTISSA[held.dtype]
    exponents = (_integers(held).int() >> mantissa) & ((1 << (bits_of(held.dtype) - 1 - mantissa)) - 1)
    return _in_chunks(exponents, parts, _NO_NUMBER)


def _near(difference: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """As much of the differences as so many bits, one of them a sign, can say."""
    most = (1 << (bits - 1).clamp(min=0)) - 1
    return torch.where(bits == bits_of(dtype), difference, difference.clamp(-most, most))


# -- bits -------------------------------------------------------------------------------------------------------------


def _signed(values: Tensor, bits: Tensor) -> Tensor:
    """Values in two's complement, of so many bits."""
    half = 1 << (bits - 1).clamp(min=0)
    return torch.where(values >= half, values - 2 * half, values) * (bits > 0)


class _Bits:
    """Words of 32 bits, in which up to 16 bits may stand at any place; each in 64, so that one access has them."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._wide = torch.zeros(count + 1, dtype=torch.int64, device=device)  # none of the bits may be at the end

    @classmethod
    def of(cls, words: Tensor) -> _Bits:
        """Words to be read, int32: each with the next one above it."""
        bits = cls(words.numel(), words.device)
        bits._wide[:-1] = words.reshape(-1).long() & 0xFFFFFFFF
        bits._wide[:-1] |= bits._wide[1:] << WORD
        return bits

    def put(self, values: Tensor, bits: Tensor | int, places: Tensor) -> None:
        """Write the lowest bits of each value where nothing was written."""
        shifted = (values.long() & ((1 << bits) - 1)) << (places & (WORD - 1))
        self._wide.index_add_(0, (places // WORD).view(-1), shifted.view(-1))  # of bits apart, the sum is their union

    def get(self, bits: Tensor | int, places: Tensor) -> Tensor:
        """int64 values without a sign."""
        return (self._wide[places // WORD] >> (places & (WORD - 1))) & ((1 << bits) - 1)

    def words(self) -> Tensor:
        """int32, of what was written."""
        self._wide[1:] += self._wide[:-1] >> WORD
        return self._wide[:-1].int()
