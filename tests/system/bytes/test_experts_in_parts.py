"""`"experts.gather": "used"`: the bits of a gather of all experts, in fewer bytes."""

import functools

import pytest
import used_expert_jobs as jobs
from ranks import run_ranks, run_two

RE, NON_RE = (functools.partial(jobs.checkpointed, reentrant) for reentrant in (True, False))
INT4 = {"frozen": {"format": "int4", "double_quantize": False}}
NF4 = {"frozen": {"format": "nf4", "double_quantize": True}}
FP8 = {"frozen": {"format": "fp8_e4m3", "scales": "tensor"}}
OFFLOADED = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
CASES = {
    "no copy": ("Qwen3Moe", "lossless", {}),
    "node's copy": ("Qwen3Moe", "zeropp", {}),
    "exact": ("Qwen3Moe", "zeropp-exact", {"dtype": "bf16"}),
    "4 bits, biases": ("GptOss", "zeropp-4bit", {}),
    "micro-batches": ("Mixtral", "zeropp", {"how": "accumulated", "dtype": "bf16"}),
    "two forwards": ("Qwen3Moe", "lossless", {"how": "two before"}),
    "run again": ("Qwen3Moe", "zeropp", {"adapt": RE}),
    "run again, no copy": ("Qwen3Moe", "lossless", {"adapt": NON_RE, "how": "accumulated"}),
    "by module": ("Qwen3Moe", "lossless", {"fields": {"gather_granularity": "module"}}),
    "by parameter": ("Qwen3Moe", "zeropp", {"fields": {"gather_granularity": "parameter"}}),
    "offloaded": ("Qwen3Moe", "lossless", {"config": OFFLOADED}),
    "LoRA": ("Qwen3Moe", "qlora", {"adapt": jobs.adapted, "dtype": "bf16", "fields": INT4}),
    "LoRA, NF4": ("GptOss", "lossless", {"adapt": jobs.adapted, "dtype": "bf16", "fields": NF4}),
    "LoRA, FP8": ("Mixtral", "zeropp", {"adapt": jobs.adapted, "dtype": "bf16", "fields": FP8}),
}


@pytest.mark.parametrize(
    "case, ranks_per_node", [*((case, 2) for case in CASES), ("no copy", 1), ("no copy", 4), ("LoRA", 4)]
)
def test_training(case, ranks_per_node):
    """Three tokens per rank, each of which goes to 2 of 16 experts."""
    kind, recipe, options = CASES[case]
    for differing, every, used, brought in run_ranks(
        jobs.all_and_used, ranks_per_node=ranks_per_node, kind=kind, recipe=recipe, **options
    ):
        assert differing == {}
        if case == "LoRA, NF4":  # cut at multiples of 16,384 elements, as groups of scales are: here, at no expert
            assert min(brought) < jobs.EXPERTS
        else:
            assert sum(used["weights_forward"].values()) < 0.97 * sum(every["weights_forward"].values())


def test_bytes():
    """All but those of experts that no rank uses: each byte goes to each other rank, over one link or another."""
    ranks = run_ranks(jobs.bytes_of_a_step)
    (unused,) = {tuple(unused) for _, _, unused in ranks}
    of_expert = 3 * 64 * 48 * 4  # gate, up and down; fp32
    masks = 2 * len(unused) * jobs.EXPERTS * 3  # twice around a ring of 4
    saved = sum(every - used for every, used, _ in ranks)
    assert saved == 3 * sum(unused) * of_expert - masks and sum(unused) > 0


@pytest.mark.parametrize("recipe", ["lossless", "zeropp"])
def test_no_rank_chooses_any(recipe):
    """Nothing is gathered of experts then."""
    for differing, brought in run_ranks(jobs.without_tokens, recipe=recipe):
        assert differing == {} and brought == [0, 0]


def test_numbers_of_weights_that_were_not_gathered():
    """They are no part of a sample; those that were have the numbers that they have among all."""
    every, used, brought = run_ranks(jobs.sampled)[0]
    assert 0 < max(brought) < jobs.EXPERTS and [row["layer"] for row in every] == [row["layer"] for row in used]
    for whole, part in zip(every, used):
        assert whole["non_finite"] == part["non_finite"] == 0
        assert part["snr_db"] == pytest.approx(whole["snr_db"], abs=1) and part["amax"] <= whole["amax"]


GENERATING = [("lossless", {}), ("qlora", {"adapt": jobs.adapted, "dtype": "bf16", "fields": INT4})]


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("recipe, options", GENERATING)
def test_generation(recipe, options, ranks_per_node):
    """With gathers for each token, and with weights that stay, for which nothing is agreed.

    In a node of one rank `qlora` keeps all weights, so there is nothing to save.
    """
    for every, used in run_ranks(jobs.generated, world=2, ranks_per_node=ranks_per_node, recipe=recipe, **options):
        assert used[0].equal(every[0]) and used[2] == every[2]
        if recipe == "qlora" and ranks_per_node == 1:
            assert used[1] == every[1] == {"inter": 0, "intra": 0}
        else:
            assert sum(used[1].values()) < 0.85 * sum(every[1].values())


@pytest.mark.parametrize("recipe", ["lossless", "zeropp"])
def test_what_else_reads_and_writes_weights(recipe):
    for differing, (finite,) in run_ranks(jobs.disturbed, recipe=recipe):
        assert differing == {} and finite


def test_a_rank_alone():
    """A rank may run alone what a script has gathered: nothing is to come, so nothing is to agree on."""
    for rank, (every, used) in enumerate(run_two(jobs.a_rank_alone)):
        assert used == every and (used[1] is None) == (rank > 0)


@pytest.mark.parametrize("recipe, options", [("zeropp", {}), ("qlora", {"adapt": jobs.adapted})])
def test_checkpoints(recipe, options):
    for differing in run_two(jobs.saved_and_resumed, recipe=recipe, **options):
        assert differing == {}


def test_two_engines_over_a_model():
    for before, reference, again, after in run_two(jobs.two_engines):
        assert reference == again and before[1] != after[0]


def test_refusals():
    for said in run_two(jobs.refused):
        owners, compiled, fp8, none = (said[name] for name in ("owners", "compiled", "FP8", "no experts"))
        assert '"experts.gather": "used" does not go with "partition": "whole_tensor"' in owners.replace(
            "zeropp_fp8.", ""
        )
        assert '"compile": "blocks", whose graphs have no place for a gather' in compiled
        assert '"compute.skip_modules"' in fp8 and "compute in" in fp8
        assert "this model has none; remove it" in none


def test_start_table():
    every, (line,) = run_two(jobs.tables)[0].values()
    assert every == [] and "used" in line and "once the router has chosen them" in line
