"""Parameters with owners: same numbers as with slices, every way to look at them, checkpoints, ends of engines."""

import pytest
import whole_jobs as jobs
from ranks import run_ranks, run_two
from running import changed, differing, equal, universal
from thinning import thinned


@pytest.mark.parametrize("split, zero_init", [("none", True), ("balance", False), ("balance", True)])
def test_what_ranks_hold(split, zero_init):
    ranks = run_ranks(jobs.what_ranks_hold, split=split, zero_init=zero_init)
    owned = ranks[0][0]
    for rank, (theirs, sizes, joined, balance) in enumerate(ranks):
        assert theirs == owned and joined, "ranks disagree on who owns what, or on its content"
        for name, parts in owned.items():
            assert sizes[name] == sum(numel for owner, numel in parts if owner == rank)
            assert split != "none" or len(parts) == 1
        assert balance.startswith("memory max/mean ") and "; a block's exchange max/mean " in balance
        assert balance.endswith(f"; {sum(map(len, owned.values()))} parts of {len(owned)} tensors")
    assert {owner for parts in owned.values() for owner, _ in parts} == {0, 1, 2, 3}


COUNTED = {
    "fp8-lm": {"recipe": "fp8-lm"},
    "zeropp, not split": {"recipe": "zeropp", "partition": "whole_tensor", "partition_split": "none"},
    "zeropp, a copy a rank": {"recipe": "zeropp", "partition": "whole_tensor", "secondary": {"scope": "rank"}},
    "slices": {"recipe": "zeropp"},
}


@pytest.mark.parametrize("name, node_size", thinned(COUNTED, [2, 1, 4]))
def test_bytes_of_all_ranks(name, node_size):
    """Every rank knows the sum of what all have sent, though owners send unequal amounts."""
    reports = run_ranks(jobs.counted, options=COUNTED[name], ranks_per_node=node_size, node_size=node_size)
    counted = [mine for mine, _ in reports]
    for _, total in reports:
        assert total == reports[0][1]
        for kind, links in total["per_step"].items():
            for link, num_bytes in links.items():
                assert num_bytes == pytest.approx(sum(mine["per_step"][kind][link] for mine in counted)), (kind, link)
        for link, num_bytes in total["outside_steps"].items():
            assert num_bytes == pytest.approx(sum(mine["outside_steps"][link] for mine in counted)), link


@pytest.mark.parametrize("ranks_per_node, zero_init, accumulation, tie", [(2, True, 1, False), (4, False, 2, True)])
def test_training_equals_training_with_slices(ranks_per_node, zero_init, accumulation, tie):
    """Blocks of 32 divide every slice and every row, and sums over ranks are taken in the same order: bit for bit.

    (Without clipping: the norm's sum has another order.)
    """
    run = {"options": jobs.fields(), "sliced": jobs.EXACT, "dtype": "fp32", "zero_init": zero_init}
    run |= {"config": {"gradient_accumulation_steps": accumulation}, "model": {"tie": tie}}
    for whole, sliced in run_ranks(jobs.with_both, ranks_per_node=ranks_per_node, **run):
        assert not differing(whole, sliced, but=("bytes",))


@pytest.mark.parametrize(
    "options, ranks_per_node",
    [
        ({"recipe": "fp8-lm"}, 2),
        ({"recipe": "fp8-lm", "partition_split": "none"}, 4),
        ({"recipe": "fp8-lm", "secondary": {"scope": "node"}, "compute": {"scaling": "block"}}, 2),
        ({"recipe": "fp8-lm", "secondary": {"scope": "rank"}, "compute": {"scaling": "per_channel"}}, 2),
        ({"recipe": "fp8-lm", "weights": {"format": "int8"}, "compute": {"format": "none"}}, 1),
        ({"recipe": "zeropp", "partition": "whole_tensor"}, 2),
    ],
    ids=["o3", "one node", "hpZ, tiles", "a copy a rank, rows", "int8, one rank per node", "zeropp"],
)
def test_every_combination_trains(options, ranks_per_node):
    """Against the same formats with slices; codes of weights with a scale per tensor are the same numbers in both."""
    sliced = {k: v for k, v in {**options, "partition": "slice"}.items() if k != "partition_split"}
    run = {"options": options, "sliced": sliced, "config": jobs.CLIPPED}
    for whole, with_slices in run_ranks(jobs.with_both, ranks_per_node=ranks_per_node, **run):
        assert whole.losses == pytest.approx(with_slices.losses, rel=5e-3)
        if options.get("secondary"):
            assert whole.bytes["weights_backward"]["inter"] == 0


@pytest.mark.parametrize("split", ["balance", "none"])
@pytest.mark.parametrize("options", [{}, {"weights": {"format": "int8"}}], ids=["exact", "int8 weights"])
def test_gradients_that_nothing_quantizes(options, split):
    """The bits of slices, which DeepSpeed reduces: the mean of two ranks' fp32 gradients has one rounding."""
    run = {"options": {"recipe": "lossless", "partition": "whole_tensor", "partition_split": split, **options}}
    sliced = {"recipe": "lossless", **options}
    ranks = run_two(jobs.with_both, **run, sliced=sliced, config={}, dtype="fp32")
    for whole, with_slices in ranks:
        assert whole.losses == with_slices.losses or options  # blocks of codes begin elsewhere
        assert whole.losses == pytest.approx(with_slices.losses, rel=5e-3)
        assert options or not changed(whole.weights, with_slices.weights)
    whole, with_slices = (sum(traces[i].bytes["gradients"]["inter"] for traces in ranks) for i in (0, 1))
    assert whole == with_slices


def test_lora_on_a_frozen_base():
    run = {"options": {"recipe": "fp8-lm"}, "sliced": {"recipe": "fp8-lm", "partition": "slice"}}
    whole, sliced = run_two(jobs.with_both, **run, config=jobs.CLIPPED, lora=True)[0]
    assert whole.losses == pytest.approx(sliced.losses, rel=2e-3)
    assert all("lora" in name for name in changed(whole.weights, sliced.weights))


@pytest.mark.parametrize("recipe", ["lossless", "fp8-lm"])
def test_looking_and_changing(recipe):
    logs = run_ranks(jobs.looking_and_changing, recipe=recipe)
    for rank, log in enumerate(logs):
        assert log["master"] <= 1e-6, rank
        assert log["grad"] == ((128, 128), True, True) and log["moment"] == ((128, 128), True)
        assert log["set master"] and log["set moment"]
        assert log["follows master"] < 5e-3 and log["written"] < 8e-3
    assert sum(log["local"] for log in logs) == 128 * 128


@pytest.mark.parametrize("recipe, lora", [("lossless", False), ("fp8-lm", False), ("fp8-lm", True)])
def test_checkpoints(recipe, lora):
    for log in run_two(jobs.checkpoints, recipe=recipe, lora=lora):
        uninterrupted, in_stock = log["losses"]
        assert not log["differing"] and log["consolidated"] and log["zero_to_fp32"] and log["stock weights"]
        assert in_stock == pytest.approx(uninterrupted, rel=5e-3)
        # Rounded to fp16 with a scale first, a master weight between two bf16 numbers may become the other one.
        assert log["from stock"] <= (0 if recipe == "lossless" else 2**-7)


@pytest.mark.parametrize("recipe", ["fp8-lm", "lossless"])
def test_universal_checkpoint_at_another_world_size(recipe, tmp_path):
    """Each param group has its own options again, of which DeepSpeed's loader knows the first group's only."""
    saved = run_ranks(jobs.save_universal, folder=str(tmp_path), recipe=recipe)
    universal(str(tmp_path), "u")
    for run, resumed in zip(saved, run_two(jobs.load_universal, folder=str(tmp_path), recipe=recipe)):
        (weights, moment, decays), (loss,) = *resumed.seen, resumed.losses
        assert equal(weights, *run.seen) and moment > 0 and decays == [0.1, 0.0]
        assert loss == pytest.approx(run.losses[-1], rel=2e-2)


def test_destroy_gives_slices_back():
    for slices, same, losses in run_two(jobs.after_destroy):
        assert slices and same and all(loss == loss for loss in losses)


def test_a_model_whose_engine_was_collected():
    for same, losses in run_two(jobs.left_without_destroy):
        assert same and all(loss == loss for loss in losses)


def test_sub_groups_are_cut_alike_on_all_ranks():
    ranks = run_ranks(jobs.sub_groups)
    assert len({len(flats) for flats in ranks}) == 1 and len(ranks[0]) > 3
    assert any(0 in flats for flats in ranks), "no rank owns nothing of a sub-group: the case did not occur"


def test_no_rank_holds_the_model_while_owners_are_found():
    for total, held in run_ranks(jobs.peak_of_initialization):
        assert held < 0.75 * total  # slices or parts (a quarter), and one unit gathered


def test_an_older_deepspeed_is_refused(monkeypatch):
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    from zeropp_fp8.config import ConfigError, resolve
    from zeropp_fp8.plugin.zeropp_engine import check_owners

    config = resolve({"zero_optimization": {"stage": 3}, "zeropp_fp8": {"recipe": "fp8-lm"}})
    check_owners(config)
    monkeypatch.delattr(DeepSpeedZeroOptimizer_Stage3, "_get_param_partition_rank")
    with pytest.raises(ConfigError, match=r'partition": "whole_tensor" needs DeepSpeed 0.19.3 or later'):
        check_owners(config)
