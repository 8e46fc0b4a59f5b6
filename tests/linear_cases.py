"""Layers that compute in low precision, data for them, and what `run` gives by the formulas."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from error_bounds import signal_to_noise_db, student_t
from torch import nn

from zeropp_fp8.compute import convert_linear_layers
from zeropp_fp8.config import GEMMS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MX_NAMES = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "mxint8")
FP8_CASES = [("fp8", s) for s in ("current", "delayed", "per_channel", "block")]
# Scaling by blocks has no GEMM for E5M2.
HYBRID_CASES = [("fp8_hybrid", s) for s in ("current", "delayed", "per_channel")]
MX_CASES = [(name, "mx") for name in MX_NAMES]
CASES = FP8_CASES + HYBRID_CASES + MX_CASES
# One MX format of each way to treat NaN: its own code, Inf kept, a spoiled block.
FEW_CASES = FP8_CASES + HYBRID_CASES[:1] + [("mxfp8_e4m3", "mx"), ("mxfp8_e5m2", "mx"), ("mxfp4", "mx")]
SOME_GEMMS = [some for count in (1, 2) for some in itertools.combinations(GEMMS, count)]
NO_GRADIENTS = pytest.param(
    {"weights": "mxfp4", "activations": "mxfp4", "gradients": "none"}, "mx", id="no gradients-mx"
)


def make_layer(compute_format, scaling, features_in=160, features_out=128, dtype=torch.float32, bias=True, **fields):
    """(an nn.Linear computing in low precision, its scaling, a plain copy of it)."""
    plain = nn.Linear(features_in, features_out, bias=bias, dtype=dtype)
    layer = copy.deepcopy(plain)
    report = convert_linear_layers(
        layer, {"format": compute_format, "scaling": scaling, "min_features": 1, "skip_modules": [], **fields}
    )
    assert report.converted == {"": layer}
    return layer, report.scaling, plain


def features(scaling):
    """(in, out) that a scaling takes; for MX they are no multiples of 32."""
    return {"block": (384, 256), "mx": (200, 104)}.get(scaling, (208, 112))


def draw(data, *shape, seed=0):
    """fp32 numbers: normal, Student-t with 4 degrees of freedom, or normal with one in 1000 a thousand times larger."""
    generator = torch.Generator().manual_seed(seed)
    if data == "student_t":
        return student_t(math.prod(shape), 4, generator).view(shape)
    numbers = torch.randn(shape, generator=generator)
    if data == "outliers":
        numbers.view(-1)[seed % 7 :: 1000] *= 1000
    return numbers


def run(layer, x, grad, x_requires_grad=True):
    """(y, grad of x, of weight, of bias); old gradients are dropped first."""
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_(x_requires_grad)
    y = layer(x)
    y.backward(grad)
    bias = getattr(layer, "bias", None)
    return y.detach(), x.grad, layer.weight.grad, None if bias is None else bias.grad


def float64_results(layer, x, grad):
    """Return what `run` gives, by the formulas in float64."""
    weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
    x, grad = x.double(), grad.double()
    x_2d, grad_2d = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    y = (x_2d @ weight.t() + bias).view(grad.shape)
    return y, (grad_2d @ weight).view(x.shape), grad_2d.t() @ x_2d, grad_2d.sum(0)


def two_passes(layer, scales, x, grad):
    """Results of two steps: delayed scaling has a history in the second one."""
    found = []
    for _ in range(2):
        found.append(run(layer, x, grad))
        scales.end_step()
    return found


def check_each_product(compute_format, scaling, dtype, device):
    """In high precision a product has the bits of a plain layer's; the others those of a layer all in low precision."""
    features_in, features_out = features(scaling)
    x = draw("student_t", 2, 24, features_in).to(device, dtype)
    grad = draw("normal", 2, 24, features_out, seed=1).to(device, dtype)
    found = {}
    for some in ((), *SOME_GEMMS):
        torch.manual_seed(0)
        sizes = (features_in, features_out, dtype)
        layer, scales, plain = make_layer(compute_format, scaling, *sizes, high_precision_gemms=list(some))
        found[some] = two_passes(layer.to(device), scales, x, grad)
    plain.to(device)
    in_high, exact = run(plain, x, grad), float64_results(plain, x, grad)
    for some, (*results, bias) in ((some, results) for some, steps in found.items() for results in steps):
        for gemm, result, high, low, numbers in zip(GEMMS, results, in_high, found[()][0], exact):
            assert torch.equal(result, high if gemm in some else low), (some, gemm)
            assert (signal_to_noise_db(numbers, result) > 45) == (gemm in some)
        assert torch.equal(bias, in_high[3])


def equal_results(a, b):
    return all(torch.equal(one, other) for one, other in zip(a, b))


def three_layers(compute_format="fp8", scaling="current", features=128):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(features, features) for _ in range(3)])
    report = convert_linear_layers(model, {"format": compute_format, "scaling": scaling, "min_features": 1})
    return model, report.scaling
