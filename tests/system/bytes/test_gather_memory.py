"""Memory of gathers: rings as large as blocks, buffers for one gather of what is larger, no copy within one node."""

import gather_memory_jobs as jobs
import pytest
import torch
from ranks import run_ranks

ONE_NODE = {"topology": {"ranks_per_node": 4}}
NO_COPY = {"secondary": {"scope": "none"}}
EMBEDDINGS = ["lm_head.weight", "model.embed_tokens.weight"]
WORLD = 4
# A block of gather_memory_jobs.large_vocabulary: 4 projections of 32 x 32, 3 of 32 x 88, 2 norms; an embedding is
# 4096 x 32.
BLOCK, EMBEDDING = 4 * 32 * 32 + 3 * 32 * 88 + 2 * 32, 4096 * 32
NUMEL = 2 * EMBEDDING + 3 * BLOCK + 32


@pytest.mark.parametrize(
    "recipe, fields, bytes_each, ranks_held, row",
    [
        ("zeropp", ONE_NODE, 1.1, 1, "none one node: every shard is in it already"),
        ("zeropp", NO_COPY, 1.1, 2, "none backward gathers cross the network again"),
        ("zeropp", {}, 1.1, 0, f"as received {NUMEL} one copy in 2 rank(s); backward stays there"),
        ("lossless", {"topology": {"ranks_per_node": 1}}, 4.1, 4, "none backward gathers cross the network again"),
        ("zeropp", {"partition": "whole_tensor", **NO_COPY}, 1.1, 4, "none backward gathers cross the network again"),
    ],
    ids=["one node", "no copy", "two nodes", "a rank a node", "owners"],
)
def test_rings_are_as_large_as_blocks(recipe, fields, bytes_each, ranks_held, row):
    """Embedding and head leave nothing behind, and change no bit.

    `bytes_each`: of a parameter on the wire, with scales and padding. `ranks_held`: whose payloads the first hops bring
    at most; with owners one rank may have all of a block.
    """
    ranks = run_ranks(jobs.runs, recipe=recipe, fields=fields, buffers=["as chosen", "none"], limits="tiny")
    assert " ".join(ranks[0]["none"]["row"][0]) == row
    for found in ranks:
        chosen, ring = found["as chosen"], found["none"]
        assert chosen["outsized"] == EMBEDDINGS and chosen["block numel"] == BLOCK
        block = BLOCK * bytes_each
        # A node of one rank has no last hop.
        assert (chosen["gathered ring"] > 0) == (fields.get("topology") != {"ranks_per_node": 1})
        assert chosen["gathered ring"] <= 2 * block
        assert chosen["held ring"] <= 3 * block * ranks_held / WORLD
        assert (chosen["held ring"] > 0) == (ranks_held > 0)
        assert ring["outsized"] == [] and ring["not given back"] == chosen["not given back"] == 0
        assert ring["gathered ring"] + ring["held ring"] > EMBEDDING, "the case did not occur"
        assert chosen["losses"] == ring["losses"] and len(set(chosen["losses"])) == 2
        # Copies stay, other results of the first hops do not.
        assert (chosen["held"] > 0) == (ring["held"] > 0) == (ranks_held == 0)


@pytest.mark.parametrize("fields", [ONE_NODE, {}], ids=["one node", "two nodes"])
def test_stored_blocks_and_a_large_embedding(fields):
    """LoRA on INT4: adapters and norms are units too, more than blocks, and stored codes go out as they rest."""
    more = {"frozen": {"format": "int4", "block_size": 16}, **fields}
    buffers, options = ["as chosen", "none"], {"lora": True, "limits": "tiny", "hidden": 64}
    for found in run_ranks(jobs.runs, recipe="zeropp", fields=more, buffers=buffers, **options):
        chosen, ring = found["as chosen"], found["none"]
        assert [name.removeprefix("base_model.model.") for name in chosen["outsized"]] == EMBEDDINGS
        block = chosen["block numel"] * 0.75  # int4, two bytes per block of 16, padding of small tensors
        # More than two buffers: a block's three units are under way at once.
        assert 0 < chosen["largest"] <= block and chosen["held ring"] < 4096 * 64 / WORLD
        assert ring["largest"] > 4096 * 64, "the case did not occur"
        assert chosen["losses"] == ring["losses"] and len(set(ring["losses"])) == 2


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


def test_operands_in_a_buffer_for_one_gather():
    """They keep it while modules compute, and no longer."""
    for found in run_ranks(jobs.operands_in_a_buffer, scaling="current"):
        losses, inside, _, lent = found["none"]
        assert not any(inside) and lent == 0
        assert found["all"][0] == losses and len(set(losses)) == 2
        assert found["all"][1] and all(found["all"][1]), "a copy was made"
        assert found["all"][2:] == (0, 0)
