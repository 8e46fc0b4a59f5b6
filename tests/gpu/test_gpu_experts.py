"""Products of groups of FP8 rows on a GPU, beside the emulation; packed experts, beside those of transformers."""

import copy

import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from zeropp_fp8.compute import casts, convert_linear_layers, grouped
from zeropp_fp8.compute.grouped import Groups, has_grouped_gemm

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
CASTS = {"tensor": casts.cast_per_tensor, "row": casts.cast_per_row}
COUNTS = {"some": [3, 0, 17, 1, 130], "one": [0, 0, 0, 0, 300], "even": [64] * 5, "none": [0] * 5}


def drawn(*shape):
    return torch.randn(shape, device=CUDA, dtype=torch.bfloat16)


@pytest.fixture
def native(monkeypatch):
    """Hopper multiplies groups itself: nothing is taken apart. The emulation is returned."""
    if not has_grouped_gemm(CUDA):
        pytest.skip("this device multiplies no groups of FP8 rows")
    emulated = Groups._each

    def refuse(groups):
        raise AssertionError("emulated on a device that has the product")

    monkeypatch.setattr(Groups, "_each", refuse)

    def without_tensor_cores(call):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Groups, "_each", emulated)
            patch.setattr(grouped, "has_grouped_gemm", lambda device: False)
            return call()

    return without_tensor_cores


@pytest.mark.parametrize("granularity", CASTS)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("sizes", [(128, 256), (48, 80)])
def test_products_of_groups(native, granularity, counts, sizes):
    """Forward, and what backward takes: the stack transposed, and sums over each group."""
    torch.manual_seed(0)
    (columns, rows_of_one), cast = sizes, CASTS[granularity]
    expert_of = torch.arange(5, device=CUDA).repeat_interleave(torch.tensor(COUNTS[counts], device=CUDA))
    groups = Groups.of(expert_of, 5)
    x, g = (groups.spread(drawn(expert_of.numel(), size)) for size in (columns, rows_of_one))
    stack = drawn(5 * rows_of_one, columns)
    e4m3 = torch.float8_e4m3fn
    (x_q, x_t), (g_q, g_t), (w_q, w_t) = (cast(matrix, e4m3) for matrix in (x, g, stack))
    for call in (
        lambda: groups.product(x_q, w_q, torch.bfloat16, fast_accumulation=True),
        lambda: groups.product(g_q, w_t, torch.bfloat16),
        lambda: groups.sum(g_t, x_t, torch.bfloat16),
    ):
        found, wanted = call(), native(call)
        assert found.shape == wanted.shape and found.isfinite().all()
        assert (found - wanted).float().norm() <= 2**-8 * wanted.float().norm() + 1e-6


@pytest.mark.parametrize(
    "compute", [("fp8", "delayed"), ("fp8", "current"), ("fp8", "per_channel"), ("mxfp8_e4m3", "mx")]
)
def test_experts_beside_transformers(compute):
    torch.manual_seed(0)
    config = MixtralConfig(hidden_size=256, intermediate_size=512, num_local_experts=8)
    config._experts_implementation = "grouped_mm"
    plain = MixtralExperts(config).to(CUDA, torch.bfloat16)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    module = copy.deepcopy(plain)
    report = convert_linear_layers(module, dict(zip(("format", "scaling"), compute)))
    index = torch.rand(1000, 7, device=CUDA).argsort(dim=1)[:, :2]  # the last expert gets nothing
    for _ in range(2):
        found = []
        for each in (module, plain):
            hidden = drawn(1000, 256) if not found else found[0][0].detach()
            hidden = hidden.clone().requires_grad_()
            out = each(hidden, index, torch.full((1000, 2), 0.5, device=CUDA, dtype=torch.bfloat16))
            out.float().square().sum().backward()
            found.append((hidden, out.detach(), hidden.grad, *[p.grad.clone() for p in each.parameters()]))
            each.zero_grad()
        report.scaling.end_step()
        for own, stock in list(zip(*found))[1:]:
            assert own.isfinite().all()
            assert (own.float() - stock.float()).norm() < 0.12 * stock.float().norm()
