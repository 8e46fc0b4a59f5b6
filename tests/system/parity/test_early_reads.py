"""Parameters that others read than the module that has them, before or after it runs: the gradient is the sum."""

import early_read_jobs as jobs
import pytest
from ranks import run_two
from running import differing

MODULE = {"gather_granularity": "module"}
# Of the way that a weight goes in two steps. A gradient that is lost, or counted twice, is half of it or more.
LOSSLESS, QUANTIZED = 1e-4, 0.2


@pytest.mark.parametrize("granularity", ["block", "module"])
def test_lossless_is_stock(granularity):
    """Bit for bit, and what one process computes: no zeros go in the place of a gradient that is still to come."""
    found = run_two(jobs.beside_stock, kinds=jobs.KINDS, granularity=granularity)[0]
    for kind, (stock, lossless) in found.items():
        assert differing(lossless, stock, but=["bytes"]) == {}, kind
        assert_is_reference(lossless, kind, LOSSLESS)


def assert_is_reference(run, kind, limit, **options):
    """Every weight has moved as in one process, up to `limit` of the way."""
    start, weights = jobs.reference(kind, **options)
    for name, weight in weights.items():
        way = (weight - start[name]).norm()
        assert way > 0 and (run.weights[name] - weight).norm() <= limit * way, (kind, name)


@pytest.mark.parametrize(
    "recipe, fields",
    [
        ("zeropp", {}),
        ("zeropp", {"partition": "whole_tensor", **MODULE}),
        ("fp8-lm-o1", {"compute": {"format": "none"}}),
    ],
    ids=["slices", "owners", "shared scales"],
)
def test_each_gradient_is_sent_once(recipe, fields):
    """As many bytes as where nothing is read early; a second reduction would be one more message."""
    int8 = {"gradients": {"inter_format": "int8"}} if recipe == "zeropp" else {}
    fields = {"weights": {"format": "none"}, **int8, **fields}
    found = run_two(jobs.reductions, recipe=recipe, kinds=jobs.KINDS[:-1], fields=fields)[0]
    for kind, run in found.items():
        assert run.bytes["gradients"] == found[None].bytes["gradients"], kind
        assert_is_reference(run, kind, QUANTIZED)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("recipe, limit", [("lossless", LOSSLESS), ("zeropp", QUANTIZED)])
def test_ranks_with_different_unused_parameters(recipe, limit, checkpointed):
    """Blocks of which ranks use different parts, and a weight read before all of them: no hang, and the mean."""
    int8 = {"gradients": {"inter_format": "int8"}} if recipe == "zeropp" else {}
    fields = {"weights": {"format": "none"}, **int8}
    kinds = ("parent", "regularizer", "early and late")
    options = {"kinds": kinds, "checkpointed": checkpointed, "fields": fields}
    found = run_two(jobs.with_unequal_ranks, recipe=recipe, **options)[0]
    for kind, run in found.items():
        assert_is_reference(run, kind, limit, unequal=True)


def test_ranks_with_different_unused_parameters_of_a_model_that_later_engines_have():
    """The backward's functions are the last engine's; the one that trains has to hear of blocks that end."""
    for run in run_two(jobs.with_unequal_ranks, recipe="lossless", kinds=["parent"], others=2):
        assert_is_reference(run["parent"], "parent", LOSSLESS, unequal=True)
