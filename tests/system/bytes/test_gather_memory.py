"""Memory of gathers: buffers that end with them, no copy within one node."""

import gather_memory_jobs as jobs
import pytest
import torch
from ranks import run_ranks

ONE_NODE = {"topology": {"ranks_per_node": 4}}
NO_COPY = {"secondary": {"scope": "none"}}
INT4 = {"frozen": {"format": "int4", "block_size": 16}}
IN_IT, ACROSS = "none one node: every shard is in it already", "none backward gathers between nodes again"
LORA = {"lora": True, "hidden": 64}
NUMEL = 2 * 4096 * 32 + 3 * (4 * 32 * 32 + 3 * 32 * 88 + 2 * 32) + 32  # of gather_memory_jobs.large_vocabulary


@pytest.mark.parametrize(
    "recipe, fields, options, copies, row",
    [
        ("zeropp", ONE_NODE, {}, False, IN_IT),
        ("zeropp", NO_COPY, {}, False, ACROSS),
        ("zeropp", {}, {}, True, f"added to {NUMEL} one copy in 2 rank(s); backward stays there"),
        ("lossless", {"topology": {"ranks_per_node": 1}}, {}, False, ACROSS),
        ("zeropp", {"partition": "whole_tensor", **NO_COPY}, {}, False, ACROSS),
        ("zeropp", {**INT4, **ONE_NODE}, LORA, False, IN_IT),
        ("zeropp", INT4, LORA, True, "added to"),
    ],
    ids=["one node", "no copy", "two nodes", "a rank a node", "owners", "stored", "stored, two nodes"],
)
def test_gathers_leave_no_buffer(recipe, fields, options, copies, row):
    """Activations use the memory; only copies stay."""
    ranks = run_ranks(jobs.buffers_after_steps, recipe=recipe, fields=fields, limits="tiny", **options)
    for made, left, found, _ in ranks:
        assert made > 8 and left == 0
        assert (found > 0) == copies
    assert ranks[0][-1].startswith(row)


@pytest.mark.parametrize(
    "recipe, fields",
    [("zeropp", {}), ("zeropp-4bit", {"weights": {"block_size": 64}}), ("zeropp", {"partition": "whole_tensor"})],
    ids=["int8", "int4", "owners"],
)
def test_one_node_keeps_no_copy(recipe, fields):
    """A copy of the node's would be what each rank sends; one that fewer ranks share is another thing, and stays."""
    names = ["none", "node"] if fields else ["none", "node", 4, 2, "rank"]
    for found in run_ranks(jobs.scopes, recipe=recipe, fields=fields, names=names, node_size=4):
        losses, ranks, held, sent = found["none"]
        assert (ranks, held) == (None, 0) and len(set(losses)) == 3
        assert sent["weights_backward"]["inter"] == 0 < sent["weights_backward"]["intra"]
        for scope, (others, sharing, held, also_sent) in found.items():
            assert others == losses and sharing == {2: 2, "rank": 1}.get(scope), scope
            assert (held > 0) == (sharing is not None) == (also_sent != sent), scope


@pytest.mark.parametrize("node_size", [4, 2])
def test_all_gathers_between_two_steps_bring_the_same(node_size):
    """Every forward, backward and evaluation between two steps sees the same bits on every rank."""
    fields = {"weights": {"format": "int4"}, "topology": {"ranks_per_node": node_size}}
    ranks = run_ranks(jobs.values_of_all_gathers, fields=fields)
    for name, steps in ranks[0].items():
        for step, values in enumerate(steps):
            assert len(values) >= 6, "two micro-batches, each with an evaluation, a forward and a backward"
            same = [value for rank in ranks for value in rank[name][step]]
            assert all(torch.equal(value, values[0]) for value in same), (name, step)
        assert torch.equal(steps[0][0], steps[1][0]) == (name == "layer 0"), "what is frozen is not rounded again"


@pytest.mark.parametrize(
    "fields",
    [
        ONE_NODE,
        {},
        NO_COPY,
        {"topology": {"ranks_per_node": 1}, **NO_COPY},
    ],
    ids=["one node", "two nodes", "no copy", "a rank a node"],
)
def test_buffers_for_one_gather_end_with_it(fields):
    """Also where nobody waits for what was fetched ahead."""
    for log in run_ranks(jobs.buffers_end, fields=fields):
        assert log["made in two steps"] > 4, "two units, each in forwards and backwards"
        assert log["under way"] > 0 and log["under way again"] > 0, "the case did not occur"
        assert log["cancelled"] == log["first hops cancelled"] == log["after the end"] == 0
