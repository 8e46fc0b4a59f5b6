"""The cost model's bytes of LoRA against engines on ranks: the ledger's, and what a rank holds."""

import plan_jobs as jobs
import pytest
from ranks import run_ranks
from thinning import FULL

from zeropp_fp8.plan import H200, METHODS, Cluster, Job, Lora, Model, estimate

# Every shard is whole granules of double quantization (64 * 256 elements): smaller ones would be padded.
SHAPE = {"layers": 2, "hidden": 256, "intermediate": 512, "vocab": 512}
RANK = 32
CASES = {
    "lossless": ("lossless", {}, 1),
    "zeropp": ("zeropp", {}, 1),
    "int8": ("zeropp", {"frozen": {"format": "int8"}}, 2),
    "int8-dq": ("zeropp", {"frozen": {"format": "int8", "double_quantize": True}}, 1),
    "int4": ("zeropp", {"frozen": {"format": "int4"}}, 1),
    "int4-dq": ("zeropp", {"frozen": {"format": "int4", "double_quantize": True}}, 1),
    "nf4": ("zeropp", {"frozen": {"format": "nf4"}}, 1),
    "qlora": ("qlora", {}, 2),
    "qlora-rank": ("qlora", {"secondary": {"scope": "rank"}}, 2),
}


@pytest.mark.parametrize("world, ranks_per_node", [(4, 2), (2, 1), (2, 2)])
def test_bytes_of_lora_are_those_of_engines(world, ranks_per_node):
    """In the third step; norms, which rest and travel in 16 bits, are codes to the model.

    Two ranks are two nodes in one half of the cases, and one node in the others.
    """
    names = list(CASES) if FULL or world == 4 else list(CASES)[ranks_per_node - 1 :: 2]
    of_rank_0, *_ = run_ranks(
        jobs.lora_bytes,
        world=world,
        ranks_per_node=ranks_per_node,
        cases=[CASES[name] for name in names],
        shape=SHAPE,
        rank=RANK,
    )
    nodes = world // ranks_per_node
    for name, found in zip(names, of_rank_0, strict=True):
        micro_batches = CASES[name][2]
        model, lora = Model(found["base"], SHAPE["hidden"], SHAPE["layers"], SHAPE["vocab"]), Lora(RANK)
        cluster = Cluster(nodes, ranks_per_node, 10)
        job = Job(model, cluster, 64, 32, micro_batches, kept_parameters=0, lora=lora)
        modelled = estimate(METHODS.get(f"{name}-whole") or METHODS[name], job, H200)
        assert lora.parameters(model) == pytest.approx(found["adapters"], rel=1e-3)
        assert modelled.inter_bytes == pytest.approx(found["sent"]["inter"] / nodes, rel=3e-3), name
        if name != "lossless" or nodes == 1:  # of a ring the model counts a link, the ledger the mean of the ranks
            assert modelled.intra_bytes == pytest.approx(found["sent"]["intra"] / world, rel=3e-3), name
        for held in ("weights", "states", "secondary"):
            assert getattr(modelled.memory, held) == pytest.approx(found[held], rel=3e-3), (name, held)
