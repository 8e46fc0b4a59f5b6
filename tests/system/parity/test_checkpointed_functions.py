"""Activation checkpointing of functions over several modules, inside and outside of repeated blocks."""

import checkpointed_jobs as jobs
import pytest
from models import section
from ranks import run_two
from running import differing
from thinning import thinned

MODULE = {"gather_granularity": "module"}


def assert_same(run, expected):
    assert differing(run, expected, but=["seen"]) == {} and len(set(run.losses)) > 1 and run.weights


def assert_nothing_left(run):
    """Nor is any module running, and nothing was gathered for a backward that nobody had fetched it for."""
    assert not any(run.seen), run.seen


@pytest.mark.parametrize("fields, stock", [({}, "stock, leaves"), (MODULE, "stock")], ids=["block", "module"])
def test_lossless_is_stock(fields, stock):
    """Bit for bit stock, and after each backward all parameters are released."""
    kinds = thinned(jobs.KINDS, (True, False) if fields else (False, True))
    found = run_two(jobs.beside_plain, kinds=kinds, the_section=section("lossless", 1, **fields), plain=stock)[0]
    assert len(found) == 9
    for plain, *both in found.values():
        for lossless in both:
            assert_same(lossless, plain)
            assert_nothing_left(lossless)


@pytest.mark.parametrize(
    "recipe, fields, options",
    [
        ("zeropp", {"secondary": {"scope": "rank"}}, {}),
        ("zeropp", {"partition": "whole_tensor", **MODULE}, {}),
        ("fp8-lm", {}, {"dtype": "bf16"}),
        ("fp8-lm", {"compute": {"scaling": "per_channel"}, **MODULE}, {"dtype": "bf16"}),
        ("mxfp8", {}, {"dtype": "bf16"}),
        ("qlora", {}, {}),
        (
            "qlora",
            {"frozen": {"format": "fp8_e4m3", "double_quantize": False}, "compute": {"format": "fp8"}, **MODULE},
            {},
        ),
    ],
    ids=["hpz", "owners", "operands", "operands by row", "mxfp8", "stored", "stored operands"],
)
def test_quantized_is_itself_without_checkpointing(recipe, fields, options):
    """The same bits: what is recomputed, and what its backward reads, are the weights of the forward."""
    kinds = thinned(("twice", "nested", "of_blocks", "calls_itself", "each block"), (True, False))
    found = run_two(jobs.beside_plain, kinds=kinds, the_section=section(recipe, 1, **fields), **options)[0]
    for plain, *both in found.values():
        assert_nothing_left(plain)
        for checkpointed in both:
            assert_same(checkpointed, plain)
            assert_nothing_left(checkpointed)


FAILURES = ("recomputation", "backward")


@pytest.mark.parametrize("recipe, granularity", thinned(["lossless", "zeropp"], ["block", "module"]))
def test_a_failed_backward_leaves_nothing(recipe, granularity):
    """In the recomputation, or before it: the next steps are those of a run that never saw the batch."""
    fields = {"gather_granularity": granularity}
    for found in run_two(jobs.after_failure, recipe=recipe, failures=FAILURES, fields=fields):
        assert found.keys() == {None, *FAILURES}
        for run in found.values():
            assert_same(run, found[None])
            assert_nothing_left(run)


@pytest.mark.parametrize("recipe", ["lossless", "zeropp"])
def test_an_engine_is_destroyed_after_a_failed_backward(recipe):
    """Modules that the exception has left in use keep nothing gathered."""
    losses = run_two(jobs.engine_after_failure, recipe=recipe, failures=FAILURES)[0]
    assert len(losses) == 3 and len(set(losses.values())) == 1


def test_a_failed_backward_while_gradients_accumulate():
    """Parts of it may have been added to what was there: the next forward says so, and how to begin again."""
    for message, begun_again, expected in run_two(jobs.failure_while_accumulating):
        assert "engine.optimizer.zero_grad()" in message
        assert begun_again == expected and len(set(expected)) == 3
