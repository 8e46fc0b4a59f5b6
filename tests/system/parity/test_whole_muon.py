"""Muon on owners of whole matrices: each step is the one written out, in recipes with other formats; and it resumes."""

import pytest
import whole_muon_jobs as jobs
from ranks import run_two

# Of a change of a matrix, and of the largest element of a momentum. Gradients of few tokens have singular values of
# 1e-7 of the largest, which are fp32's rounding; the iteration makes them 3.44^5 = 480 times as large.
EXACT, COARSE = (1e-3, 1e-6), (1.0, 2**-3)


@pytest.mark.parametrize("name", jobs.SECTIONS)
def test_steps_are_those_written_out(name):
    """With fp32 states to fp32's digits; in FP8-LM's formats within a step of theirs."""
    of_weight, of_momentum = COARSE if name == "fp8-lm" else EXACT
    for found in run_two(jobs.trained_and_resumed, names=[name]):
        weight_error, momentum_error, losses, others = found[name]
        assert weight_error < of_weight and momentum_error < of_momentum, (weight_error, momentum_error)
        assert losses[-1] < losses[0] and not others


def test_what_does_not_go_with_it():
    for cut, slices, vectors in run_two(jobs.refusals):
        assert vectors.startswith("ConfigError: (64,) is no matrix; put what Muon does not update into a param group")
        for said in (cut, slices):
            assert said.startswith(
                'ConfigError: "zeropp_fp8.partition": the update of Muon is one of whole tensors; set'
            )
