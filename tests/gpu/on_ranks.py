"""Run a script of this folder on ranks that may share GPUs, once per module of tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from hang_guard import HANG

from benchmarks.harness.nodes import launch

FOLDERS = ("tests", "tests/gpu", "tests/system/bytes", "tests/system/parity")  # where scripts find jobs


def results_of(script: str, ranks: int, folder: Path) -> dict[str, dict]:
    """Return what a script writes to the file that it is given, by case; its ranks are two nodes."""
    out, gpus = folder / "result.json", torch.cuda.device_count()
    env = {"DS_ACCELERATOR": "cuda"}  # the tests' own is the CPU
    arguments = script, [str(out)], ranks, folder / "store", HANG
    launch(*arguments, namespaces=False, environment=env, folders=FOLDERS, gpus=gpus)
    found = json.loads(out.read_text())
    for case, result in found.items():
        print(case, result.get("error", ""))
    return found
