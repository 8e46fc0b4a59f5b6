"""NVFP4 beside torchao and other formats."""

import pytest
import torch
from error_bounds import signal_to_noise_db

from zeropp_fp8 import kernels
from zeropp_fp8.formats import make_format

FORMAT = make_format("nvfp4")


def samples(numel, seed=0, spread=4.0):
    """fp32 whose blocks differ by powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    return values * 10 ** (spread * torch.rand(-(-numel // 16), generator=generator)).repeat_interleave(16)[:numel]


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
