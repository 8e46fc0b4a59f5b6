"""Memory after engine.destroy(): nothing of an engine that is dropped, DeepSpeed's part of one that is kept."""

import freed_jobs as jobs
import pytest
from ranks import run_ranks, run_two

KINDS = ["lossless", "zeropp", "zeropp, rank's copy", "zeropp-4bit", "fp8-lm", jobs.QLORA, jobs.FROZEN]


@pytest.fixture(scope="module")
def left():
    return run_two(jobs.left_by, kinds=[jobs.STOCK, *KINDS], timeout=400)


def check_dropped(parts, grown):
    assert parts == [[], []]
    assert grown[1] == 0  # the first may fill tables that all engines share


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_of_an_engine_that_is_dropped(kind, left):
    for rank in left:
        check_dropped(*rank[kind][0])


def test_nothing_is_left_of_a_model_that_was_made_under_zero_init():
    for rank in run_two(jobs.made_under_zero_init, kinds=["zeropp", jobs.QLORA]):
        for found in rank.values():
            check_dropped(*found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_kept_keeps_its_weights_only(kind, left):
    for rank in left:
        parts, held, weights = rank[kind][1]
        assert parts == ["model", "parameter"]
        assert held == weights


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_is_kept_has_no_buffers_of_the_plugin(kind, left):
    for rank in left:
        parts, before, after = rank[kind][2]
        assert not {"reducer", "store", "compressed"} & set(parts)
        assert after == before if kind == "lossless" else after < before, "lossless keeps no buffer between steps"
        if kind not in (jobs.QLORA, jobs.FROZEN):  # of other numbers
            assert after <= rank[jobs.STOCK][2][2] + 128  # bytes


def test_a_model_runs_without_the_engine_that_it_had():
    """As after the destroy() of DeepSpeed's engine; and a later engine does not find what lets it."""
    for losses, on_stack, still_alone in run_two(jobs.run_alone, kind="lossless"):
        assert losses[1] == losses[2] == pytest.approx(losses[0], rel=1e-6)
        assert on_stack == 0
        assert not still_alone


@pytest.mark.parametrize("kind", ["zeropp-4bit", "fp8-lm", jobs.QLORA, jobs.FROZEN])
def test_an_optimizer_is_destroyed_before_its_engine(kind):
    assert run_ranks(jobs.destroyed_twice, world=2, kind=kind) == [0, 0]


def test_what_is_freed_says_so():
    for said in run_two(jobs.said_by_what_is_freed):
        assert len(said) == 2 and all("engine.destroy() has freed" in line for line in said)
