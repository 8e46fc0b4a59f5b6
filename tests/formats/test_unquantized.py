"""Numbers that travel as they are, or in half precision."""

import math

import pytest
import torch
from conformance import DTYPES, normal, through

from zeropp_fp8.formats import make_format


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_none_keeps_nan_and_inf_bits(dtype):
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    tensor = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, -0.0, 1.0], dtype=dtype)
    tensor.view(integer)[0] += 1  # a NaN with another payload
    fmt = make_format("none", dtype=dtype)
    assert torch.equal(through(fmt, tensor).view(integer), tensor.view(integer))
    assert fmt.bits_per_element == 8 * dtype.itemsize


def test_fp16_is_ieee_half_precision():
    values, fmt = normal(101), make_format("fp16")
    assert fmt.payload_bytes(101) == 208 and fmt.bits_per_element == 16
    assert torch.equal(through(fmt, values), values.half().float())


def test_single_numbers_of_any_strides():
    """torch calls them contiguous whatever their strides are."""
    matrix = normal(35).view(5, 7)
    for name in ("none", "fp16"):
        fmt = make_format(name)
        for tensor in (matrix[::5, ::7], matrix.view(-1)[::35], matrix[:1].t(), matrix[0, 0].expand(1, 1)):
            assert tensor.is_contiguous() and torch.equal(fmt.encode(tensor), fmt.encode(tensor.clone().view(-1)))
            rows = fmt.encode_rows(tensor.view(len(tensor), 1))
            assert torch.equal(fmt.decode_rows(rows, 1, torch.float32).view(-1), through(fmt, tensor.reshape(-1)))
