"""A watch ends all ranks in one step, or lets them fall back: with every recipe, and in runs that resume."""

import re

import pytest
import watch_jobs as jobs
from ranks import run_ranks, run_two

FP8 = {"compute": {"format": "fp8"}}
FP8_SMALL = {"compute": {"format": "fp8", "min_features": 16, "skip_modules": ["lm_head"]}}
WATCHED = [
    FP8,
    {"accumulation": 2, "factor": float("nan"), "gradients": {"error_feedback": True}},
    {"factor": float("inf"), "watch": "stop"},
    {"watch": "stop"},
    {"watch": "stop", "factor": 1.0},
    {"direct": True},
]


def test_all_ranks_fall_back_or_stop_in_the_same_step():
    found = run_ranks(jobs.watch_all, cases=WATCHED)
    for index, case in enumerate(WATCHED):
        for steps, error, gradients_db, losses in (rank[index] for rank in found):
            if case.get("direct"):
                assert steps == [] and "none came through engine.backward(loss)" in error
            elif case.get("watch") == "stop" and case.get("factor") != 1.0:
                assert steps == [(False, True)] * (jobs.SPIKE_AT - 1)
                assert error.startswith("FloatingPointError('zeropp_fp8: step 10: the loss is ")
            elif case.get("watch") == "stop":
                assert steps == [(False, True)] * jobs.STEPS and error is None and gradients_db < 30
            else:
                before = (False, "compute" not in case)
                assert steps == [before] * (jobs.SPIKE_AT - 1) + [(True, True)] * (jobs.STEPS - jobs.SPIKE_AT + 1)
                assert error is None and gradients_db > 100
                assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_losses_that_stay_high_are_said_once():
    first, other = run_two(jobs.jumping, steps=jobs.SOON + 4, high=[jobs.SOON, jobs.SOON + 1, jobs.SOON + 3])
    lines = [line for line in first.splitlines() if "the loss is" in line]
    assert len(lines) == 2 and "the loss is" not in other
    assert f"step {jobs.SOON}: " in lines[0] and "from the next step on" in lines[0]
    assert f"step {jobs.SOON + 3}: " in lines[1] and "all that goes to high precision is in it already" in lines[1]


@pytest.mark.parametrize(("recipe", "accumulation"), [("zeropp", 2), ("fp8-lm", 1)])
def test_samples_of_a_run_that_has_fallen_back(recipe, accumulation, tmp_path):
    """Samples neither list what travels exactly, nor reduce it once more to find that it does."""
    path = str(tmp_path / "numerics.jsonl")
    for kinds in run_two(jobs.sampled, path=path, recipe=recipe, accumulation=accumulation):
        assert {"gradients", "compute_activations", "compute_gradients"} <= kinds[jobs.SOON - 1]
        assert kinds[jobs.SOON :] == [set(), set()]


RESUMED = [
    {},
    {**FP8, "weights": {"format": "fp8_e4m3"}},
    {"gradients": {"error_feedback": True}},
    {"watch": "stop"},
    {"watch": "none"},
    {"recipe": "fp8-lm", **FP8_SMALL},
    {"recipe": "fp8-lm", "watch": "none", **FP8_SMALL},
    {"recipe": "zeropp-exact"},
    {"recipe": "qlora", "lora": True, "frozen": {"format": "int4"}},
]


def test_a_resumed_run_goes_on_in_the_precision_it_was_saved_in(tmp_path):
    found = run_two(jobs.resumed, folder=str(tmp_path), cases=RESUMED)
    for rank, of_rank in enumerate(found):
        for case, (same_losses, same_weights, fell_back, compared_with, said) in zip(RESUMED, of_rank):
            watch = case.get("watch", "fall_back")
            assert fell_back == ((True, True) if watch == "fall_back" else (False, False)), case
            # The step that jumped is not among them.
            assert compared_with == ([] if watch == "none" else [jobs.SOON]), case
            assert same_losses == same_weights == (watch == "fall_back"), case
            first = "gradients" if case.get("recipe") == "zeropp-exact" else "weights"
            told = f"as in the run that saved the checkpoint, {first}"
            told = told if watch == "fall_back" else f'watch" is "{watch}"'
            assert said.count(told) == (rank == 0), (case, said)


STATES = "master weights and moments (fp16, fp8_e4m3, fp16): as before"
# A case, and of what is said at start and when it falls back: what goes to high precision, and what stays.
FALLEN = [
    (
        {"recipe": "zeropp", "ds": {"gradient_accumulation_steps": 2}},
        "weights that are sent (int8), gradients that are sent (int8 within nodes, int4 between nodes): 16 or 32 bits",
    ),
    (
        {"recipe": "zeropp-pcie", "secondary": {"memory_gb": 7e-5}, "topology": {"ranks_per_node": 1}},
        "weights that are sent (int8), gradients that are sent (int4 between nodes): 16 or 32 bits",
    ),
    (
        {"recipe": "zeropp", "secondary": {"scope": "none"}},
        "weights that are sent (int8), gradients",
    ),
    (
        {"recipe": "zeropp", "weights": {"format": "fp8_e4m3"}, **FP8_SMALL},  # operands travel
        "int4 between nodes), GEMMs of linear layers (fp8): 16 or 32 bits",
    ),
    ({"recipe": "mxfp8"}, "mxfp4 between nodes), GEMMs of linear layers (mxfp8_e4m3): 16 or 32 bits"),
    (
        {"recipe": "fp8-lm-o1", **FP8_SMALL},
        "gradients that are sent (fp8_e4m3 within nodes, fp8_e4m3 between nodes), gradients until the step (fp8_e4m3), "
        "GEMMs of linear layers (fp8): 16 or 32 bits",
    ),
    (
        {"recipe": "fp8-lm-o2", "ds": {"gradient_accumulation_steps": 2}, **FP8_SMALL},
        f"GEMMs of linear layers (fp8): 16 or 32 bits; {STATES}",
    ),
    ({"recipe": "fp8-lm", **FP8_SMALL}, f"GEMMs of linear layers (fp8): 16 or 32 bits; {STATES}"),
    (
        {"recipe": "fp8-lm-zeropp", "weights": {"format": "none"}, **FP8_SMALL},
        f"gradients until the step (fp8_e4m3), GEMMs of linear layers (fp8): 16 or 32 bits; {STATES}",
    ),
    (
        {"recipe": "qlora", "lora": True, "frozen": {"format": "int4"}},
        "int4 between nodes): 16 or 32 bits; frozen weights (int4): as before",
    ),
    (
        {"recipe": "zeropp", "lora": True, "frozen": {"format": "fp8_e4m3", "scales": "tensor"}, **FP8_SMALL},
        "GEMMs of linear layers (fp8): 16 or 32 bits; frozen weights (fp8_e4m3): as before",
    ),
    (
        {"recipe": "lossless", "compile": "blocks", "compute": {**FP8_SMALL["compute"], "scaling": "delayed"}},
        "jumps, GEMMs of linear layers (fp8): 16 or 32 bits",
    ),
]


# On two nodes of two ranks: gradients that add up in nodes, and those that have a hop within them.
OF_FOUR = [fallen for fallen in FALLEN if "ds" in fallen[0] or fallen[0]["recipe"] == "fp8-lm-zeropp"]
OF_TWO = [(case, re.sub(r"\w+ within nodes, ", "", words)) for case, words in FALLEN if (case, words) not in OF_FOUR]


def test_an_evaluation_before_a_fall_back():
    """The weights that it leaves gathered are rounded: the next step gathers them anew."""
    assert run_two(jobs.evaluated_before) == [{}] * 2


@pytest.mark.parametrize(("ranks", "fallen"), [(4, OF_FOUR), (2, OF_TWO)])
def test_after_a_fall_back_of_every_recipe(ranks, fallen):
    """Weights arrive as they rest, of 4 bytes per element; so do gradients; what is updated is by the formulas."""
    cases = [case for case, _ in fallen]
    found = run_ranks(jobs.fallen, world=ranks, ranks_per_node=ranks // 2, cases=cases)
    for rank, of_rank in enumerate(found):
        for (case, words), (said, step) in zip(fallen, of_rank):
            lines = [line for line in said.splitlines() if words in line or words.replace("jumps, ", "") in line]
            assert len(lines) == (2 if rank == 0 else 0), (case, said)
            if rank == 0:
                assert lines[0].startswith("zeropp_fp8: where a loss jumps, ")
                assert lines[1].startswith(f"zeropp_fp8: step {jobs.SOON}: the loss is ")
            assert step["arrived otherwise"] == [] and step["seen"] > 20, case
            assert step["losses"][0] == pytest.approx(step["losses"][1], rel=1e-6), case
            assert step["gradients"] > 100, (case, step["gradients"])
            assert step["weights"] > (60 if STATES in words else 110), (case, step["weights"])
            assert step["frozen"] == ({case["frozen"]["format"]} if case.get("lora") else set())
            if not case.get("lora"):  # of which most is frozen, and does not travel again
                moved = (ranks - 1) * 4 * step["numel"]  # each rank gets what the others have
                micro_batches = case.get("ds", {}).get("gradient_accumulation_steps", 1)
                for sent in step["sent"].values():  # nodes keep weights for later micro-batches, and add gradients up
                    assert moved <= sent < moved * micro_batches * 1.02, case


def test_a_rank_without_the_memory_to_fall_back_ends_all():
    for said in run_two(jobs.without_memory):
        assert said == "RuntimeError: falling back to high precision has failed on rank 1: out of memory"
