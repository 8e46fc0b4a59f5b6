"""Several backwards over several forwards on two GPUs over NCCL: what tests/system/parity/test_backwards.py asserts."""

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


def test_gradients_add_up(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    env = {**os.environ, "DS_ACCELERATOR": "cuda", "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = tmp_path / "found.json"
    script = Path(__file__).with_name("backward_script.py")
    subprocess.run([*command, str(script), str(out)], env=env, timeout=HANG, check=True)
    for name, rows in json.loads(out.read_text()).items():
        for case, errors in rows:
            least_bits = 0.24 if "1 a node" in name else 0.13
            limit = 1e-4 if "exact" in name or case == "lossless" or name.startswith("odd, ") else least_bits
            assert max(errors if isinstance(errors, list) else [errors]) < limit, (name, case, errors)
