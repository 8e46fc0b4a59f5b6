"""Mixtures of experts: packed ones of transformers, and modules that only some ranks call, beside stock."""

import expert_jobs as jobs
import pytest
from ranks import run_ranks, run_two
from thinning import thinned


@pytest.mark.parametrize("kind, run", thinned(jobs.KINDS, [("fp32", 1), ("bf16", 2)]))
def test_packed_experts(kind, run):
    """Bit for bit, router, shared experts and auxiliary losses included; quantized near it.

    Hidden states go to the router, to experts and past them. Stock adds their gradients in an order that depends on the
    modules that it has hooks on: with layers as leaf modules in that of blocks.
    """
    for found in run_two(jobs.beside_stock, kind=kind, dtype=run[0], accumulation=run[1]):
        assert found["differing"] == [{}, {}]
        assert found["zeropp"] == pytest.approx(found["stock"], rel=2e-2)
        assert found["zeropp-4bit"] == pytest.approx(found["stock"], rel=5e-2)


@pytest.mark.parametrize("which", jobs.CALLED)
def test_experts_that_only_some_ranks_call(which):
    for differing, quantized, stock in run_ranks(jobs.called, which=which):
        assert not differing
        assert quantized == pytest.approx(stock, rel=2e-2)
