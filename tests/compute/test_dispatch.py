"""Tokens to the rows of their experts and back, beside indexing and its gradients by autograd."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeropp_fp8.compute.dispatch import combine, dispatch
from zeropp_fp8.compute.grouped import Groups

HIDDEN = 24


def routed(tokens, experts, chosen, seed):
    torch.manual_seed(seed)
    index = torch.rand(tokens, experts).argsort(dim=1)[:, :chosen]
    return index, Groups.of(index.reshape(-1), experts)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 70), st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
def test_there_and_back(tokens, experts, chosen, seed):
    chosen = min(chosen, experts)
    _, groups = routed(tokens, experts, chosen, seed)
    own = torch.randn(tokens, HIDDEN, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(tokens, chosen, dtype=torch.float64, requires_grad=True)
    rows = dispatch(own, groups, chosen)
    out = combine(rows.sin(), weights, groups)
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, (own, weights), upstream)

    wanted_rows = torch.zeros(groups.rows, HIDDEN, dtype=torch.float64)
    for place, row in enumerate(groups.row_of.tolist()):
        wanted_rows[row] = own[place // chosen].detach()
    assert torch.equal(rows, wanted_rows)
    values = own.sin()
    wanted = values * weights.sum(dim=1, keepdim=True)
    assert torch.allclose(out, wanted, rtol=1e-12, atol=1e-12)
    for gradient, right in zip(found, torch.autograd.grad(wanted, (own, weights), upstream)):
        assert torch.allclose(gradient, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("router", [torch.bfloat16, torch.float32])
def test_weights_keep_their_precision(router):
    """The router's weights, and sums over experts, are not rounded to the rows' dtype on the way."""
    _, groups = routed(50, 8, 4, 0)
    rows = torch.randn(groups.rows, HIDDEN).bfloat16().requires_grad_()
    weights = torch.rand(50, 4, dtype=router).requires_grad_()
    out = combine(rows, weights, groups)
    upstream = torch.randn(50, HIDDEN).to(out.dtype)
    found = torch.autograd.grad(out, (rows, weights), upstream)
    exact = rows.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
    wanted = (exact[0][groups.row_of.view(50, 4)] * exact[1].unsqueeze(-1)).sum(dim=1)
    gradients = torch.autograd.grad(wanted, exact, upstream.double())
    assert out.dtype == router and found[1].dtype == router and found[0].dtype == torch.bfloat16
    rounding = {torch.bfloat16: 2**-9, torch.float32: 2**-23}[router]
    assert ((out - wanted).norm() / wanted.norm()).item() < rounding
    assert ((found[0] - gradients[0]).norm() / gradients[0].norm()).item() < 2**-9
    assert ((found[1] - gradients[1]).norm() / gradients[1].norm()).item() < 2 * rounding


@pytest.mark.parametrize("chosen", [1, 3])
def test_same_bits_again(chosen):
    """No atomic additions: the same gradients whenever it runs."""
    _, groups = routed(300, 4, chosen, 1)
    own = torch.randn(300, HIDDEN, requires_grad=True)
    weights = torch.rand(300, chosen, requires_grad=True)
    runs = []
    for _ in range(3):
        out = combine(dispatch(own, groups, chosen) ** 2, weights, groups)
        runs.append((out.detach(), *torch.autograd.grad(out.sum(), (own, weights))))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))


def test_columns_of_groups():
    """Unsorted rows find their groups; each row that was given stands once."""
    torch.manual_seed(0)
    matrix_of = torch.randint(0, 6, (200,))
    groups = Groups.of(matrix_of, 6)
    assert torch.equal(groups.given_of[groups.row_of], torch.arange(200))
    assert (groups.given_of == 200).sum() == groups.rows - 200
    group_of_row = torch.bucketize(groups.row_of, groups.ends.long(), right=True)
    assert torch.equal(group_of_row, matrix_of)
