"""Samples of rounding on two nodes of two ranks, against float64; references; layers at fault."""

import json
import os
import re
import subprocess
import sys

import numerics_jobs as jobs
import pytest
from hang_guard import HANG
from ranks import run_ranks, run_two

from tests.places import ROOT, TESTS

# Of these the oracle knows every weight (blocks of slices) and gradient; what travels as operands it does not.
BY_HAND = ("zeropp", "lossless", "mxfp8", "qlora")
CASES = [
    {"recipe": "zeropp", "poison": jobs.POISONED, "every": 2},
    {"recipe": "zeropp", "accumulation": 2, "compute": {"format": "fp8", "scaling": "current"}},
    {"recipe": "zeropp", "accumulation": 2, "gradients": {"accumulate_in": "world"}},
    {"recipe": "fp8-lm-zeropp"},
    {"recipe": "fp8-lm"},
    {"recipe": "zeropp-exact"},
    {"recipe": "mxfp8"},
    {"recipe": "qlora", "frozen": ["mlp"]},
    {"recipe": "lossless"},
]


def test_samples(tmp_path):
    found = run_ranks(jobs.many, folder=str(tmp_path), cases=CASES)
    for case, (samples, oracle, told, left) in zip(CASES, found[0]):
        recipe, every = case["recipe"], case.get("every", 1)
        assert [(sample["engine"], sample["step"]) for sample in samples] == [
            (CASES.index(case), step) for step in range(every, 3, every)
        ]
        rows = {(row["kind"], row["layer"]): row for row in samples[-1]["rows"]}
        check_rows(recipe, rows, oracle)
        # The next step is sampled too where all are.
        assert (left == set()) == (every == 2), case
        check_told(told, samples[-1]["rows"])
        assert all(told == other[CASES.index(case)][2] for other in found[1:])
        cost = samples[-1]["cost"]
        assert (cost is not None and 0 < cost["share"] < 1) == (every == 2)
    worst = min((row for row in found[0][0][0][-1]["rows"] if row["kind"] == "weights"), key=lambda row: row["snr_db"])
    assert worst["layer"] == jobs.POISONED and worst["underflow"] > 0.8


def check_rows(recipe, rows, oracle):
    kinds = {kind for kind, _ in rows}
    for (kind, layer), (snr_db, lost, amax) in oracle.items():
        if recipe == "lossless" or (recipe == "zeropp-exact" and kind == "weights"):
            continue
        if kind == "weights" and recipe.startswith("fp8-lm") and "self_attn" in layer:
            assert rows[kind, layer]["snr_db"] > 31  # with a scale per tensor: NUMERICS, E4M3
            continue
        row = rows[kind, layer]
        assert row["snr_db"] == pytest.approx(snr_db, abs=1e-4), (recipe, kind, layer)
        assert (row["underflow"], row["amax"]) == (pytest.approx(lost, abs=1e-6), pytest.approx(amax, rel=1e-5))
        assert row["overflow"] <= 1e-3 and row["non_finite"] == 0
    assert (
        kinds
        == {
            "zeropp": {"weights", "gradients", jobs.WITHIN} | (kinds & {f"compute_{role}" for role in jobs.ROLES}),
            "lossless": set(),
            "fp8-lm": {"weights", "gradients", "compute_activations", "compute_gradients"},
            "fp8-lm-zeropp": {"weights", "gradients", jobs.WITHIN, "compute_activations", "compute_gradients"},
            "zeropp-exact": {"gradients", jobs.WITHIN},
            "mxfp8": {"weights", "gradients", jobs.WITHIN, *(f"compute_{role}" for role in jobs.ROLES)},
            "qlora": {"weights", "gradients", jobs.WITHIN},
        }[recipe]
    )


def check_told(told, rows):
    """Of each kind the lowest signal-to-noise and the highest shares."""
    for kind in {row["kind"] for row in rows}:
        mine = [row for row in rows if row["kind"] == kind]
        snr_db = [row["snr_db"] for row in mine if row["snr_db"] is not None]
        assert told.get(f"numerics/{kind}/lowest_snr_db") == (min(snr_db) if snr_db else None)
        for name in ("amax", "underflow", "overflow", "non_finite"):
            assert told[f"numerics/{kind}/highest_{name}"] == max(row[name] for row in mine)


def test_each_sample_shows_something(tmp_path):
    """Also of a model with fewer units than `parts`, and of each matrix after as many samples as there are units."""
    matrices, samples = run_two(jobs.sampled_in_turn, path=str(tmp_path / "numerics.jsonl"))[0]
    assert len(samples) == 6
    for rows in samples:
        assert {"weights", "gradients"} <= {row["kind"] for row in rows}
    for kind in ("weights", "gradients"):
        assert {row["layer"] for rows in samples[:4] for row in rows if row["kind"] == kind} == matrices


def test_samples_of_a_run_that_resumes(tmp_path):
    assert run_two(jobs.sampled_after_a_resume, folder=str(tmp_path))[0] == [3, 6]


def test_an_engine_that_evaluates_only_is_not_observed(tmp_path):
    """A reference model with the policy's ds_config; nor does it count among the engines that train."""
    found = run_two(jobs.beside_a_reference, path=str(tmp_path / "numerics.jsonl"))
    assert found == [([0, 2], [0]), ([0, 2], [])]


def test_beside_a_later_engine(tmp_path):
    """Samples say what they cannot look at."""
    alone, beside, after = run_two(jobs.beside_a_later_engine, path=str(tmp_path / "numerics.jsonl"))[0]
    assert "numerics of step 1" in alone and "dB" in alone and "a later engine" not in alone
    assert "numerics of step 2" in beside and "a later engine over this model has: call its destroy()" in beside
    assert "numerics of step 3" in after and "a later engine" not in after


def test_bisect_finds_the_gemm_and_the_layer(tmp_path):
    """Of compute the output of a layer; of weights the matrix."""
    for compute, weights in run_ranks(jobs.bisected, folder=str(tmp_path)):
        lines, names = compute
        named = f'{{"output": ["{jobs.FAULTY}"]}}'
        assert "compute carries most of the difference" in lines and "output carries most of that" in lines
        assert lines[-2:] == [
            "it is in 1 of 14 layers; these are in high precision with",
            f'"compute": {{"high_precision_gemms": {named}}}, besides what is there',
        ]
        assert names[:2] == ["in high precision", "as it is"] and names[-1].startswith("with 1 of 14 layers in high ")
        lines, _ = weights
        assert "weights carries most of the difference" in lines
        assert lines[-2:] == [
            "it is in 1 of 16 layers; these are in high precision with",
            f'"weights": {{"skip_modules": ["{jobs.FAULTY}"]}}, besides what is there',
        ]


def test_an_experiment_records_what_a_loop_sees(tmp_path):
    for recorded, by_hand, told, drawn in run_two(jobs.compared, folder=str(tmp_path)):
        for name, (losses, norms) in recorded.items():
            assert losses == pytest.approx(by_hand[name][0], rel=1e-12)
            assert norms == pytest.approx(by_hand[name][1], rel=1e-12)
        assert recorded["as it is"] != recorded["lossless"]
        same, other_data, other_model = told
        assert same is None and "saw different data from step 1 on" in other_data
        assert "began with different weights" in other_model
        layers, exact, table, png = drawn
        assert layers.keys() == exact.keys() and len(exact) == 16 and png == b"\x89PNG"
        for name, (first, *later) in layers.items():
            assert first == pytest.approx(exact[name], rel=0.25), name  # four times what 128 sums scatter by
            assert len(later) == 2 and all(0 < value < 1 for value in later)
        ratios = [layers[name][0] / exact[name] for name in layers]
        assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.1)
        assert table.splitlines()[1].startswith(max(layers, key=lambda name: layers[name][0]))


def test_an_experiment_ends_when_the_engine_that_is_asked_for_has_made_its_steps(tmp_path):
    for found in run_two(jobs.two_engines, folder=str(tmp_path)):
        assert found == {0: [2, 1], 1: [2, 2]}


SKIPPED = {"weights": {"skip_modules": ["up_proj", "layers.1.self_attn"]}, "gradients": {"skip_modules": ["down_proj"]}}
TRAVELLING = [
    {},
    {"recipe": "zeropp-pcie", "topology": {"ranks_per_node": 1}},  # with error feedback
    {"partition": "whole_tensor"},
]


def test_layers_that_travel_in_high_precision():
    """Samples list the named layers, and no others."""
    for of_rank in run_ranks(jobs.travelling, cases=[case | SKIPPED for case in TRAVELLING]):
        for case, found in zip(TRAVELLING, of_rank):
            for name, (as_it_rests, db) in found.items():
                vector = "norm" in name
                assert as_it_rests == (vector or "up_proj" in name or "layers.1.self_attn" in name), (case, name)
                assert (db > 100) == (vector or "down_proj" in name), (case, name, db)


def test_the_command_runs_a_launch_line_twice(tmp_path):
    """Under torchrun, of a script that knows nothing of it, with the ds_config as it is."""
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zeropp_fp8": {"recipe": "zeropp", "topology": {"ranks_per_node": 1}, "weights": {"format": "int4"}},
    }
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    script = tmp_path / "script.py"
    at_exit = "import atexit, torch\natexit.register(lambda: print('groups:', torch.distributed.is_initialized()))\n"
    script.write_text(at_exit + (TESTS / "system/unmodified_script.py").read_text())
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "zeropp_fp8.run"]
    line += [str(script), "--deepspeed", "--deepspeed_config", str(path)]
    command = [sys.executable, "-m", "zeropp_fp8", "reference", "--steps", "3", "--repeat", "--picture", "p.png"]
    command += ["--", *line]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    runs = ["as it is", "in high precision", "in high precision, again"]
    assert lines[:3] == [f"zeropp_fp8: 3 steps {name}" for name in runs]
    rows = [[float(word) for word in line.split()] for line in lines[4:7]]
    assert [row[0] for row in rows] == [1, 2, 3]
    for _, loss, lossless, difference, *norms in rows:
        assert 0 < abs(loss - lossless) < 0.1 and difference == pytest.approx(loss - lossless, rel=0.01, abs=2e-6)
        assert norms[0] != norms[1] and norms[0] == pytest.approx(norms[1], rel=0.3)
    mean_square = sum(row[3] ** 2 for row in rows) / 3
    assert float(re.match(r"as it is: loss differs by (\S+),", lines[7])[1]) == pytest.approx(
        mean_square**0.5, rel=0.02
    )
    assert lines[8].startswith("lossless again: loss differs by 0, gradient norm by 0 ")
    assert lines[9].split() == ["gradients", "differ", "first", "step", "all", "steps"] and 11 <= len(lines) <= 15
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    assert (
        done.stderr.count("step 1 loss") == 3 * 2 and "step 2 loss" not in done.stderr
    )  # the last step ends the ranks
    assert done.stderr.count("groups: False") == 3 * 2, "threads of gloo may outlive Python, and abort"
