"""Activation checkpointing of functions over several modules, inside and outside of repeated blocks."""

import checkpointed_jobs as jobs
import pytest
import torch
from ranks import run_ranks

MODULE = {"gather_granularity": "module"}
EARLY_STOP = [True, False]


def assert_same(run, expected):
    assert run["losses"] == expected["losses"] and len(set(run["losses"])) > 1
    assert run["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert torch.equal(run["weights"][name], weight), name


def assert_nothing_left(run):
    assert run["left"] == [] and run["running"] == 0
    assert run["outside"] == 0, "parameters were gathered for a backward that nobody had fetched them for"


@pytest.mark.parametrize("early_stop", EARLY_STOP, ids=["early stop", "to the end"])
@pytest.mark.parametrize("fields", [{}, MODULE], ids=["block", "module"])
def test_lossless_is_stock(fields, early_stop):
    """Bit for bit stock, and after each backward all parameters are released."""
    found = run_ranks(jobs.beside_stock, kinds=jobs.KINDS, fields=fields, early_stop=early_stop)[0]
    assert len(found) == 9
    for stock, lossless in found.values():
        assert_same(lossless, stock)
        assert_nothing_left(lossless)


@pytest.mark.parametrize(
    "recipe, fields, options",
    [
        ("zeropp", {"secondary": {"scope": "rank"}, "weights": {"rounding": "stochastic"}}, {}),
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
    kinds = ("twice", "nested", "of_blocks", "calls_itself", "each block")
    for early_stop in EARLY_STOP:
        found = run_ranks(
            jobs.beside_plain, kinds=kinds, recipe=recipe, fields=fields, early_stop=early_stop, **options
        )[0]
        for plain, checkpointed in found.values():
            assert_same(checkpointed, plain)
            assert_nothing_left(checkpointed)
            assert_nothing_left(plain)


@pytest.mark.parametrize("granularity", ["block", "module"])
@pytest.mark.parametrize("recipe", ["lossless", "zeropp"])
def test_a_failed_backward_leaves_nothing(recipe, granularity):
    """In the recomputation, or before it: the next steps are those of a run that never saw the batch."""
    for failure in ("recomputation", "backward"):
        fields = {"gather_granularity": granularity}
        for found in run_ranks(jobs.after_failure, recipe=recipe, failure=failure, fields=fields):
            assert found[True]["raised at"] == 1
            assert_same(found[True], found[False])
            assert found[True]["left"] == found[False]["left"] == []


@pytest.mark.parametrize("recipe", ["lossless", "zeropp"])
def test_an_engine_is_destroyed_after_a_failed_backward(recipe):
    """Modules that the exception has left in use keep nothing gathered."""
    for failure in ("recomputation", "backward"):
        after, expected = run_ranks(jobs.engine_after_failure, recipe=recipe, failure=failure)[0]
        assert after == expected


def test_a_failed_backward_while_gradients_accumulate():
    """Parts of it may have been added to what was there: the next forward says so, and how to begin again."""
    for message, begun_again, expected in run_ranks(jobs.failure_while_accumulating):
        assert "engine.optimizer.zero_grad()" in message
        assert begun_again == expected and len(set(expected)) == 3
