"""FP8 with one scale a tensor: the format, beside the cast of a linear layer's weight and written-out rounding."""

import math

import pytest
import torch
from frozen_format_cases import tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from zeropp_fp8.compute.casts import cast_per_tensor
from zeropp_fp8.formats import TensorScaledFormat, make_format

FORMAT = make_format("fp8_e4m3", scales="tensor")


@settings(max_examples=150, derandomize=True)
@given(tensors(), st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([math.nan, math.inf])), max_size=2))
def test_codes_and_scale_are_those_of_a_cast(tensor, specials):
    """Bit for bit: a layer multiplies with the same numbers, whether its weight rests so or is cast on the way."""
    if not tensor.numel():
        return
    for place, special in specials:
        tensor[place % tensor.numel()] = special
    payload = FORMAT.encode(tensor).view(1, -1)
    operand, _ = cast_per_tensor(tensor.view(1, -1), torch.float8_e4m3fn, transposed=False)
    codes = operand.codes[:, : tensor.numel()].view(torch.uint8)
    assert torch.equal(FORMAT.scales(payload), operand.scale.view(1, 1))
    assert torch.equal(FORMAT.codes(payload, tensor.numel()).view(torch.uint8), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_the_nearest(dtype, monkeypatch):
    """Against fp64: the scale puts the largest magnitude on 448, and each value is the nearest multiple of it."""
    monkeypatch.setattr("zeropp_fp8.formats.tensor_scaled._CHUNK", 100)  # several pieces
    torch.manual_seed(0)
    tensor = (torch.randn(7, 143) * 0.02).to(dtype)
    largest = tensor.double().abs().max()
    payload = FORMAT.encode(tensor)
    assert payload.numel() == 16 + 1008 and not payload[4:16].any() and not payload[16 + 1001 :].any()
    assert FORMAT.scales(payload[None]).item() == pytest.approx(largest.item() / 448, rel=2**-23)
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    grid = grid[grid.isfinite()] * FORMAT.scales(payload[None]).double().item()
    decoded = FORMAT.decode(payload, tensor.shape, torch.float32).double()
    nearest = (tensor.double().view(-1, 1) - grid).abs().amin(dim=1).view(tensor.shape)
    assert ((tensor.double() - decoded).abs() <= nearest + 1e-7 * largest).all()
    assert decoded.abs().max() == pytest.approx(largest.item(), rel=2**-22)


def test_rows_have_scales_of_their_own_and_zeros_the_scale_1():
    matrix = torch.tensor([[1.0, -2.0, 0.5], [0.0, -0.0, 0.0], [448.0, 1.0, 2.0]])
    payload = FORMAT.encode_rows(matrix)
    assert FORMAT.scales(payload).view(-1).tolist() == [pytest.approx(2 / 448), 1.0, 1.0]
    assert torch.equal(FORMAT.decode_rows(payload, 3, torch.float32)[1:], matrix[1:])


def test_nothing_and_numbers_beyond_a_dtype():
    assert FORMAT.payload_bytes(0) == FORMAT.encode(torch.empty(0)).numel() == 0
    assert FORMAT.decode(torch.empty(0, dtype=torch.uint8), (0,), torch.float32).shape == (0,)
    large = torch.tensor([3e38, 1.0])
    assert FORMAT.decode(FORMAT.encode(large), (2,), torch.float16).tolist() == [65504.0, 0.0]
    assert repr(FORMAT) == "fp8_e4m3 (a scale a tensor)" and FORMAT.bits_per_element == 8


@pytest.mark.parametrize(
    "name, options",
    [("int8", {}), ("fp8_e5m2", {}), ("fp8_e4m3", {"double_quantize": True}), ("fp8_e4m3", {"block_size": 64})],
)
def test_what_goes_with_one_scale(name, options):
    assert isinstance(FORMAT, TensorScaledFormat)
    with pytest.raises(ValueError, match=f'{name}: scales "tensor" is there for fp8_e4m3'):
        make_format(name, scales="tensor", **options)
