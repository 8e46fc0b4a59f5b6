"""DeepSpeed's features beside the plugin: trained with stock's losses and weights, or refused."""

import breadth_jobs as jobs
import deepspeed
import pytest
import removed_jobs
import torch
from packaging.version import Version
from ranks import RankError, run_ranks, run_two
from running import differing

version = Version(deepspeed.__version__)

# Case: the DeepSpeed that has it, and what stock ZeRO-3 raises before.
SINCE = {
    "AutoTP": ("0.19.4", "compatibility between 'autotp' and 'zero_stage = 3'"),
    "random_ltd": ("0.19.1", "'dict' object has no attribute '_in_forward'"),
}


@pytest.mark.parametrize("case", jobs.CASES)
def test_beside_stock(case):
    if case == "DeepSpeedCPUAdam" and not jobs.is_compiled("cpu_adam"):
        pytest.skip("DeepSpeed has not compiled its CPU Adam here")
    run = run_ranks if case == "AutoTP" else run_two
    since, says = SINCE.get(case, ("0", ""))
    if version < Version(since):
        with pytest.raises(RankError, match=says):
            run(jobs.beside_stock, case=case)
        return
    check_beside_stock(run(jobs.beside_stock, case=case))


def check_beside_stock(ranks):
    """`lossless` to the bit, in what was seen and in the weights; `zeropp` within what INT8 changes of a loss."""
    for found in ranks:
        stock, lossless = found["stock"], found["lossless"]
        assert stock.masters and stock.weights and stock.seen[0]
        assert differing(lossless, stock, but=["seen"]) == {}
        torch.testing.assert_close(lossless.seen, stock.seen, rtol=0, atol=0)
        losses = {name: [seen for seen in each.seen[0] if isinstance(seen, float)] for name, each in found.items()}
        assert len(set(losses["stock"])) >= 2
        assert losses["zeropp"] == pytest.approx(losses["stock"], rel=5e-3)


REMOVED = pytest.mark.skipif(version >= Version("0.19.7"), reason="DeepSpeed 0.19.7 has removed it")


@REMOVED
@pytest.mark.parametrize("case", removed_jobs.REMOVED)
def test_what_is_removed_beside_stock(case):
    check_beside_stock(run_two(removed_jobs.beside_stock, case=case))


@REMOVED
def test_one_bit_optimizers_are_refused():
    with pytest.raises(RankError, match=r'"optimizer\.type" "OneBitAdam" does not go with ZeRO'):
        run_two(removed_jobs.one_bit)


def test_offload_with_a_copy_in_each_node():
    """hpZ and offload together, of which DeepSpeed's own has open reports of gradients of zero."""
    for found in run_ranks(jobs.offloaded_with_copies):
        losses, norms, _ = found["none"]
        assert len(set(losses)) == 6 and min(norms) > 0.1
        for kind, (of_losses, of_norms, between_nodes) in found.items():
            assert of_losses == losses, kind
            assert of_norms == pytest.approx(norms, rel=1e-5), kind
            assert between_nodes == 0, kind


def test_gathers_are_waited_for():
    """Every one of several, by DeepSpeed too (before 0.19.8 as ranks.py has it)."""
    for found in run_two(jobs.gathered_late):
        assert found == {"stock": [], "lossless": [], "zeropp": []}


def test_bytes_of_an_all_reduce():
    """A ring of two ranks sends each element once to reduce it, and once more where all ranks get all of it."""
    for found, numel in run_two(jobs.gradient_bytes):
        assert found["reduce-scatter"] == pytest.approx(numel * 2 / 2, rel=1e-3), "slices are padded"
        assert found["all-reduce"] == 2 * numel * 2 / 2
        assert found["in fp32"] == 2 * numel * 4 / 2


MOE = ("Native DeepSpeed MoE is not supported with ZeRO Stage 3", "choose ZeRO stage 1/2")
REFUSED = {
    "pipeline, stage 1": ("ConfigError", ("zeropp_fp8", "PipelineModule", "remove the section")),
    "pipeline, stage 3": ("ConfigError", ("zeropp_fp8", "PipelineModule", "remove the section")),
    "MoE": ("AssertionError", MOE if version >= Version("0.19.3") else ("MoE not supported with Stage 3",)),
    "init_inference": ("ValidationError", ("zeropp_fp8", "Extra inputs are not permitted")),
    "no_sync": ("AssertionError", ("no_sync context manager is incompatible", "ZeRO stage 3")),
    "meta": ("NotImplementedError", ("Cannot copy out of meta tensor", "to_empty()")),
    "untested optimizer": ("AssertionError", ("untested ZeRO Optimizer", "zero_allow_untested_optimizer")),
    "Muon": ("ConfigError", ("zero_optimization.reduce_scatter", 'Muon: with "zeropp_fp8.partition": "whole_tensor"')),
}


def test_refused_on_every_rank():
    """By an error that names the key and what to do; and a pipeline without the section is stock."""
    for found in run_two(jobs.refusals):
        assert found.pop("pipeline, stock") == ("none", "PipelineEngine")
        assert found.keys() == REFUSED.keys()
        for name, (kind, parts) in REFUSED.items():
            assert found[name][0] == kind and all(part in found[name][1] for part in parts), (name, found[name])
