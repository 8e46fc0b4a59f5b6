"""A job waits at its start for no library that its script does not use."""

import os
import subprocess
import sys

from hang_guard import HANG

from tests.places import ROOT

SCRIPT = """
import sys
import deepspeed, torch
import torch.distributed as dist
from torch import nn
import zeropp_fp8

zeropp_fp8.enable()
deepspeed.utils.logger.setLevel("WARNING")
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
for recipe in sys.argv[2:]:
    layers = [nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(4)]
    for layer in layers[:2]:
        layer.requires_grad_(recipe != "qlora")
    model = nn.Sequential(*layers)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3},
        "zeropp_fp8": {"recipe": recipe},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    engine.backward(engine(torch.ones(4, 64, dtype=torch.bfloat16)).float().square().mean())
    engine.step()
    engine.destroy()
names = ("transformers", "peft", "accelerate", "trl", "zeropp_fp8.kernels", "zeropp_fp8.doctor", "zeropp_fp8.plan")
print("imported:", *(name for name in (*names, "zeropp_fp8.numerics") if name in sys.modules))
"""


def test_a_job_on_a_cpu_imports_no_library_that_its_script_does_not(tmp_path):
    """A model with transformers' layers has imported it: to look for such layers is no reason to."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "PYTHONPATH": str(ROOT)}
    recipes = ("lossless", "zeropp", "fp8-lm", "qlora", "mxfp8")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "store"), *recipes]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].split() == ["imported:"]
