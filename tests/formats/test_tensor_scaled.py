"""FP8 with one scale per tensor: the format, beside the cast of a linear layer's weight and written-out rounding."""

import pytest
import torch
from conformance import SPECIALS, tensors, with_specials
from hypothesis import given, settings

from zeropp_fp8.compute.casts import cast_per_tensor
from zeropp_fp8.formats import make_format

FORMAT = make_format("fp8_e4m3", scales="tensor")


@settings(max_examples=150, derandomize=True)
@given(tensors(), SPECIALS)
def test_codes_and_scale_are_those_of_a_cast(tensor, specials):
    """Bit for bit: a layer multiplies with the same numbers, whether its weight rests so or is cast on the way."""
    if not tensor.numel():
        return
    tensor = with_specials(tensor, specials).view(-1)
    payload = FORMAT.encode(tensor).view(1, -1)
    operand, _ = cast_per_tensor(tensor.view(1, -1), torch.float8_e4m3fn, transposed=False)
    codes = operand.codes[:, : tensor.numel()].view(torch.uint8)
    assert torch.equal(FORMAT.decode_scales(payload), operand.scale.view(1, 1))
    assert torch.equal(FORMAT.codes(payload, tensor.numel()).view(torch.uint8), codes)


def test_rows_have_scales_of_their_own_and_zeros_the_scale_1():
    matrix = torch.tensor([[1.0, -2.0, 0.5], [0.0, -0.0, 0.0], [448.0, 1.0, 2.0]])
    payload = FORMAT.encode_rows(matrix)
    assert FORMAT.decode_scales(payload).view(-1).tolist() == [pytest.approx(2 / 448), 1.0, 1.0]
    assert torch.equal(FORMAT.decode_rows(payload, 3, torch.float32)[1:], matrix[1:])


def test_nothing_and_numbers_beyond_a_dtype():
    assert FORMAT.payload_bytes(0) == FORMAT.encode(torch.empty(0)).numel() == 0
    assert FORMAT.decode(torch.empty(0, dtype=torch.uint8), (0,), torch.float32).shape == (0,)
    large = torch.tensor([3e38, 1.0])
    assert FORMAT.decode(FORMAT.encode(large), (2,), torch.float16).tolist() == [65504.0, 0.0]
    assert repr(FORMAT) == "fp8_e4m3 (a scale per tensor)" and FORMAT.bits_per_element == 8
