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


@pytest.mark.parametrize("recipe", ["lossless", "zeropp"])
def test_gradients_rest_between_backward_and_step(recipe):
    """At the end of a forward they take no memory, and reading them after a step says why there are none."""
    for seen in run_two(jobs.gradients_at_rest, section_of=recipe, offload=False):
        for in_forward, after_backward, gradients, after_step, read in (seen[:5], seen[5:]):
            assert in_forward == after_step == 0
            assert after_backward == 2 * sum(-(-g.numel() // 2) for g in gradients.values())
            assert (
                read == "RuntimeError: zeropp_fp8: a step drops the gradients: look at them between backward and step"
            )


def test_offloaded_gradients_stay():
    """They are in DeepSpeed's buffers on the CPU."""
    for seen in run_two(jobs.gradients_at_rest, section_of="lossless", offload=True):
        assert seen[0] == seen[1] == seen[3] > 0
        assert "RuntimeError" not in str(seen[4])


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
