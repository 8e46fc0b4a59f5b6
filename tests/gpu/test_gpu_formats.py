"""The formats give the same bytes on a GPU as on the CPU, which is the reference."""

import pytest
import torch
from kernel_cases import FROZEN_FORMATS, awkward, make, same

from zeropp_fp8.formats import MX_NAMES, make_format

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("name", ["int8", "int4", "fp8_e4m3", "fp8_e5m2"])
def test_same_bytes_and_values_as_on_the_cpu(name, hadamard, dtype):
    torch.manual_seed(0)
    fmt = make_format(name, block_size=128, hadamard=hadamard)
    for numel in (0, 1, 7, 33, 128, 4099, 1 << 18):
        x = (torch.randn(numel) * torch.logspace(-6, 3, max(numel, 1))[:numel]).to(dtype)
        if numel > 1000:
            x[500] = float("nan")
            x[900] = float("inf")
        payload = fmt.encode(x)
        on_gpu = fmt.encode(x.cuda())
        assert torch.equal(on_gpu.cpu(), payload)
        decoded = fmt.decode(on_gpu, x.shape, dtype).cpu()
        assert torch.equal(decoded.nan_to_num(7.0), fmt.decode(payload, x.shape, dtype).nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale_mode", ["rceil", "floor"])
@pytest.mark.parametrize("name", MX_NAMES)
def test_mx_bytes_and_values_are_those_of_the_cpu(name, scale_mode, dtype):
    torch.manual_seed(0)
    fmt, info = make_format(name, scale_mode=scale_mode), torch.finfo(dtype)
    for numel in (0, 1, 33, 4099, 1 << 16):
        x = (torch.randn(numel) * torch.logspace(-40, 38, max(numel, 1))[:numel]).clamp(info.min, info.max).to(dtype)
        x[::9] = -0.0
        if numel > 1000:
            x[500], x[900], x[901], x[1000] = float("nan"), float("inf"), float("-inf"), info.max
        payload = fmt.encode_rows(x.view(1, -1))
        on_gpu = fmt.encode_rows(x.view(1, -1).cuda())
        assert torch.equal(on_gpu.cpu(), payload)
        decoded = fmt.decode_rows(payload, numel, dtype)
        assert same(fmt.decode_rows(on_gpu, numel, dtype), decoded)
        assert same(fmt.round_trip(x.cuda()), decoded.view(-1))
        for axis in (0, 1):
            matrix = x[: numel // 4 * 4].view(-1, 4)
            assert same(fmt.round_trip(matrix.cuda(), axis), fmt.round_trip(matrix, axis))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list(FROZEN_FORMATS))
def test_frozen_bytes_and_values_are_those_of_the_cpu(name, dtype):
    """Also of parts: their offset is a mean over the whole tensor, in an order that no device changes."""
    fmt = make(name)
    for numel in (1, 33, 4099, 1 << 18):
        (x,) = awkward([numel], dtype)
        payload = fmt.encode(x)
        on_gpu = fmt.encode(x.cuda())
        assert torch.equal(on_gpu.cpu(), payload)
        assert same(fmt.decode(on_gpu, x.shape, dtype), fmt.decode(payload, x.shape, dtype))
        size = -(-numel // (3 * fmt.granule)) * fmt.granule
        for first in (0, size, 2 * size):
            parts = [torch.full((fmt.payload_bytes(size),), 255, dtype=torch.uint8, device=d) for d in ("cpu", "cuda")]
            for part in parts:
                fmt.encode_part(x.to(part.device), first, size, part)
            assert torch.equal(parts[1].cpu(), parts[0])
