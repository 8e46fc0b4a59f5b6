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
    same, written = found.pop("folder")
    assert same == [True, True] and 0 < written < found["merged"]["all"] / 2
    for way, of_way in found.items():
        assert of_way["equal"] and of_way["first"] == of_way["all"], found
        whole = of_way["all"]
        assert of_way["after a step"] == whole if way == "adapters" else 0 < of_way["after a step"] < whole / 2, found
        # What went last, and a block as it is gathered and as it is sent: a model of 12 blocks is several times that.
        assert of_way["grown"] < of_way["model"] * 1.5, found
