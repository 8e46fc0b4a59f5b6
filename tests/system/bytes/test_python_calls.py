"""How much a block costs in Python: the host of a fast GPU has little time for it."""

import call_jobs as jobs
import pytest
from ranks import run_two

# Functions of this project's zero/ and of DeepSpeed that one more block calls in a step: what was counted and 10 %.
# `zeropp` sends differences, as `zeropp-exact` does, and `zeropp-whole` sends all codes.
MOST = {"zeropp": 380, "zeropp-whole": 365, "zeropp-4bit": 365, "zeropp-exact": 380, "fp8-lm": 595, "lossless": 365}


@pytest.fixture(scope="module")
def found():
    return run_two(jobs.of_a_block, recipes=list(MOST))


@pytest.mark.parametrize("recipe", MOST)
def test_calls_of_a_block(found, recipe):
    for rank in found:
        calls, each = rank[recipe]
        assert calls <= MOST[recipe], sorted(each.items(), key=lambda item: -item[1])[:20]


def test_differences_cost_little_more_than_codes(found):
    for rank in found:
        for recipe in ("zeropp", "zeropp-exact"):
            calls, each = rank[recipe]
            assert calls <= 1.1 * rank["zeropp-4bit"][0]
            assert each["difference.add"] == 2, "a unit's, and that of its rows; else it sends none"
            assert "hops._agree" not in each, "a message for each block"


def test_what_is_not_called_for_each_parameter(found):
    """A block of nine parameters: a gradient each, and what DeepSpeed does as it reads them."""
    for rank in found:
        _, each = rank["zeropp"]
        assert each["order.is_ready"] == 9 and "sharded.set_full" not in each
        assert "base_optimizer.update_hook_state_and_maybe_run_epilogue" not in each
        assert "placement.ranges" not in each and "route.format_of" not in each


def test_a_step_without_a_sample():
    """Numerics cost three calls of a small model's 14 thousand between samples, one of which was made before."""
    three = ("sample.gradients_ready", "sample.step_ended", "sample._begin_if_due")
    for rank in run_two(jobs.of_numerics, recipes=["zeropp", "fp8-lm"]):
        for recipe, (calls, more) in rank.items():
            found = {name: count for name, count in more.items() if name.startswith("sample.")}
            assert found == dict.fromkeys(three, 1), recipe
            # The rest is chance: a collective that has ended early is seen to by this thread, else by gloo's.
            assert more.total() < 0.01 * calls, (recipe, calls, more)
