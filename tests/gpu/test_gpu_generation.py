"""zeropp_fp8.generation on a GPU: kernels that multiply with codes, and memory that comes back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hang_guard import HANG

from tests.places import python_path

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).parent / "generation_script.py"


RUNS = [("qlora", "none", "bf16", "one"), ("qlora", "fp8", "bf16", "one"), ("lossless", "none", "bf16", "one")]
RUNS += [("qlora", "none", "fp32", "one"), ("qlora", "none", "fp32", "several")]


def result_of(*arguments):
    env = {**os.environ, "DS_ACCELERATOR": "cuda", "PYTHONPATH": python_path()}
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))[7:])


@pytest.mark.parametrize("recipe, compute, dtype, adapters", RUNS)
def test_generation(recipe, compute, dtype, adapters):
    result = result_of(recipe, compute, dtype, adapters)
    losses = result["losses"]
    assert losses[-1] < losses[0]
    for name, row in result["found"].items():
        # bf16 sums in another order and merged weights that are rounded: some 2^-8; FP8 products besides: some 2^-4.
        # In fp32 sums in another order decide no token.
        bound = 1e-4 if dtype == "fp32" else 0.02 if compute == "none" else 0.15
        assert row["error"] < bound and (row["same_tokens"] or dtype != "fp32"), (name, row)
        # All memory comes back. More may: a first pass of other shapes lets go of what training had cached. The first
        # graph leaves cuBLAS its workspace for the stream on which graphs are recorded.
        graph = name.endswith("graph")
        most = 2**26 if name == "values, True, 32, graph" else 2**16
        assert row["grown"] < most and row["shape"] == [4, 40], (name, row)
        # 7 tokens behind the prompt, with a graph the first of them and the one that is recorded; of 3 layers with 7
        # products each.
        passes = 2 if graph else 7
        with_lora = passes * 3 * (4 if adapters == "several" else 3)
        in_codes = name.startswith("codes") and recipe == "qlora" and compute == "none"
        assert row["in_codes"] == ([passes * 21 - with_lora, with_lora] if in_codes else [0, 0]), (name, row)
    if recipe == "qlora" and compute == "none" and dtype == "bf16":
        held = {name: row["held"] for name, row in result["found"].items()}
        assert held["codes, True, 32"] < 0.6 * held["values, True, 32"]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_mixtures(dtype):
    """For few tokens experts are multiplied with as their codes lie, for 128 rows they are decoded."""
    result = result_of("qlora", "none", dtype, "mixture")
    assert result["losses"][-1] < result["losses"][0]
    for name, row in result["found"].items():
        assert row["error"] < (1e-4 if dtype == "fp32" else 0.02), (name, row)
        assert row["same_tokens"] or dtype != "fp32", (name, row)
        passes = 2 if name.endswith("graph") else 7
        assert row["stacks"] == (passes * 3 * 2 if name.startswith("codes") else 0), (name, row)
    held = {name: row["held"] for name, row in result["found"].items()}
    assert held["codes, True, 32"] < 0.5 * held["values, True, 32"]
