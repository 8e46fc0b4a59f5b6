"""Another optimizer is an addition: its update goes into the table, and gets whole matrices where owners have them."""

import pytest
import update_jobs as jobs
from ranks import run_two

from zeropp_fp8.optim import Update


@pytest.mark.parametrize("split", ["none", "balance"])
def test_an_update_of_whole_matrices(split):
    """Each step is the one written out in float64, from the numbers that the engine held: fp32 weights, fp16 states.

    Its states are saved, and a run that loads them goes on bit for bit.
    """
    for weight_error, velocity_error, not_whole, losses, states, others in run_two(
        jobs.trained_and_resumed, split=split
    ):
        assert weight_error < 1e-4 and velocity_error < 2**-11
        assert not_whole == set()
        assert losses[-1] < losses[0]
        assert states == {("step", "exp_avg", "exp_avg_sq")} and not others  # the second is the first, for converters


def test_states_that_would_be_saved_by_one_name():
    with pytest.raises(TypeError, match="Two: states are saved by the names of moments, so each moment may come once"):
        type("Two", (Update,), {"states": {"one": "exp_avg", "other": "exp_avg"}})


def test_what_does_not_go_with_it():
    for slices, option in run_two(jobs.refusals):
        assert 'ConfigError: "zeropp_fp8.partition": the update of Normalized is one of whole tensors' in slices
        assert option == 'ConfigError: "momentum" must be below 1'
