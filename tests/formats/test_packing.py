"""Codes of any number of bits in bytes, against the reference's digits of one number."""

import functools

import numpy as np
import pytest
import reference
import torch

from zeropp_fp8.formats import BlockScaledFormat
from zeropp_fp8.formats.chunks import Scratch
from zeropp_fp8.formats.integer import IntegerElement
from zeropp_fp8.formats.packing import group_of, pack, unpack

BITS = range(2, 9)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float32])
@pytest.mark.parametrize("bits", BITS)
def test_codes_of_any_bits(bits, dtype):
    """Rows in a wider payload; signs, and whatever stands above the bits of integers, are left out."""
    scratch, (codes, size) = Scratch(torch.device("cpu")), group_of(bits)
    assert codes * bits == size * 8 and all(count * bits % 8 for count in range(1, codes))
    for groups in (1, 3, 64):
        low, high = (-128, 128) if dtype != torch.float32 else (-(1 << bits - 1), 1 << bits - 1)
        numbers = torch.randint(low, high, (3, groups * codes), generator=torch.Generator().manual_seed(groups))
        payload = torch.full((3, 16 + groups * size + 16), 77, dtype=torch.uint8)
        packed, expected = payload[:, 16:-16], numbers.numpy() & (1 << bits) - 1
        pack(numbers.to(dtype), bits, packed, scratch)
        assert (payload[:, :16] == 77).all() and (payload[:, -16:] == 77).all()
        assert [bytes(row.tolist()) for row in packed] == [reference.packed(row, bits) for row in expected]
        assert np.array_equal(unpack(packed, bits, scratch).view(torch.uint8).numpy(), expected)


@pytest.mark.parametrize("bits", BITS)
def test_integers_of_any_bits(bits):
    """A format of another width needs its element alone: all codes, and blocks of whole groups."""
    make, multiple = functools.partial(BlockScaledFormat, f"int{bits}", IntegerElement(bits)), group_of(bits)[0]
    fmt = make(block_size=None)
    values = torch.arange(-fmt.element.largest, fmt.element.largest + 1)  # of scale 1
    assert torch.equal(fmt.decode(fmt.encode(values), values.shape, torch.float32), values)
    assert make(block_size=multiple).granule == multiple
    for wrong in (0, -multiple, *range(1, multiple)):
        with pytest.raises(ValueError, match=f"int{bits}: block_size must be a positive multiple of {multiple}$"):
            make(block_size=wrong)


def test_a_refused_format_can_be_printed():
    """Of a format that is refused a debugger and pytest show the arguments."""
    fmt = BlockScaledFormat.__new__(BlockScaledFormat)
    with pytest.raises(TypeError, match="int4: block_size must be an int or None, got '64'"):
        fmt.__init__("int4", IntegerElement(4), block_size="64")
    assert repr(fmt) == "int4 (block 64)"
