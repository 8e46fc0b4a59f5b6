"""FP8 codes with a scale that all ranks share: codes, counts, sums and scales. payload_checks.py has the kernels."""

import numpy as np
import pytest
import torch
from conformance import DTYPES
from reference import ELEMENTS

from zeropp_fp8.formats import SharedScaleFormat

NAMES = pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])


def nearest_codes(name, values):
    """uint8 codes of float64 values: to nearest, ties to the even code, cut off at the largest, not finite: 0x7F."""
    codes = ELEMENTS[name].rounded(np.where(np.isfinite(values), values, 0.0))
    return np.where(np.isfinite(values), codes, 0x7F).astype(np.uint8)


def draw(count, dtype, seed=0):
    """Values over all of the formats' range, with ties, zeros, NaN and Inf."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator) * torch.logspace(-6, 4, count)[torch.randperm(count)]
    values[::11] = 0.0
    values[1::23] = -0.0
    grid = torch.from_numpy(ELEMENTS["fp8_e4m3"].numbers)[torch.randint(1, 126, (count // 4,), generator=generator)]
    values[2 : 2 + len(grid)] = (grid * 1.0625).float()  # halfway between two codes, for all but subnormals
    values = values.to(dtype)
    values[5], values[6], values[7] = float("nan"), float("inf"), -float("inf")
    return values


@NAMES
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("multiplier", [1.0, 0.37, 1e-3, 3000.0])
def test_codes_and_counts(name, dtype, multiplier):
    values = draw(3001, dtype)
    out = torch.full((1, 3016), 0xAB, dtype=torch.uint8)
    counts = torch.tensor([10, 20])
    SharedScaleFormat(name).encode_scaled(values.view(1, -1), torch.tensor([multiplier]), out, counts)
    # The product is rounded to fp32 before it is rounded to FP8.
    scaled = (values.float().numpy() * np.float32(multiplier)).astype(np.float64)
    expected = nearest_codes(name, scaled)
    assert np.array_equal(out[0, :3001].numpy(), expected)
    assert not out[0, 3001:].any(), "padding is zero"
    assert (expected[5:8] == 0x7F).all()
    largest = nearest_codes(name, np.array([1e9]))[0]
    zeros = (expected & 0x7F == 0) & (values.float().numpy() != 0)
    assert counts.tolist() == [10 + int((expected & 0x7F == largest).sum()), 20 + int(zeros.sum())]
    if multiplier == 1e-3:
        assert zeros.sum() > 100 and counts[1] > 120
    if multiplier == 3000.0:
        assert counts[0] > 200


@NAMES
def test_every_code_decodes_to_its_number(name):
    wire_format = SharedScaleFormat(name)
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    decoded = wire_format.decode_rows(codes, 128, torch.float32)
    table = ELEMENTS[name].numbers.reshape(2, 128)
    finite = np.isfinite(table)
    assert np.array_equal(decoded.numpy()[finite].astype(np.float64), table[finite])
    assert not np.isfinite(decoded.numpy()[~finite]).any()
    out = torch.zeros(2, 100, dtype=torch.bfloat16)
    assert wire_format.decode_rows(codes, 100, torch.bfloat16, out) is out
    assert torch.equal(out.float().nan_to_num(), decoded[:, :100].nan_to_num().bfloat16().float())


@NAMES
def test_sum_over_ranks(name):
    """In fp32 and in the ranks' order; a rank's NaN is everybody's."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 0x60, (5, 3, 64), generator=generator, dtype=torch.uint8)
    codes[2, 1, 7] = 0x7F
    total = SharedScaleFormat(name).sum_of_rows(codes, 50)
    expected = np.zeros((3, 50), dtype=np.float32)
    for rank in codes.numpy():
        expected = expected + ELEMENTS[name].numbers[rank[:, :50]].astype(np.float32)
    assert np.isnan(expected[1, 7]) and np.isnan(total.numpy()[1, 7])
    assert np.array_equal(total.numpy(), expected, equal_nan=True)


@NAMES
def test_scale_of_amax(name):
    wire_format = SharedScaleFormat(name)
    amax = torch.tensor([448.0, 1.0, 3e38, 0.0, 1e-42])
    scales = wire_format.scale_of_amax(amax)
    assert scales[:3].tolist() == pytest.approx((amax[:3].double() / ELEMENTS[name].largest).tolist(), rel=1e-7)
    # Nothing is divided by zero, and neither mu (2^-24 to 2^24) nor its inverse leaves the normal numbers.
    assert scales[3] == 1 and (scales[4] / 2**24) >= torch.finfo(torch.float32).smallest_normal
    assert (2**24 / scales).isfinite().all()
    # The largest magnitude lies at the largest code, and nothing is cut off.
    values = torch.randn(1, 999) * 7
    scale = wire_format.scale_of_amax(values.abs().amax().view(1))
    out = torch.empty(1, 999, dtype=torch.uint8)
    wire_format.encode_scaled(values, 1 / scale, out)
    decoded = wire_format.decode_rows(out, 999, torch.float32) * scale
    assert decoded.abs().max() == pytest.approx(values.abs().max().item(), rel=1e-6)


def test_what_the_format_is_and_refuses():
    wire_format = SharedScaleFormat("fp8_e4m3")
    assert wire_format.payload_bytes(1) == 16 and wire_format.payload_bytes(33) == 48
    assert repr(wire_format) == "fp8_e4m3 (a shared scale per tensor)" and wire_format.bits_per_element == 8
    with pytest.raises(TypeError, match="use encode_scaled"):
        wire_format.encode_rows(torch.ones(1, 4))
    with pytest.raises(TypeError, match="fp8_e4m3"):
        wire_format.encode_scaled(torch.ones(1, 4, dtype=torch.float64), torch.ones(1), torch.empty(1, 4).byte())
    with pytest.raises(KeyError):
        SharedScaleFormat("int8")
    nothing = torch.full((2, 16), 7, dtype=torch.uint8)
    wire_format.encode_scaled(torch.ones(2, 0), torch.ones(1), nothing)
    assert not nothing.any()
