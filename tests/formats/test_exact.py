"""Exact differences: a decoder written out bit by bit, any bit patterns, and how many bits they take."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeropp_fp8.formats import exact

DTYPES = (torch.bfloat16, torch.float16)


def sent(numbers, held):
    """(headers, ends, bodies) of rows of numbers."""
    headers = exact.make_headers(numbers, held)
    ends = exact.ends_of(headers)
    return headers, ends, exact.encode(numbers, held, headers, ends)


def there_and_back(numbers, held):
    """Bits that a number takes; what is added becomes the numbers, bit for bit."""
    headers, ends, bodies = sent(numbers, held)
    found = held.clone()
    exact.add(headers, ends, bodies, found)
    assert torch.equal(found.view(torch.int16), numbers.view(torch.int16))
    return exact.WORD * (ends[:, -1].float().mean().item() + headers.shape[1]) / held.shape[1]


def patterns(values, dtype):
    return torch.tensor(values, dtype=torch.int32).to(torch.int16).view(dtype).view(1, -1)


def order(pattern):
    """The integer of a bit pattern: 0 for 0, 1 for the smallest number above it, -1 for -0."""
    return pattern if pattern < 2**15 else -1 - (pattern - 2**15)


def decoded(header, body, held, mantissa):
    """The bit patterns of a chunk, read bit by bit as the format's description says; `held`: those of before."""
    bits = [byte >> i & 1 for byte in body for i in range(8)]

    def take(count):
        value = sum(bits.pop(0) << i for i in range(count))
        return value

    def signed(count):
        value = take(count)
        return value - 2**count if count and value >= 2 ** (count - 1) else value

    header &= 2**32 - 1
    top, count, width, words = header & 255, header >> 8 & 1023, header >> 18 & 15, header >> 22
    assert len(body) == 4 * words
    count = 1024 if count == 0 and width else count
    new = [order(pattern) for pattern in held]
    if count:
        low = int(math.log2(1024 / count))
        unary = [take(1) for _ in range(count + (1024 >> low))]
        uppers = [at - index for index, at in enumerate(i for i, bit in enumerate(unary) if bit)]
        assert len(uppers) == count
        for upper in uppers:
            place = upper << low | take(low)
            rest = signed(width)
            new[place] += rest + 1 if rest >= 0 else rest
    for place, pattern in enumerate(held):
        exponent = (pattern & 2**15 - 1) >> mantissa
        near = 16 if top == 255 or top - exponent >= mantissa else max(0, top - exponent + 1) if top > exponent else 0
        new[place] += signed(near)
    assert sum(bits) == 0 and len(bits) < 32, "nothing is left but the end of a word"
    wrapped = [(integer + 2**15) % 2**16 - 2**15 for integer in new]
    return [integer if integer >= 0 else 2**15 + (-1 - integer) for integer in wrapped]


STEPS = st.sampled_from([0] * 12 + [1, -1, 1, -1, 2, -3, 9, 130, -4000, 2**15, 65535])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2**16 - 1), STEPS), min_size=1, max_size=1024),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_a_chunk_is_what_its_description_says(pairs, dtype, alike):
    """Of any bit patterns, NaN and infinite ones too, and of numbers of about one size."""
    held = [0x3C00 + p % 512 if alike else p for p, _ in pairs]
    new = [(p + step) % 2**16 for p, (_, step) in zip(held, pairs)]
    headers, _, body = sent(patterns(new, dtype), patterns(held, dtype))
    assert decoded(headers.item(), body[0].view(torch.uint8).tolist(), held, exact.MANTISSA[dtype]) == new


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 2500), st.sampled_from(DTYPES), st.sampled_from([0, 1e-7, 1e-5, 1e-3, 1, 100]))
def test_rows_of_any_length_and_change(rows, numel, dtype, change):
    torch.manual_seed(rows + 10 * numel)
    weights = 0.02 * torch.randn(rows, numel)
    bits = there_and_back((weights + change * torch.randn(rows, numel)).to(dtype), weights.to(dtype))
    assert bits <= (16 * 1024 + 32) * -(-numel // 1024) / numel, "never more than the numbers and a header"


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_pattern_becomes_every_other(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    generator = torch.Generator().manual_seed(0)
    for other in (every.flip(0), every[torch.randperm(2**16, generator=generator)], every.roll(1)):
        there_and_back(other.view(dtype).view(1, -1), every.view(dtype).view(1, -1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_in_their_order(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    integers = exact.in_order(every)
    assert integers.tolist() == [order(p % 2**16) for p in every.view(torch.int16).tolist()]
    assert torch.equal(exact.from_order(integers, dtype).view(torch.int16), every.view(torch.int16))
    assert torch.equal(exact.from_order(integers + 2**16, dtype).view(torch.int16), every.view(torch.int16))


def test_what_does_not_change_takes_its_headers():
    weights = torch.randn(2, 5000).bfloat16()
    headers, ends, bodies = sent(weights, weights)
    assert not ends.any() and bodies.numel() == 0 and headers.shape == (2, 5) and not headers.any()


def test_every_number_by_one_unit():
    """A list of all 1024 places: three bits each, and a count that does not fit into its field."""
    held = torch.ones(1, 1024, dtype=torch.bfloat16)
    numbers = (held.view(torch.int16) + 1).view(torch.bfloat16)
    headers, _, _ = sent(numbers, held)
    assert exact.field(headers, exact.COUNT).item() == 0 and exact.field(headers, exact.WIDTH).item() == 1
    assert there_and_back(numbers, held) == 3 + 32 / 1024


def updated(rate, dtype=torch.bfloat16, numel=2**18):
    """Weights of standard deviation 0.02 before and after a step of AdamW, of half a rate to a rate."""
    generator = torch.Generator().manual_seed(0)
    weights = 0.02 * torch.randn(1, numel, generator=generator)
    steps = (0.5 + 0.5 * torch.rand(1, numel, generator=generator)) * torch.randn(1, numel, generator=generator).sign()
    return (weights + rate * steps).to(dtype), weights.to(dtype)


def entropy(numbers, held):
    """Bits of a code that knows how often each difference comes, by the exponent of the number before."""
    difference = exact.in_order(numbers) - exact.in_order(held)
    exponents = held.view(torch.int16).int() >> 7 & 255
    _, of_both = torch.stack([exponents, difference]).flatten(1).unique(dim=1, return_counts=True)
    _, of_exponents = exponents.unique(return_counts=True)
    bits = [-(counts / held.numel() * (counts / held.numel()).log2()).sum() for counts in (of_both, of_exponents)]
    return (bits[0] - bits[1]).item()


@pytest.mark.parametrize("rate, most", [(1e-7, 1.3), (1e-6, 0.45), (1e-5, 0.4), (1e-4, 0.6)])
def test_bits_beside_the_entropy(rate, most):
    """At most 32 bits a chunk and so many per cent more than a code needs that knows the exponents' statistics."""
    numbers, held = updated(rate)
    assert there_and_back(numbers, held) <= 32 / 1024 + (1 + most) * entropy(numbers, held)
