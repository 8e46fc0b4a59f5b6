"""Gradients of any number of backwards over any forwards add up, as in plain torch, whoever calls backward."""

from itertools import product

import backward_jobs as jobs
import deepspeed
import pytest
from packaging.version import Version
from ranks import run_ranks, run_two
from thinning import FULL, latin_square

MODULE = {"gather_granularity": "module"}
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
WORLD = {"gradients": {"accumulate_in": "world"}}
EXACT = [
    {"recipe": "lossless"},
    {"recipe": "lossless", "fields": MODULE},
    {"recipe": "lossless", "fields": {"gather_granularity": "parameter"}},
    {"recipe": "lossless", **OFFLOAD},
    {"recipe": "lossless", "fields": MODULE, **OFFLOAD},
]
# Whole tensors need DeepSpeed 0.19.3, and are refused before.
WHOLE = [
    {"recipe": "zeropp", "fields": {"partition": "whole_tensor", **WORLD}},
    {"recipe": "fp8-lm", "dtype": "bf16"},
    {"recipe": "fp8-lm-zeropp", "dtype": "bf16"},
]
# Four gradients in a step at least: without one of them the norm is off by 0.25 and more.
ROUNDED = [
    {"recipe": "zeropp"},
    {"recipe": "zeropp", "fields": {"gradients": {"error_feedback": True}}},
    {"recipe": "zeropp", **OFFLOAD},
    {"recipe": "zeropp", "dtype": "fp16"},
    {"recipe": "zeropp-exact", "fields": WORLD},
    {"recipe": "fp8-lm-o1", "dtype": "bf16"},
    {"recipe": "fp8-lm-o2", "dtype": "bf16", "fields": WORLD},
    {"recipe": "mxfp8", "dtype": "bf16"},
    {"recipe": "qlora", "fields": {"gradients": {"intra_format": "int8", "inter_format": "int8"}}},
    *(WHOLE if Version(deepspeed.__version__) >= Version("0.19.3") else []),
]
TENSORS = pytest.mark.skipif(not jobs.takes_tensors(), reason="this DeepSpeed knows engine.backward(loss) alone")
CHECKPOINTING = ("none", "reentrant", "non-reentrant")


def cases(kinds_and_seeds):
    return [
        {**kind, "seed": seed, "checkpointing": CHECKPOINTING[seed % 3], "accumulation": 1 + seed % 2}
        for kind, seed in kinds_and_seeds
    ]


def test_what_rounds_nothing_has_torchs_gradients():
    these = cases(product(EXACT, range(4)))
    for case, errors in zip(these, run_two(jobs.run_programs, cases=these)[0]):
        assert max(errors) < 2e-4, (case, errors)  # weights that have moved by a gradient have lost some of its bits


# Every two of topology, kind and program meet.
NODES = {(2, 1): 0.22, (2, 2): 0.12, (4, 2): 0.22}
MET = list(product(NODES, ROUNDED, range(3))) if FULL else latin_square(NODES, ROUNDED, range(3))


@pytest.mark.parametrize("nodes", NODES)
def test_what_rounds_is_near_them(nodes):
    these, limit = cases((kind, seed) for met, kind, seed in MET if met == nodes), NODES[nodes]
    found = run_ranks(jobs.run_programs, world=nodes[0], ranks_per_node=nodes[1], cases=these)[0]
    assert len(found) >= len(ROUNDED)
    for case, errors in zip(these, found):
        assert max(errors) < limit, (case, errors)


@TENSORS
@pytest.mark.parametrize(
    "recipe, fields, limit",
    [("lossless", {}, 1e-5), ("lossless", MODULE, 1e-5), ("zeropp", {}, 0.2), ("fp8-lm-o1", {}, 0.1)],
    ids=["block", "module", "zeropp", "fp8-lm-o1"],
)
def test_odd_ways(recipe, fields, limit):
    """Modules by themselves, exceptions, gradients of outputs, a look between: and the step after them is right too."""
    found = run_two(jobs.odd_ones, recipe=recipe, fields=fields)[0]
    assert found.keys() == set(jobs.ODD)
    assert {name: error for name, error in found.items() if not error < limit} == {}


@TENSORS
@pytest.mark.parametrize(
    "recipe, fields, limit", [("lossless", {}, 1e-5), ("lossless", MODULE, 1e-5), ("zeropp", {}, 0.2)]
)
def test_a_loss_that_goes_backward_in_the_forward(recipe, fields, limit):
    assert max(run_two(jobs.tiled, recipe=recipe, fields=fields)[0]) < limit
