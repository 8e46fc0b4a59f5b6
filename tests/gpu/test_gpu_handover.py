"""A hand-over to another process over NCCL, which needs a GPU for each of the two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hang_guard import HANG

from tests.places import python_path

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).parent / "handover_script.py"


def test_handover_over_nccl(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL joins processes with a GPU each; this machine has one")
    env = {**os.environ, "DS_ACCELERATOR": "cuda", "PYTHONPATH": python_path()}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)], env=env, capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))[7:])
    (whole, first), (changed, second) = found.pop("changes")
    assert first and second and 0 < changed < whole
    assert found["adapters"]["after a step"] == found["adapters"]["adapters"] < found["merged"]["after a step"] / 10, (
        found
    )
    for way, of_way in found.items():
        assert of_way["equal"] and of_way["messages"] > (way != "adapters"), found
        # A block and a message: a model of 12 blocks is several times that.
        assert of_way["grown"] < of_way["model"] / 2, found
