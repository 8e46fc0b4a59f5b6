"""Experts that DeepSpeed's AutoEP deals out to ranks, on gloo: beside its own ZeRO-3, and what the wire then has."""

import functools

import expert_parallel_jobs as jobs
import pytest
from ranks import run_ranks, run_two
from used_expert_jobs import checkpointed

pytest.importorskip("deepspeed.module_inject.auto_ep_layer")
NODES = [1, 2, 4]  # ranks of each, of four
EXPERTS = [2, 4]  # ranks that experts are dealt out to


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("ranks_per_node", NODES)
def test_lossless_is_stock_bit_for_bit(experts, ranks_per_node):
    assert run_ranks(jobs.beside_stock, ranks_per_node=ranks_per_node, experts=experts) == [{}] * 4


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "Mixtral"},
        {"how": "accumulated"},
        {"how": "offload_optimizer"},
        {"how": "offload_param"},
        {"zero_init": True},
        {"adapt": functools.partial(checkpointed, True)},
        {"adapt": functools.partial(checkpointed, False)},
    ],
    ids=["Mixtral", "accumulated", "offload_optimizer", "offload_param", "zero.Init", "reentrant", "not reentrant"],
)
def test_lossless_in_other_ways(options):
    assert run_ranks(jobs.beside_stock, **options) == [{}] * 4


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("ranks_per_node", NODES)
def test_recipes_train_like_stock(ranks_per_node, experts):
    """In few bits, with nothing between nodes in backward but gradients and tokens."""
    recipes = ["zeropp", "zeropp-4bit", "zeropp-exact"]
    for (stock, _), *found in run_ranks(jobs.recipes, ranks_per_node=ranks_per_node, chosen=recipes, experts=experts):
        for losses, sent in found:
            assert losses == pytest.approx(stock, rel=1e-2)
            assert losses != stock or ranks_per_node == 4
            assert sent["weights_backward"]["inter"] == 0
            for kind in ("weights_forward", "gradients", "activations"):
                crosses = ranks_per_node < 4 and (kind != "activations" or experts > ranks_per_node)
                assert (sent[kind]["inter"] > 0) == crosses, kind


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("granularity", ["module", "parameter"])
def test_gradients_of_experts_are_not_joined_with_others(granularity, experts):
    """Outside units of blocks, where neighbours share a message: experts are reduced over other ranks."""
    fields = {"gather_granularity": granularity}
    for (stock, _), (losses, _) in run_ranks(
        jobs.recipes, ranks_per_node=2, chosen=["zeropp"], experts=experts, fields=fields
    ):
        assert losses == pytest.approx(stock, rel=1e-2) and losses != stock


@pytest.mark.parametrize("experts, ranks_per_node", [(2, 2), (2, 1), (4, 2)])
def test_numbers_of_gradients_of_experts(experts, ranks_per_node):
    """A sample is taken of experts as of other weights. Experts of one rank alone are reduced exactly."""
    samples = run_ranks(jobs.sampled, ranks_per_node=ranks_per_node, experts=experts)[0]
    for rows in samples:
        of_experts = {row["kind"]: row["snr_db"] for row in rows if "experts" in row["layer"]}
        if experts == 4:
            assert of_experts["gradients"] is None
        else:
            assert of_experts["gradients"] == pytest.approx(18, abs=4)
        assert all(row["snr_db"] is not None for row in rows if "q_proj" in row["layer"])


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize(
    "fields, config",
    [({"secondary": {"scope": 2}}, {}), ({}, {"zero_optimization": {"offload_param": {"device": "cpu"}}})],
    ids=["shared by 2", "offload_param"],
)
def test_copies_and_offload(experts, fields, config):
    """Experts of one rank alone are neither sent nor rounded, wherever they are kept."""
    options = {"chosen": ["zeropp"], "experts": experts, "fields": fields, "config": config}
    for (stock, _), (losses, sent) in run_ranks(jobs.recipes, ranks_per_node=4, **options):
        assert losses == pytest.approx(stock, rel=1e-2)
        assert sent["weights_forward"]["intra"] > 0


@pytest.mark.parametrize("recipe", ["zeropp", "zeropp-exact"])
@pytest.mark.parametrize("experts", EXPERTS)
def test_differences_change_no_bit(recipe, experts):
    runs = run_ranks(jobs.whole_and_differences, ranks_per_node=1, recipe=recipe, experts=experts)
    for found, whole, differences in runs:
        assert found == {}
        assert differences["weights_forward"]["inter"] < whole["weights_forward"]["inter"]


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("ranks_per_node", NODES)
def test_micro_batches(experts, ranks_per_node):
    for (in_node, once), (to_the_end, each) in run_ranks(
        jobs.micro_batches, ranks_per_node=ranks_per_node, experts=experts
    ):
        assert in_node == pytest.approx(to_the_end, rel=1e-3)
        assert each == pytest.approx(3 * once, rel=1e-6)


@pytest.mark.parametrize("recipe, fields", [("lossless", {}), ("zeropp", {"gradients": {"error_feedback": True}})])
@pytest.mark.parametrize("experts", EXPERTS)
def test_goes_on(recipe, fields, experts):
    assert run_ranks(jobs.goes_on, recipe=recipe, experts=experts, fields=fields) == [{}] * 4


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("ranks_per_node", NODES)
def test_the_start_table_says_what_is_sent(experts, ranks_per_node):
    for found in run_ranks(jobs.predicted, ranks_per_node=ranks_per_node, experts=experts):
        for said, sent in found:
            assert sent == pytest.approx(said, rel=1e-6)


def test_checkpoints_are_stocks():
    assert run_ranks(jobs.exchanged_with_stock) == [[{}, {}]] * 4


def test_universal_checkpoints_are_stocks():
    for apart, files, differing in run_ranks(jobs.universal_of_both):
        assert not apart and not differing and files > 0


@pytest.mark.parametrize("few", [False, True], ids=["", "few experts"])
def test_bytes_of_tokens(few):
    """All that is sent is counted; in FP8 a token is 64 codes, and a scale in 16 bytes."""
    whole, in_fp8 = run_ranks(jobs.tokens_sent, few=few), run_ranks(jobs.tokens_sent, few=few, fields=jobs.FP8)
    for (sent, numel, losses, _), (rounded, same, others, _) in zip(whole, in_fp8):
        assert sent == 2 * numel
        assert rounded == same * (64 + 16) / 64
        assert others == pytest.approx(losses, rel=1e-2) and others != losses
    assert any(empty for *_, empty in in_fp8) == few


def test_falls_back():
    for losses in run_two(jobs.fallen_back):
        assert len(losses) == 3 and all(loss == loss for loss in losses)


REFUSED = {
    "frozen.format": {"fields": {"frozen": {"format": "int4"}}},
    "compute.format": {"fields": {"compute": {"format": "fp8"}}},
    "partition": {"fields": {"partition": "whole_tensor"}},
    "experts.gather": {"fields": {"experts": {"gather": "used"}}},
}


def test_refused():
    for found in run_two(jobs.refusals, given=REFUSED):
        for key in REFUSED:
            assert f'which "zeropp_fp8.{key}" does not know; remove one of the two' in found[key], found[key]
        assert "AutoEP" in found["hand over"] and "synced_gpus=True" in found["generate"]


def test_versions_that_do_not_fit():
    for said in run_two(jobs.not_started):
        assert said is None or '"expert_parallel.enabled": AutoEP does not start in deepspeed' in said, said


@pytest.mark.parametrize("recipe", ["lossless", "zeropp"])
def test_refused_where_nodes_share_experts_unevenly(recipe):
    """Of ranks 0, 2 and 4, which have the same experts, two are in the first node of three ranks."""
    for error in run_ranks(jobs.refused, world=6, ranks_per_node=3, recipe=recipe, experts=2):
        assert '"expert_parallel.autoep_size" deals experts out so that nodes have different numbers' in error, error
        assert "set it to a divisor, or a multiple, of the ranks per node" in error
