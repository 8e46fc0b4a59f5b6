"""Muon's update against its formula in float64, torch.optim.Muon and DeepSpeed's, on whole matrices."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeropp_fp8.optim import UPDATES, Muon
from zeropp_fp8.optim.muon import COEFFICIENTS, orthogonalized

SHAPES = [(64, 64), (48, 96), (96, 48), (8, 200), (1, 16), (16, 1)]


def written_out(matrix, steps=5):
    """The iteration on singular values, by an SVD in float64."""
    a, b, c = COEFFICIENTS
    u, s, v = torch.linalg.svd(matrix.double() / matrix.double().norm(), full_matrices=False)
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u @ s.diag() @ v


@pytest.mark.parametrize("shape", SHAPES)
def test_the_iteration_is_the_polynomial_of_singular_values(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalized(matrix, dtype=torch.float32)
    torch.testing.assert_close(found.double(), written_out(matrix), rtol=0, atol=2e-5)
    assert orthogonalized(matrix).dtype == torch.bfloat16
    torch.testing.assert_close(orthogonalized(matrix).double(), written_out(matrix), rtol=0, atol=0.05)


@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 12), st.floats(1e-30, 1e30), st.integers(0, 2**31))
def test_matrices_of_one_shape_together_and_any_scale(count, rows, columns, scale, seed):
    """Each as it is alone; a factor makes no difference; zeros stay zeros."""
    matrices = torch.randn(count, rows, columns, generator=torch.Generator().manual_seed(seed))
    together = orthogonalized(matrices, dtype=torch.float32)
    for one, alone in zip(together, matrices):
        torch.testing.assert_close(one, orthogonalized(alone, dtype=torch.float32), rtol=1e-4, atol=1e-5)
    if 1e-6 < scale < 1e12:
        torch.testing.assert_close(orthogonalized(scale * matrices, dtype=torch.float32), together, rtol=0, atol=0.05)
    assert not orthogonalized(torch.zeros(2, 3)).any()


def stepped(optimizer, param, steps=6):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize("shape", SHAPES[:4])
@pytest.mark.parametrize("options", [{}, {"nesterov": False, "weight_decay": 0.1, "momentum": 0.8, "ns_steps": 3}])
def test_beside_torch(shape, options):
    """torch.optim.Muon multiplies in bf16, this on a CPU in fp32: 0.01 of a step apart."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ours, torchs = (torch.nn.Parameter(weight.clone()) for _ in range(2))
    common = {"lr": 0.02, "weight_decay": 0.0, **options}
    moved = stepped(Muon([ours], **common), ours) - weight
    expected = stepped(torch.optim.Muon([torchs], **common), torchs) - weight
    assert (moved - expected).norm() < 0.015 * expected.norm()


def test_matrices_and_vectors_in_one_optimizer():
    """Muon's formula and AdamW's, written out; what is not of matrices is refused for Muon."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape in ((32, 48), (48, 32), (40,))]
    params = [torch.nn.Parameter(weight.clone()) for weight in weights]
    adam = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.1, "use_muon": False}
    optimizer = Muon([{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], **adam}])
    expected, momenta = [weight.double() for weight in weights], [torch.zeros_like(w).double() for w in weights[:2]]
    first, second = torch.zeros(2, 40, dtype=torch.float64)
    for step in range(1, 21):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
        for number, momentum in enumerate(momenta):
            grad, (rows, columns) = params[number].grad.double(), params[number].shape
            momentum.lerp_(grad, 0.05)
            direction = written_out(grad.lerp(momentum, 0.95)) * math.sqrt(max(1, rows / columns))
            expected[number] = expected[number] * (1 - 0.02 * 0.1) - 0.02 * direction
        grad = params[2].grad.double()
        first, second = first.lerp(grad, 0.1), second.lerp(grad.square(), 0.05)
        moved = (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-10)
        expected[2] = expected[2] * (1 - 1e-2 * 0.1) - 1e-2 * moved
    for param, weight in zip(params, expected):
        torch.testing.assert_close(param.double(), weight, rtol=0, atol=1e-5)
    said = r'\(40,\) is no matrix; put what Muon does not update into a param group with "use_muon": False'
    with pytest.raises(ValueError, match=said):
        Muon(params).step()


@pytest.mark.parametrize(
    "options, said",
    [
        ({"ns_coefficients": (3, -4, 2)}, '"ns_coefficients" of Muon'),
        ({"adjust_lr_fn": "match_rms_adamw"}, '"adjust_lr_fn"'),
    ],
)
def test_options_that_it_does_not_have(options, said):
    (line,) = UPDATES["Muon"].refusals(options)
    assert line.startswith(said)
    assert not list(UPDATES["Muon"].refusals({"adjust_lr_fn": "original"}))
