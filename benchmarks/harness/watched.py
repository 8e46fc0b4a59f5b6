"""A training script, run as it is, whose engines tell how their weights change in a step (harness/changes.py).

    PYTHONPATH=.:FOLDER_OF_SCRIPT WATCHED_STEPS=1,2,10 WATCHED_OUT=changes.jsonl \\
        python benchmarks/harness/watched.py SCRIPT [ARGUMENTS]

Each line of the file is of one engine's step: its number among the engines that step, in the order in which they begin,
the number of its step, and the learning rate. One rank, so that its parts are whole.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path


def watch(steps: set[int], out: Path) -> None:
    """Let engines of DeepSpeed write down the changes of these steps, the first being 1."""
    import deepspeed
    import torch

    from benchmarks.harness.changes import changes

    real, numbers = deepspeed.DeepSpeedEngine.step, {}

    def masters(engine) -> dict[str, torch.Tensor]:
        named = ((name, p) for name, p in engine.module.named_parameters() if p.requires_grad)
        parts = ((name, deepspeed.utils.safe_get_local_fp32_param(p), p.ds_shape) for name, p in named)
        return {name: part.view(shape) for name, part, shape in parts}

    def step(engine, *args, **kwargs):
        number = numbers.setdefault(id(engine), len(numbers))
        if not engine.is_gradient_accumulation_boundary() or engine.global_steps + 1 not in steps:
            return real(engine, *args, **kwargs)
        before = {name: weight.clone() for name, weight in masters(engine).items()}
        real(engine, *args, **kwargs)
        after = masters(engine)
        line = {"engine": number, "step": engine.global_steps, "lr": engine.get_lr()[0]}
        for dtype in (torch.bfloat16, torch.float16):
            line[str(dtype).removeprefix("torch.")] = changes(before, after, dtype)
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")

    deepspeed.DeepSpeedEngine.step = step


def main() -> None:
    place = next(
        i for i, word in enumerate(sys.argv[1:], start=1) if not word.startswith("--")
    )  # the launcher's are first
    script, sys.argv = sys.argv[place], [sys.argv[place], *sys.argv[1:place], *sys.argv[place + 1 :]]
    watch(set(map(int, os.environ["WATCHED_STEPS"].split(","))), Path(os.environ["WATCHED_OUT"]))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
