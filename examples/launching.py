"""Starting a training script under the `deepspeed` launcher, on the GPUs that are there or on the CPU."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

MOST_RANKS = 4


def device(multiple_of: int = 1, ranks: int = 0) -> tuple[str, int]:
    """(accelerator, ranks): GPUs where there are enough of them, else CPU processes.

    Args:
        multiple_of: without `ranks`, their number is a multiple of it on GPUs.
        ranks: so many; 0: up to 4 GPUs, or 4 CPU processes.
    """
    import torch

    gpus = torch.cuda.device_count()
    if ranks:
        return ("cuda" if gpus >= ranks else "cpu"), ranks
    if gpus >= multiple_of:
        return "cuda", min(gpus, MOST_RANKS) // multiple_of * multiple_of
    return "cpu", MOST_RANKS


def computes_in_bf16(accelerator: str) -> bool:
    """False on a processor without bf16 instructions, where torch's bf16 matrix products are many times slower."""
    import torch

    return accelerator == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def free_port() -> int:
    """A TCP port of this host that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(name: str, script: Path, arguments: Sequence[object], accelerator: str, ranks: int) -> None:
    """Run `script` on `ranks` ranks of this host to its end, with this process's own standard output.

    Args:
        name: what to call it where it says that it starts, or that it failed.

    Raises:
        SystemExit: it failed.
    """
    scripts = Path(sysconfig.get_paths()["scripts"])
    # What the command `deepspeed` runs; as a module it is found wherever DeepSpeed is installed.
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--quiet", "--num_accelerators", str(ranks)]
    command += ["--master_port", str(free_port()), str(script), *map(str, arguments)]
    environment = dict(os.environ)
    environment["PATH"] = f"{scripts}{os.pathsep}{environment.get('PATH', '')}"
    # DeepSpeed calls torch functions that torch 2.13 has renamed; four ranks would say so in each run.
    environment.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    if accelerator == "cpu":
        environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        # With more ranks than cores, ranks would interrupt each other at every message: twice the time, where they are
        # 4 on 2 cores. What is started from here inherits the policy.
        if hasattr(os, "SCHED_BATCH"):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    print(f"\n== {name}: {shlex.join(command[1:])}", flush=True)
    code = subprocess.run(command, env=environment).returncode
    if code:
        raise SystemExit(f"{Path(sys.argv[0]).stem}: the run {name} failed with exit status {code}; its error is above")


def hardware(accelerator: str) -> dict:
    """Return what the runs ran on."""
    import torch

    found = {"platform": platform.platform(), "cores": os.cpu_count(), "processor": platform.processor()}
    information = Path("/proc/cpuinfo")
    if information.exists():
        names = [
            line.partition(":")[2].strip() for line in information.read_text().splitlines() if "model name" in line
        ]
        found["processor"] = names[0] if names else found["processor"]
    if accelerator == "cuda":
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return found
