"""GEMMs that stay in high precision: each has the bits of a plain layer's, the others those of one all in FP8 or MX."""

import pytest
import torch
from linear_cases import FEW_CASES, SOME_GEMMS, check_each_product, draw, equal_results, make_layer, run, two_passes
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from zeropp_fp8.compute import convert_linear_layers
from zeropp_fp8.config import GEMMS, ConfigError


@pytest.mark.parametrize("compute_format, scaling", FEW_CASES)
def test_each_product_by_itself(compute_format, scaling):
    for dtype in (torch.float32, torch.bfloat16):
        check_each_product(compute_format, scaling, dtype, torch.device("cpu"))


def conv1d(high, scaling="current"):
    torch.manual_seed(0)
    layer = Conv1D(96, 64)
    compute = {"format": "fp8", "scaling": scaling, "min_features": 1, "high_precision_gemms": list(high)}
    return layer, convert_linear_layers(layer, compute).scaling


def test_a_weight_that_lies_the_other_way_round():
    x, grad = draw("normal", 48, 64), draw("normal", 48, 96, seed=1)
    torch.manual_seed(0)
    high = run(Conv1D(96, 64), x, grad)
    for scaling in ("current", "delayed", "per_channel"):
        (low, _), *_ = (two_passes(*conv1d((), scaling), x, grad),)
        for some in SOME_GEMMS:
            for results in two_passes(*conv1d(some, scaling), x, grad):
                for gemm, result, one, other in zip(GEMMS, results, high, low):
                    assert torch.equal(result, one if gemm in some else other), (scaling, some, gemm)


class Three(nn.Module):
    """Layers with one input, which share its operands."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)


def three(**fields):
    torch.manual_seed(0)
    model = Three()
    scales = convert_linear_layers(model, {"format": "fp8", "scaling": "delayed", **fields}).scaling
    return model, scales


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_layers_that_share_an_input_and_checkpointing(reentrant):
    """Each layer has products of its own in high precision, so they need different operands of what they share."""
    named = {"output": ["q_proj"], "grad_weight": ["q_proj", "k_proj"], "grad_input": ["v_proj"]}
    x, grad = draw("normal", 32, 64), draw("normal", 32, 192, seed=1)

    def results(model, scales=None):
        found = []
        for _ in range(2):
            model.zero_grad()
            given = x.clone().requires_grad_()
            y = model(given) if reentrant is None else checkpoint(model, given, use_reentrant=reentrant)
            y.backward(grad)
            weights = {name: param.grad for name, param in model.named_parameters()}
            found.append(dict(zip(("q", "k", "v"), y.detach().split(64, dim=1))) | weights | {"x": given.grad})
            if scales is not None:
                scales.end_step()
        return found

    torch.manual_seed(0)
    plain, low, mixed = results(Three()), results(*three()), results(*three(high_precision_gemms=named))
    for high, codes, found in zip(plain, low, mixed):
        for name in ("q", "q_proj.weight", "k_proj.weight"):
            assert torch.equal(found[name], high[name]) and not torch.equal(found[name], codes[name]), name
        for name in ("k", "v", "v_proj.weight"):
            assert torch.equal(found[name], codes[name]) and not torch.equal(found[name], high[name]), name


def test_what_backward_keeps():
    """The input itself for the one product, its codes for the other: not both."""
    for high, dtype in (
        ((), torch.float8_e4m3fn),
        (("grad_weight",), torch.float32),
        (("output",), torch.float8_e4m3fn),
    ):
        layer, _, _ = make_layer("fp8", "current", 64, 64, high_precision_gemms=list(high))
        y = layer(torch.randn(48, 64, requires_grad=True))
        kept = [t for t in y.grad_fn.saved_tensors if t is not None and t.numel() == 48 * 64]
        assert [t.dtype for t in kept] == [dtype], high


def test_patterns_name_layers():
    model = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("a", "b", "c")})
    named = {"output": ["a", "c"], "grad_input": ["a", "none"], "grad_weight": ["?"]}
    report = convert_linear_layers(model, {"format": "fp8", "high_precision_gemms": named})
    assert report.skipped == {"a": "all of its GEMMs are named in high_precision_gemms"}
    assert {name: tuple(module.precision.high) for name, module in report.converted.items()} == {
        "b": (False, False, True),
        "c": (True, False, True),
    }
    assert "output, grad_weight in high precision" in repr(model["c"])


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        ({"format": "fp8", "high_precision_gemms": list(GEMMS)}, ["no GEMM of any layer", 'set "zeropp_fp8.compute.f']),
        (
            {"format": {"weights": "mxfp4", "activations": "mxfp4", "gradients": "none"}}
            | {"high_precision_gemms": {"output": ["x", "*"]}},
            ["no GEMM of any layer", 'to "none", or name fewer'],
        ),
    ],
)
def test_nothing_in_low_precision_is_refused(compute, words):
    with pytest.raises(ConfigError) as error:
        convert_linear_layers(nn.Linear(64, 64), compute)
    assert all(word in str(error.value) for word in words)


def test_the_backward_pass_of_formats_without_gradients_is_that_of_two_gemms():
    formats = {"weights": "mxfp4", "activations": "mxfp6_e3m2"}
    x, grad = draw("normal", 36, 160), draw("normal", 36, 128, seed=1)
    found = []
    for fields in ({"gradients": "none"}, {}):
        torch.manual_seed(0)
        high = [] if fields else ["grad_input", "grad_weight"]
        layer, _, _ = make_layer({**formats, **fields}, "mx", high_precision_gemms=high)
        found.append(run(layer, x, grad))
    assert equal_results(*found)
