"""Packed experts of transformers in low precision, beside stock's and written-out sums."""

import copy

import expert_models
import pytest
import torch
from transformers import GptOssConfig, MixtralConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from zeropp_fp8.compute import casts, convert_linear_layers, restore_linear_layers
from zeropp_fp8.compute.experts import LowPrecisionExperts, Projection
from zeropp_fp8.compute.grouped import Groups
from zeropp_fp8.config import GEMMS

EXPERTS, HIDDEN, INNER, CHOSEN = 5, 64, 96, 2
COMPUTE = {"format": "fp8", "scaling": "current"}
SIZES = {"hidden_size": HIDDEN, "intermediate_size": INNER}
MAKERS = {
    "mixtral": (MixtralExperts, MixtralConfig(**SIZES, num_local_experts=EXPERTS)),
    "qwen3_moe": (
        Qwen3MoeExperts,
        Qwen3MoeConfig(**SIZES, moe_intermediate_size=INNER, num_experts=EXPERTS),
    ),
    "gpt_oss": (GptOssExperts, GptOssConfig(**SIZES, num_local_experts=EXPERTS)),
    "nemotron_h": (
        NemotronHExperts,
        NemotronHConfig(**SIZES, moe_intermediate_size=INNER, n_routed_experts=EXPERTS),
    ),
}


def made(kind, dtype=torch.float32):
    return expert_models.made(MAKERS[kind]).to(dtype)


def routed(tokens, dtype=torch.float32):
    """(hidden states, experts, weights); the second expert gets no token."""
    torch.manual_seed(1)
    index = torch.rand(tokens, EXPERTS - 1).argsort(dim=1)[:, :CHOSEN]
    return torch.randn(tokens, HIDDEN, dtype=dtype), index + (index >= 1), torch.rand(tokens, CHOSEN, dtype=dtype)


def passed(module, given):
    """Output and gradients of a pass: of the hidden states, of the router's weights, and of parameters by name."""
    hidden, index, weights = given
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    out = module(hidden, index, weights)
    torch.manual_seed(2)
    out.backward(torch.randn(out.shape).to(out.dtype))
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad, **gradients}


def distance(found, wanted):
    """By the largest of the second; of parameters that got no gradient it is 0 where the other is, too."""
    if wanted is None:
        return found.abs().max().item() if found is not None and found.numel() else 0.0
    return ((found - wanted).norm() / wanted.norm().clamp(min=1e-9)).item()


def distances(module, stock, given):
    found, wanted = passed(module, given), passed(stock, given)
    return {name: distance(found[name], wanted[name]) for name in wanted}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("tokens", [37, 1])
@pytest.mark.parametrize("low", GEMMS)
def test_each_product_by_itself(kind, tokens, low):
    """Two of three products in high precision: what does not depend on the third is stock's."""
    stock = made(kind)
    module = copy.deepcopy(stock)
    high = [gemm for gemm in GEMMS if gemm != low]
    convert_linear_layers(module, {**COMPUTE, "high_precision_gemms": high})
    assert isinstance(module, LowPrecisionExperts)
    found = distances(module, stock, routed(tokens))
    rounded = {name for name, far in found.items() if far > 1e-5}
    weights = {name for name in found if name.endswith("_proj")}
    expected = {
        "output": set(found),
        "grad_input": {"hidden", *(name for name in found if name.startswith(("gate_up_proj", "up_proj")))},
        "grad_weight": weights,
    }
    assert rounded <= expected[low] and rounded
    assert all(far < 0.12 for name, far in found.items() if name != "weights" or tokens > 1)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("scaling", ["current", "delayed", "per_channel", "mx"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_scalings(kind, scaling, dtype):
    stock = made(kind, dtype)
    module = copy.deepcopy(stock)
    compute = {"format": "mxfp8_e4m3" if scaling == "mx" else "fp8", "scaling": scaling}
    report = convert_linear_layers(module, compute)
    given = routed(37, dtype)
    for _ in range(2):  # delayed scaling takes the second step's scales from the first
        found = distances(module, stock, given)
        assert all(0 < found[name] < 0.12 for name in ("out", "hidden", "down_proj")), found
        report.scaling.end_step()
        for parameter in (*module.parameters(), *stock.parameters()):
            parameter.grad = None


@pytest.mark.parametrize("kind", MAKERS)
def test_no_token(kind):
    """Experts that a rank has no token for are multiplied with nothing, and have gradients of zero."""
    module = made(kind)
    convert_linear_layers(module, COMPUTE)
    found = passed(module, routed(0))
    assert found["out"].shape == found["hidden"].shape == (0, HIDDEN)
    assert not any(found[name].any() for name, _ in module.named_parameters())


@pytest.mark.parametrize("kind", MAKERS)
def test_choices_of_no_expert(kind):
    """Numbers from the experts' on, as of a token beyond a capacity: as if another expert had no weight."""
    module, stock = made(kind), made(kind)
    convert_linear_layers(module, COMPUTE)
    hidden, index, weights = routed(37)
    dropped = torch.rand(index.shape, generator=torch.Generator().manual_seed(4)) < 0.3
    found = passed(module, (hidden, index.masked_fill(dropped, EXPERTS), weights))
    wanted = passed(stock, (hidden, index, weights.masked_fill(dropped, 0.0)))
    assert dropped.any() and not found["weights"][dropped].any()
    wanted["weights"] = wanted["weights"].masked_fill(dropped, 0.0)
    assert all(distance(found[name], wanted[name]) < 0.1 for name in wanted)


def test_a_projection_by_hand():
    """Codes with one scale for the stack, and sums over each group's rows in float64."""
    module = made("mixtral")
    weight = module.down_proj.detach().clone()
    report = convert_linear_layers(module, COMPUTE)
    projection = report.converted[".down_proj"]
    assert isinstance(projection, Projection) and projection.weight is module._parameters["down_proj"]
    counts = [3, 0, 17, 1, 16]
    expert_of = torch.arange(EXPERTS).repeat_interleave(torch.tensor(counts))
    groups = Groups.of(expert_of, EXPERTS)
    x, g = torch.randn(sum(counts), INNER), torch.randn(sum(counts), HIDDEN)
    given = groups.spread(x).requires_grad_()
    y = projection(given, groups)
    y.backward(groups.spread(g))

    def rounded(matrix):
        return casts.cast_per_tensor(matrix, torch.float8_e4m3fn, transposed=False)[0].dequantize(torch.float64)

    x_, w_, g_ = rounded(x), rounded(weight.flatten(0, 1)).view_as(weight), rounded(g)
    wanted = torch.stack([w_[e] @ x_[s] for s, e in enumerate(expert_of)])
    assert torch.allclose(y[groups.row_of].double(), wanted, rtol=1e-5, atol=1e-5)
    wanted = torch.stack([g_[s] @ w_[e] for s, e in enumerate(expert_of)])
    assert torch.allclose(given.grad[groups.row_of].double(), wanted, rtol=1e-5, atol=1e-5)
    wanted = torch.stack([g_[expert_of == e].t() @ x_[expert_of == e] for e in range(EXPERTS)])
    assert torch.allclose(module.down_proj.grad.double(), wanted, rtol=1e-5, atol=1e-5)
    others = torch.ones(groups.rows, dtype=torch.bool).index_fill_(0, groups.row_of, False)
    assert not y[others].any() and not given.grad[others].any()


@pytest.mark.parametrize("counts", [[0] * 5, [1] * 5, [16] * 5, [33, 0, 0, 0, 0], [0, 0, 0, 0, 33], [15, 16, 17, 1, 0]])
def test_groups(counts):
    """Each row has its place, in order; groups end at multiples of 16 and are not empty."""
    expert_of = torch.arange(5).repeat_interleave(torch.tensor(counts))
    groups = Groups.of(expert_of, 5)
    ends = groups.ends.tolist()
    assert ends[-1] == groups.rows and all(end % 16 == 0 for end in ends)
    for e, (start, end) in enumerate(zip([0, *ends], ends)):
        own = groups.row_of[expert_of == e].tolist()
        assert own == list(range(start, start + counts[e])) and start + max(counts[e], 1) <= end


def test_restored_copied_and_cast():
    stock, module = made("qwen3_moe"), made("qwen3_moe")
    report = convert_linear_layers(module, COMPUTE)
    assert list(report.converted) == [".gate_up_proj", ".down_proj"]
    assert list(module.state_dict()) == list(stock.state_dict())
    copied, given = copy.deepcopy(module), routed(9)
    assert copied.projections["down_proj"].module is copied
    assert torch.equal(copied(*given), module(*given))
    with pytest.raises(ValueError, match="was converted before"):
        convert_linear_layers(module, COMPUTE)
    with pytest.raises(RuntimeError, match=r"gate_up_proj computes in fp8_e4m3: .* may leave the range of fp16"):
        module.half()
    report.restore()
    assert type(module) is type(stock) and torch.equal(module(*given), stock(*given))
    restore_linear_layers(copied)
    assert type(copied) is type(stock) and torch.equal(copied(*given), stock(*given))


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        ({"skip_modules": ["*down_proj"]}, "named in skip_modules"),
        ({"skip_modules": ["experts"]}, "named in skip_modules"),
        ({"min_features": 128}, "fewer than 128 features"),
        ({"scaling": "block"}, "experts have no product with scales of blocks"),
        ({"format": "fp8_hybrid"}, "experts have no product with E5M2"),
        (
            {"high_precision_gemms": {gemm: ["experts*"] for gemm in GEMMS}},
            "all of its GEMMs are named in high_precision_gemms",
        ),
    ],
)
def test_what_stays_as_it_is(compute, reason):
    model = torch.nn.ModuleDict({"experts": made("mixtral")})
    report = convert_linear_layers(model, {**COMPUTE, **compute})
    assert report.skipped == {"experts": reason} and type(model["experts"]) is MixtralExperts


def test_experts_of_another_make_stay_as_they_are():
    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.num_experts, self.weight = 4, torch.nn.Parameter(torch.zeros(4, 64, 64))

    report = convert_linear_layers(torch.nn.ModuleDict({"a": Experts()}), COMPUTE)
    assert list(report.skipped) == ["a"] and "a Experts, which is none of transformers' experts" in report.skipped["a"]


def test_a_subclass_with_a_forward_of_its_own_stays_as_it_is():
    class Tripled(MixtralExperts):
        def forward(self, *given):
            return 3 * super().forward(*given)

    module = made("mixtral")
    module.__class__ = Tripled
    report = convert_linear_layers(torch.nn.ModuleDict({"a": module}), COMPUTE)
    assert list(report.skipped) == ["a"] and type(module) is Tripled
