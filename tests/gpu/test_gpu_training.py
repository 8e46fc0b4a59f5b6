"""Training on several GPUs over NCCL: what tests/system/ asserts over gloo, by benchmarks/bit_parity.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hang_guard import HANG

from benchmarks.harness.parity_cases import CASES

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The script's result for each case, by name; run once for both tests."""
    ranks = min(4, torch.cuda.device_count() // 2 * 2)
    if not ranks:
        pytest.skip("needs 2 CUDA devices; this machine has one")
    out = tmp_path_factory.mktemp("bit_parity") / "result.json"
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "--max-restarts",
        "2",
    ]
    env = {**os.environ, "DS_ACCELERATOR": "cuda"}  # the tests' own is the CPU
    done = subprocess.run(
        [*torchrun, "-m", "benchmarks.bit_parity", "--out", str(out)], cwd=ROOT, env=env, timeout=HANG
    )
    rows = {row["case"]: row for row in json.loads(out.read_text())["rows"]}
    assert (done.returncode == 0) == all(row["well"] for row in rows.values())
    return rows


@pytest.mark.parametrize(
    "case, reference",
    [
        ("stock-leaf, again", "stock-leaf"),
        ("lossless block, 2 nodes", "stock-leaf"),
        ("lossless block, 1 node", "stock-leaf"),
        ("lossless block, secondary", "stock-leaf"),
        ("lossless block, delays", "stock-leaf"),
        ("lossless block, exact, delays", "stock-leaf"),
        ("stock, again", "stock"),
        ("lossless module, 2 nodes", "stock"),
        ("lossless module, 1 node", "stock"),
        ("zeropp large, again", "zeropp large"),
        ("zeropp large, delays", "zeropp large"),
        ("zeropp large, accumulation, delays", "zeropp large, accumulation"),
        ("fp8-lm large, accumulation, delays", "fp8-lm large, accumulation"),
    ],
)
def test_bit_parity(rows, case, reference):
    assert rows[case]["result"] == f"equal to {reference}"
    # Not by the script's own comparison only: losses, norms and the hash of all weights as they were written.
    for key in ("losses", "norms", "weights_sha256"):
        assert rows[case][key] == rows[reference][key]


def test_features(rows):
    features = {name: row["result"] for name, row in rows.items() if row.get("part") == "features"}
    assert features.keys() == {case.name for case in CASES if case.part == "features"}
    assert not {name: result for name, result in features.items() if result.startswith("FAILED")}
