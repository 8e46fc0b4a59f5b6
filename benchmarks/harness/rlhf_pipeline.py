"""examples/rlhf/pipeline.py as a process, and the settings that benchmarks give it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness.environment import ROOT

FOLDER = ROOT / "examples/rlhf"
_ROLLOUT = {
    "rollout_batch": 512,
    "lr": 3e-5,
    "missing_eos_penalty": 1.0,
    "reward_weights": [1.0],
    "max_prompt_tokens": 32,
    "max_new_tokens": 12,
    "eval_batch": 512,
}
SETTINGS = {
    "base": {
        "make_data": {"model": "base", "text_characters": 0},
        "ds_config": {"train_micro_batch_size_per_gpu": 128},
        "sft": {"steps": 150, "lr": 3e-4, "warmup": 20, "max_tokens": 64, "log_every": 10},
        "reward": {"steps": 150, "lr": 1e-4, "warmup": 20, "max_tokens": 64, "centering": 0.01, "log_every": 10},
        "ppo": {"critic_lr": 1e-4, "kl_coefficient": 0.05, "reward_model_weight": 0.25, **_ROLLOUT},
        "grpo": _ROLLOUT,
        "evaluate": {"max_prompt_tokens": 32, "max_new_tokens": 12, "eval_batch": 512},
    },
}
SETTINGS["tiny"] = json.loads((FOLDER / "demo.json").read_text())
SETTINGS["tiny"]["grpo"] = {
    key: value for key, value in SETTINGS["tiny"]["ppo"].items() if key not in ("critic_lr", "kl_coefficient")
} | {"reward_model_weight": 0.0}


def pipeline(words: list[str], log: Path, deadline: float) -> None:
    """Run examples/rlhf/pipeline.py to its end.

    Raises:
        RuntimeError: it failed; with the end of its output.
        TimeoutError: the time is up.
    """
    with log.open("w") as file:
        command = [sys.executable, str(FOLDER / "pipeline.py"), *words]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            code = process.wait(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its ranks
            process.wait()
            raise TimeoutError(f"no time was left; the log ends with {log.read_text()[-300:]!r}") from None
    if code:
        raise RuntimeError(f"exit status {code}; the log ends with {log.read_text()[-2000:]}")
