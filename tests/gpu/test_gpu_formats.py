"""The formats give the same bytes on a GPU as on the CPU, which is the reference."""

import pytest
import torch

from zeropp_fp8.formats import make_format

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


def test_stochastic_rounding_is_deterministic_by_seed():
    fmt = make_format("int4", rounding="stochastic")
    x = torch.randn(1000, device="cuda")

    def draw(seed):
        return fmt.encode(x, torch.Generator().manual_seed(seed))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
