"""Samples, a watch, `reference` and `bisect` on every kind of recipe: they change no bit, and find what is there."""

import math

import numerics_jobs as jobs
import pytest
from ranks import run_ranks, run_two

FP8 = {"compute": {"format": "fp8", "min_features": 16, "skip_modules": ["lm_head"]}}
WIRE = ["gradients_between", "gradients_within", "weights"]
# A case, the kinds that its samples have, and its pieces.
CASES = {
    "accumulation in the node": (
        {"recipe": "zeropp", "gradient_accumulation_steps": 2, "fields": {"gradients": {"accumulate_in": "node"}}},
        {"weights", "gradients", jobs.WITHIN},
        WIRE,
    ),
    "fp8-lm, owners": (
        {"recipe": "fp8-lm", "gradient_accumulation_steps": 2, "fields": FP8},
        {"weights", "gradients", "compute_activations", "compute_gradients"},
        ["activations", "compute", "gradients", "optimizer", "weights"],
    ),
    "fp8-lm-zeropp": (
        {"recipe": "fp8-lm-zeropp", "fields": FP8},
        {"weights", "gradients", jobs.WITHIN, "compute_activations", "compute_gradients"},
        [
            "activations",
            "compute",
            "gradients_at_rest",
            "gradients_between",
            "gradients_within",
            "optimizer",
            "weights",
        ],
    ),
}
# Each rank is a node: there is no hop within.
CASES_OF_TWO = {
    "zeropp-exact": ({"recipe": "zeropp-exact"}, {"gradients"}, [piece for piece in WIRE if piece != "weights"]),
    "zeropp-pcie": ({"recipe": "zeropp-pcie"}, {"weights", "gradients"}, WIRE),
    "INT4 at rest, LoRA": (
        {"recipe": "qlora", "lora": True, "fields": {"frozen": {"format": "int4"}}},
        {"weights", "gradients"},
        ["frozen", *WIRE],
    ),
    "fp16, overflow": (
        {"recipe": "zeropp", "fp16": {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}},
        {"weights", "gradients"},
        WIRE,
    ),
}
CASES_OF_FOUR = list(CASES)
CASES |= CASES_OF_TWO


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By case, of each rank."""
    found = {}
    for run, names in ((run_ranks, CASES_OF_FOUR), (run_two, list(CASES_OF_TWO))):
        folder, cases = str(tmp_path_factory.mktemp("recipes")), [CASES[name][0] for name in names]
        found |= dict(zip(names, zip(*run(jobs.of_recipes, folder=folder, cases=cases))))
    return found


@pytest.mark.parametrize("case", CASES)
def test_samples_and_a_watch_change_no_bit(case, found):
    assert all(same for same, *_ in found[case])


@pytest.mark.parametrize("case", CASES)
def test_kinds_of_samples(case, found):
    samples = found[case][0][1]
    assert len(samples) == 3
    for rows in samples[1:]:
        assert {row["kind"] for row in rows} == CASES[case][1]
        for row in rows:
            assert row["snr_db"] is None or 3 < row["snr_db"] < 120, row


def test_gradients_beyond_fp16_are_counted(found):
    """The loss scale is lowered for them, and the watch lets that be."""
    first = [row for row in found["fp16, overflow"][0][1][0] if row["kind"] == "gradients"]
    assert max(row["non_finite"] for row in first) > 0


@pytest.mark.parametrize("case", CASES)
def test_pieces_and_layers_of_an_experiment(case, found):
    _, _, (whole, without), layers = found[case][0]
    assert sorted(without) == sorted(CASES[case][2])
    assert math.isfinite(whole) and whole > 0 and all(map(math.isfinite, without.values()))
    assert layers and all(len(values) == 2 for values in layers.values())
    finite = [value for values in layers.values() for value in values if math.isfinite(value)]
    assert (len(finite) == 2 * len(layers)) == (case != "fp16, overflow") and max(finite, default=0.1) > 1e-4
