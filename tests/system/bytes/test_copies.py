"""Copies of the codes on each rank, of as many units as memory allows: all that changes is what is sent again."""

import re

import copy_jobs as jobs
import pytest
import torch
from ranks import run_ranks, run_two

from zeropp_fp8.config import resolve
from zeropp_fp8.plan import METHODS, Cluster, Job, Model, memory_per_gpu

# models.llama(): embedding, two blocks, norm and head, of 16,640, 46,848 (twice), 256 and 16,640 bytes on two ranks.
SOME, FEW = 70_000, 20_000
ALL, NONE = {"memory_gb": "all"}, {"memory_gb": 0.0}
LIMITS = [ALL, {"memory_gb": "auto"}, {"memory_gb": SOME / 1e9}, {"memory_gb": FEW / 1e9}, NONE]


def assert_same(run, expected):
    assert run["losses"] == expected["losses"] and len(set(run["losses"])) > 2
    for name, weight in expected["weights"].items():
        assert torch.equal(run["weights"][name], weight), name


def assert_bytes(run, accumulation, ranks):
    """Weights that are kept are gathered once per step, others twice per micro-batch."""
    share = (ranks - 1) / ranks
    others = run["all bytes"] - run["kept bytes"]
    assert run["bytes"] == pytest.approx(share * (run["kept bytes"] + 2 * accumulation * others), rel=1e-6)
    assert run["held"] == run["kept bytes"]


@pytest.fixture(scope="module")
def limited():
    """By micro-batches: for each rank, a run with each of the limits."""
    limits = [{"scope": "rank", **LIMITS[0]}, *LIMITS[1:]]
    cases = {k: [{"secondary": limit, "accumulation": k} for limit in limits] for k in (1, 3)}
    return {k: run_two(jobs.runs, cases=of_k) for k, of_k in cases.items()}


@pytest.mark.parametrize("accumulation", [1, 3])
def test_memory_changes_bytes_and_nothing_else(limited, accumulation):
    """Kept copies are sent once per step, whatever the number of micro-batches."""
    for found in limited[accumulation]:
        every, auto, some, few, none = found
        assert every["kept"] == auto["kept"] == [0, 1, 2, 3, 4] and none["kept"] == []
        assert some["kept"] == [0, 1, 3], "the embedding, one block, and what is small enough behind it"
        assert few["kept"] == [0, 3]
        assert 0 < few["kept bytes"] <= FEW and few["kept bytes"] < some["kept bytes"] <= SOME
        for run in found:
            assert_same(run, every)
            assert_bytes(run, accumulation, ranks=2)
            assert run["residuals"] == run["expected residuals"] > 0


def test_bytes_of_weights_do_not_depend_on_micro_batches(limited):
    for once, thrice in zip(limited[1], limited[3]):
        assert [run["bytes"] for run in once[:2]] == [run["bytes"] for run in thrice[:2]] and once[1]["bytes"] > 0


@pytest.mark.parametrize(
    "case",
    [
        {"recipe": "zeropp", "secondary": {"scope": "node"}},
        {"recipe": "zeropp", "secondary": {"scope": "rank"}},
        {"recipe": "fp8-lm-zeropp", "secondary": {"scope": "node"}, "fields": {"compute": {"min_features": 16}}},
        {"recipe": "zeropp", "secondary": {"scope": "rank"}, "fields": {"partition": "whole_tensor"}},
        {"recipe": "lossless", "secondary": {"scope": "node"}},
        {"recipe": "mxfp8", "secondary": {"scope": "rank"}},
    ],
    ids=["node", "rank", "owners in FP8", "owners", "lossless", "mxfp8"],
)
def test_some_copies_on_two_nodes_of_two(case):
    """Other scopes and kinds of units, in FP8 operands too."""
    cases = [{**case, "secondary": {**case["secondary"], **limit}} for limit in (ALL, {"memory_gb": 4e-5}, NONE)]
    ranks = run_ranks(jobs.runs, cases=cases)
    for every, some, none in ranks:
        assert 0 < len(some["kept"]) < len(every["kept"]) and none["kept"] == []
        for run in (some, none):
            assert_same(run, every)
            assert run["held"] == run["kept bytes"]
    # An owner may have nothing of a unit that is kept.
    every, some, none = (sum(run["bytes"] for run in case) for case in zip(*ranks))
    assert every < some < none


def test_frozen_weights_come_first():
    """Their copies outlive steps: a kept byte saves two gathers a step."""
    cases = [
        {"secondary": {"memory_gb": SOME / 1e9}, "frozen": ["layers.1", "lm_head"]},
        {"secondary": {"memory_gb": 0.0}, "frozen": ["layers.1", "lm_head"]},
    ]
    for some, none in run_two(jobs.runs, cases=cases):
        assert some["frozen"] == [2, 4] and some["kept"] == [2, 3, 4]
        assert_same(some, none)
        trained = some["kept bytes"] - some["frozen bytes"]
        others = some["all bytes"] - some["kept bytes"]
        assert some["bytes"] == pytest.approx((trained + 2 * others) / 2, rel=1e-6)


def test_stored_codes():
    """LoRA on stored codes: those of blocks are kept before the adapters' own."""
    fields = {"frozen": {"format": "int8", "block_size": 32, "modules": "frozen"}}
    cases = [
        {"secondary": {"memory_gb": memory}, "fields": fields, "frozen": ["layers"]} for memory in ("auto", 6e-5, 0.0)
    ]
    for every, some, none in run_two(jobs.runs, cases=cases):
        assert 0 < len(some["kept"]) < len(every["kept"])
        for run in (some, none):
            assert_same(run, every)


def test_the_rank_with_least_memory_decides():
    """ "auto" leaves a quarter of the device's 4 MB and what residuals will take; all ranks agree."""
    for kept, _ in run_two(jobs.with_memory, available=[9_000_000, 9_000_000], secondary=ALL | {"memory_gb": "auto"}):
        assert kept == [True] * 5
    margin = 1_000_000
    for least, expected in ((margin, [False] * 5), (margin + 200_000 + SOME, [True, True, False, True, False])):
        pair = run_two(jobs.with_memory, available=[9_000_000, least], secondary={"memory_gb": "auto"})
        assert pair[0][0] == pair[1][0]
        assert sum(pair[0][0]) <= sum(expected) and pair[0][0][2] is expected[2]
    assert "gathered each time" in pair[0][1] and "from memory_gb auto" in pair[0][1]


def test_memory_that_is_not_there_is_refused_on_every_rank():
    for message, table in run_two(jobs.with_memory, available=[9_000_000, 150_000], secondary={"memory_gb": 1.0}):
        assert table is None
        for part in (
            '"zeropp_fp8.secondary.memory_gb": 1',
            "shards take 0.000126 GB on each rank, and a rank has 0 GB",
            'or to "detect"',
        ):
            assert part in message
    for message, (again, never) in run_two(jobs.refused_and_right_again, available=1000):
        assert "memory_gb" in message and again == never


@pytest.mark.parametrize("secondary", LIMITS[1:], ids=["auto", "some", "few", "none"])
def test_weights_written_from_outside(secondary):
    for before, after, expected in run_two(jobs.written_from_outside, secondary=secondary):
        assert after == expected and before != after


def test_an_engine_that_only_evaluates():
    for losses, kept, sent in run_two(jobs.without_an_optimizer, secondary={"memory_gb": "auto"}):
        assert kept == 5 and sent == 0 and losses[0] == losses[1]
    for losses, kept, sent in run_two(jobs.without_an_optimizer, secondary=NONE):
        assert kept == 0 and sent > 0 and losses[0] == losses[1]


def test_generation_from_some_copies():
    found = [run_two(jobs.generated, secondary=limit)[0] for limit in (LIMITS[1], LIMITS[2])]
    assert found[0] == found[1] and found[0]["codes"] == found[0]["sharded"] == found[0]["values"]


def test_the_start_table():
    _, table = run_two(jobs.with_memory, available=[9_000_000] * 2, secondary={"memory_gb": SOME / 1e9})[0]
    assert re.search(r"secondary shard +as received +\d+  one copy in 1 rank\(s\); backward stays there", table)
    assert re.search(r"gathered each time +\d+  beyond 7e-05 GB per rank, from memory_gb 7e-05", table)
    assert re.search(r"error feedback +int8 \(block 128\) +124224  what the hop between nodes drops: 0\.0", table)
    assert re.search(r"gradients within nodes +- +one rank on this level", table)
    assert re.search(r"weights backward +0\.0\d+ +0\.000", table)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_plan_counts_as_engines_do(limited, micro_batches):
    """Bytes of weights and what stays, with all copies and with some; up to norms and padding."""
    model, method = Model(124_224, 64, 2, 256), METHODS["zeropp-pcie-whole"]
    for run in (run for found in limited[micro_batches] for run in found[1:]):
        cluster, kept = Cluster(2, 1, 10), run["kept bytes"]
        job = Job(model, cluster, 32, micro_batches=micro_batches, kept_parameters=0, copies=kept)
        modelled = memory_per_gpu(method, job)
        passes = [method.forward_traffic(job, place == 0) for place in range(micro_batches)]
        passes += [method.backward_traffic(job)] * micro_batches
        assert sum(traffic.inter for traffic in passes) == pytest.approx(run["bytes"], rel=0.02)
        assert modelled.secondary == pytest.approx(kept, rel=0.02)
        assert modelled.residuals == pytest.approx(run["residuals"], rel=0.02)


def test_the_recipe():
    config = resolve({"zero_optimization": {"stage": 3}, "zeropp_fp8": {"recipe": "zeropp-pcie"}})
    assert config.topology.ranks_per_node == 1 and config.secondary.scope == "rank"
    assert config.gradients.error_feedback and config.secondary.memory_gb == "auto"
