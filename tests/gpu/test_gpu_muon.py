"""Muon's iteration on a GPU, whose products are taken in 16 bits, and a step of what an owner has."""

import math

import pytest
import torch

from zeropp_fp8.optim import UPDATES, Muon, Owned, Segments, StateFormats, make_state_buffers
from zeropp_fp8.optim.muon import METHODS, orthogonalized

pytestmark = pytest.mark.gpu
DTYPES = {"gram": torch.float16, "standard": torch.bfloat16}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(2048, 2048), (5504, 2048), (2048, 5504), (256, 4096), (3, 512, 768)])
def test_as_in_float64(shape, method):
    """Within what 16 bits leave of singular values that become about 1; a gradient's spectrum falls off as fast."""
    generator = torch.Generator("cuda").manual_seed(0)
    matrix = torch.randn(shape, generator=generator, device="cuda")
    fall = torch.logspace(0, -3, shape[-1], device="cuda")
    found = orthogonalized(matrix * fall, dtype=DTYPES[method], method=method).double()
    expected = orthogonalized(matrix.double() * fall, dtype=torch.float64)
    assert (found - expected).norm() < {"gram": 0.03, "standard": 0.05}[method] * expected.norm()


@pytest.mark.parametrize("method", METHODS)
def test_what_an_owner_has(method):
    """Steps of the engine's update are those of the optimizer, on fp32 states."""
    shapes = [(256, 512), (512, 256), (256, 512), (4, 128, 128), (64, 64)]
    generator = torch.Generator("cuda").manual_seed(0)
    weights, grads = ([torch.randn(s, generator=generator, device="cuda") for s in shapes] for _ in range(2))
    segments = Segments([math.prod(shape) for shape in shapes], torch.device("cuda"))
    master, momentum = make_state_buffers(segments, StateFormats("fp32", "fp32", "fp32"), ["exp_avg"])
    master.encode_all_([weight.reshape(-1) for weight in weights])
    params = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizer, update, scale = Muon(params, weight_decay=0.1, ns_method=method), UPDATES["Muon"], torch.ones(1).cuda()
    for step in range(1, 4):
        owned = Owned(segments, master, [momentum], [g.reshape(-1) for g in grads], weights, scale, shapes)
        update.apply(owned, step, update.options(optimizer, optimizer.param_groups[0]))
        for param, grad in zip(params, grads):
            param.grad = grad.clone()
        optimizer.step()
    for weight, param in zip(weights, params):
        # Products of a stack and of one matrix differ by roundings.
        rounding = 2 * torch.finfo(DTYPES[method]).eps
        assert (weight - param).norm() < rounding * 0.02 * 3 * math.sqrt(min(weight.shape[-2:]))
