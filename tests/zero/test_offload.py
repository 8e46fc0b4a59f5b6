"""Telling a recomputation that only saves from forwards whose own graph goes backward."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from zeropp_fp8.zero.offload import _only_saves


@pytest.fixture
def run():
    """Backward through a function that calls `look` as a module would, in the ways that the tests name."""
    seen = []

    def function(x):
        seen.append(_only_saves())
        return (x.sin() * x).exp()

    def backward(forward):
        seen.clear()
        forward(function, torch.randn(3, requires_grad=True)).sum().backward()
        return list(seen)

    return backward


@pytest.mark.parametrize("early_stop", [True, False])
def test_non_reentrant(run, early_stop):
    with set_checkpoint_early_stop(early_stop):
        assert run(lambda f, x: checkpoint(f, x, use_reentrant=False)) == [False, True]


def test_reentrant(run):
    """The second run builds the graph of the backward."""
    assert run(lambda f, x: checkpoint(f, x, use_reentrant=True)) == [False, False]


def test_plain(run):
    assert run(lambda f, x: f(x)) == [False]


def test_hooks_of_others(run):
    """Saved tensors on the CPU, all the time: reentrant checkpointing keeps its meaning."""
    with torch.autograd.graph.save_on_cpu():
        assert run(lambda f, x: checkpoint(f, x, use_reentrant=True)) == [False, False]


def test_non_reentrant_in_reentrant(run):
    """Three runs: in forward, in the recomputation that builds the graph, and in the one inside of its backward."""

    def inner(function, x):
        return checkpoint(function, x, use_reentrant=False)

    assert run(lambda f, x: checkpoint(inner, f, x, use_reentrant=True)) == [False, False, True]
