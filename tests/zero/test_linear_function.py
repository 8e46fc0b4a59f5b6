"""ZeRO-3's linear function: the same bits with and without gradients, and those of float64 within rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeropp_fp8.zero.linear_function import lean_linear


def refuse(*_):
    raise AssertionError("left to DeepSpeed")


@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    inputs=st.integers(1, 40),
    outputs=st.integers(1, 9),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**20),
)
@settings(derandomize=True, max_examples=60, deadline=None)
def test_with_and_without_gradients(shape, inputs, outputs, bias, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(*sides, inputs, generator=generator).to(dtype) for sides in (shape, (outputs,)))
    weight.requires_grad_()
    added = torch.randn(outputs, generator=generator).to(dtype) if bias else None
    linear = lean_linear(refuse)
    with_gradients = linear(x, weight, added)
    with torch.no_grad():
        without = linear(x, weight, added)
    assert with_gradients.requires_grad and not without.requires_grad
    assert torch.equal(with_gradients, without)
    wanted = x.double() @ weight.double().t() + (0 if added is None else added.double())
    sums = x.double().abs() @ weight.double().abs().t() + (0 if added is None else added.double().abs())
    assert ((without.double() - wanted).abs() <= (2**-7 if dtype == torch.bfloat16 else 1e-5) * sums).all()


@pytest.mark.parametrize("gradients", [True, False])
def test_autocast_is_left_to_deepspeed(gradients):
    called = []
    linear = lean_linear(lambda *given: called.append(len(given)))
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(gradients):
        linear(torch.ones(2, 3), torch.ones(4, 3))
    assert called == [3]
