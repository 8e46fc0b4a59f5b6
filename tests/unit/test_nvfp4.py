"""NVFP4 against its description in NumPy and against torchao, whole and in parts, as a wire and as a store format."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numerics import nvfp4_reference, signal_to_noise_db

from zeropp_fp8 import kernels
from zeropp_fp8.formats import make_format

FORMAT = make_format("nvfp4")


def samples(numel, seed=0, spread=4.0):
    """fp32 whose blocks differ by powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    return values * 10 ** (spread * torch.rand(-(-numel // 16), generator=generator)).repeat_interleave(16)[:numel]


@pytest.mark.parametrize("numel", [1, 2, 15, 16, 17, 31, 32, 255, 1000, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_payload_is_that_of_the_description(numel, dtype):
    values = samples(numel).to(dtype)
    payload, decoded = nvfp4_reference(values.float().numpy())
    assert bytes(FORMAT.encode(values).numpy()) == payload and FORMAT.payload_bytes(numel) == len(payload)
    found = FORMAT.decode(FORMAT.encode(values), values.shape, torch.float32)
    np.testing.assert_allclose(found.numpy(), decoded, rtol=2.0**-23, atol=0)


@given(st.lists(st.floats(width=32), min_size=1, max_size=70))
def test_any_numbers(values):
    values = torch.tensor(values, dtype=torch.float32)
    payload, decoded = nvfp4_reference(values.numpy())
    assert bytes(FORMAT.encode(values).numpy()) == payload
    found = FORMAT.decode(FORMAT.encode(values), values.shape, torch.float32).double().numpy()
    largest = float(np.finfo(np.float32).max)
    np.testing.assert_allclose(found, np.clip(decoded, -largest, largest), rtol=2.0**-22, atol=2.0**-130)


def test_special_values():
    values = samples(64)
    values[17], values[40] = math.nan, math.inf
    decoded = FORMAT.decode(FORMAT.encode(values), values.shape, torch.float32)
    assert decoded[16:48].isnan().all() and decoded[:16].isfinite().all() and decoded[48:].isfinite().all()
    assert not FORMAT.decode(FORMAT.encode(torch.zeros(40)), (40,), torch.float32).any()
    assert FORMAT.encode(torch.empty(0)).numel() == FORMAT.payload_bytes(0) == 0


@pytest.mark.parametrize("numel, ranks", [(256, 2), (1000, 3), (17, 4)])
def test_parts_have_the_codes_and_scales_of_the_whole(numel, ranks):
    values = samples(numel)
    whole = FORMAT.decode(FORMAT.encode(values), values.shape, torch.float32)
    size = -(-numel // (16 * ranks)) * 16
    parts = []
    for rank in range(ranks):
        out = torch.empty(FORMAT.payload_bytes(size), dtype=torch.uint8)
        FORMAT.encode_part(values, rank * size, size, out)
        assert torch.equal(out[FORMAT.shared_bytes(size)], FORMAT.encode(values)[:4])
        parts.append(FORMAT.decode(out, (size,), torch.float32))
    assert torch.equal(torch.cat(parts)[:numel], whole)


def test_the_mean_of_rows_is_that_of_decoded_rows():
    payloads = [FORMAT.encode_rows(samples(3 * 50, seed).view(3, 50)) for seed in range(4)]
    exact = sum(FORMAT.decode_rows(payload, 50, torch.float32).double() for payload in payloads) / 4
    torch.testing.assert_close(FORMAT.mean_of_rows(payloads, 50).double(), exact, rtol=1e-6, atol=1e-6)


def test_against_torchao():
    """Scales are equal; codes are, but where torchao divides by a scale and this format multiplies by its inverse."""
    ao = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason="torchao is not installed")
    values = samples(64 * 256, spread=2.0).view(64, 256)
    tensor_scale = ao.per_tensor_amax_to_scale(values.abs().max())
    scales, packed = ao.nvfp4_quantize(values, 16, tensor_scale)
    ours = FORMAT.encode(values)
    blocks = values.numel() // 16
    assert torch.equal(ours[:4].view(torch.float32)[0], tensor_scale.float())
    assert torch.equal(ours[4 : 4 + blocks], scales.view(torch.uint8).flatten())
    start = -(-(4 + blocks) // 16) * 16
    theirs = packed.view(torch.uint8).flatten()
    differing = (ours[start : start + theirs.numel()] != theirs).float().mean()
    assert differing < 1e-3


def test_it_is_between_mxfp4_and_int8():
    values = torch.randn(1 << 14, generator=torch.Generator().manual_seed(1))
    lost = {
        name: signal_to_noise_db(
            values, make_format(name).decode(make_format(name).encode(values), values.shape, torch.float32)
        )
        for name in ("mxfp4", "nvfp4", "int8")
    }
    assert lost["mxfp4"] + 1 < lost["nvfp4"] < lost["int8"], lost


def test_options():
    assert make_format(**FORMAT.options()).key == FORMAT.key and FORMAT.bits_per_element == 4.5
    assert not kernels.supports(FORMAT) and not kernels.decodes(FORMAT) and not FORMAT.is_exact
    for options, said in (({"block_size": 32}, "block_size is 16"), ({"hadamard": True}, "has no rotation")):
        with pytest.raises(ValueError, match=said):
            make_format("nvfp4", **options)
