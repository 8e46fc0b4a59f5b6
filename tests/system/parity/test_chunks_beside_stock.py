"""Updates of some elements after the others change no bit: not of weights, states, gradients, nor after a resume."""

import chunk_jobs as jobs
import pytest
from ranks import run_two


@pytest.mark.parametrize("case", jobs.CASES)
def test_lossless_is_stock(case):
    """In all dtypes, with loss scaling and a step that overflows, clipping, sub-groups and other optimizers."""
    for differing, sizes in run_two(jobs.beside_stock, case=case):
        assert differing == [{}, {}, {}]
        if case == "offload":
            assert not sizes  # its fp32 gradients are there already
        else:
            assert max(sizes) == jobs.CHUNK and len(sizes) > 100


def test_whole_tensors():
    for differing, sizes, whole in run_two(jobs.whole_tensors):
        assert differing == [{}, {}, {}]
        assert len(sizes) > len(whole) > 0


@pytest.mark.parametrize("store", jobs.STORES)
def test_stored_gradients(store):
    """FP8 gradients are read by ranges of a sub-group, whose tensors begin and end inside of them."""
    for differing, sizes, whole, wrong in run_two(jobs.stored, store=store):
        assert differing == [{}, {}, {}]
        assert len(sizes) > len(whole) > 0
        assert wrong == 0
