"""A benchmark's surroundings: the record of hardware, versions and command, and how a rank makes itself ready."""

from __future__ import annotations

import datetime
import gc
import logging
import os
import platform
import subprocess
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
NO_IN_TREE = (
    "DeepSpeed's own ZeRO++ needs CUDA: its quantizer is an op that nvcc compiles at run time, and there is no GPU here"
)


def describe(question: str) -> dict:
    """Question, date, commit, hardware, versions and command of this process, for the head of a result file."""
    return {
        "question": question,
        "date": datetime.date.today().isoformat(),
        "commit": measured_commit(),
        "command": " ".join([*_nccl(), f"python -m benchmarks.{question}", *map(_without_folder, sys.argv[1:])]),
        "hardware": _hardware(),
        "versions": versions(),
    }


def versions() -> dict[str, str | None]:
    """Of Python and of the packages that results depend on, here; None: not there."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        **{name: _version(name) for name in ("deepspeed", "transformers", "triton")},
    }


def _nccl() -> list[str]:
    """Return what NCCL was told, as one writes it before a command; but for what `nodes.launch` always sets."""
    told = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    told.pop("NCCL_NVLS_ENABLE", None)
    return [f"{name}={value}" for name, value in sorted(told.items())]


def measured_commit() -> str:
    """The commit that is measured, with "+" where files differ from it.

    A copy of the files without their history is told it in ZEROPP_FP8_COMMIT.

    Raises:
        SystemExit: it is not known; a figure without it says nothing.
    """
    if os.environ.get("ZEROPP_FP8_COMMIT"):  # an empty one says nothing
        return os.environ["ZEROPP_FP8_COMMIT"]

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=7", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        sys.exit("which commit is measured is not known here: set ZEROPP_FP8_COMMIT (git rev-parse --short HEAD)")


def _without_folder(argument: str) -> str:
    """An absolute path says where somebody's files lie, not what was run: keep its name only."""
    head, equals, tail = argument.rpartition("=")
    return head + equals + Path(tail).name if tail.startswith("/") else argument


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _hardware() -> dict:
    import torch

    hardware = {"cpu": _cpu_name(), "cpu_cores": os.cpu_count(), "gpus": torch.cuda.device_count()}
    if hardware["gpus"]:
        hardware["gpu"] = torch.cuda.get_device_name(0)
        hardware["gpu_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    return hardware


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def join(with_deepspeed: bool = True):
    """Join the process group from what `launch` put into the environment; returns this rank's device."""
    import torch
    import torch._dynamo  # torch 2.13: zero.Init breaks its import, so it must come first
    import torch.distributed as dist

    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames collectives that older ones only have so
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        os.environ["DS_ACCELERATOR"] = "cpu"
    backend = "nccl" if on_gpu else "gloo"
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        backend,
        store=dist.FileStore(os.environ["STORE_FILE"], world),
        rank=int(os.environ["RANK"]),
        world_size=world,
        device_id=device if on_gpu else None,
    )
    if with_deepspeed:
        import deepspeed

        deepspeed.utils.logger.setLevel(logging.WARNING)
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # 30 s of gcc on a CPU, for nothing used here
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
    return device


def forget_memory(device) -> int:
    """Free what can be freed; returns the bytes still allocated."""
    import torch

    gc.collect()
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def forget_in_tree_groups() -> None:
    """A group left by in-tree hpZ would shard the next run's parameters inside a node, and stop a second hpZ run."""
    import deepspeed

    deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def build_in_tree_op() -> None:
    """Compile DeepSpeed's CUDA op of ZeRO++ (about 33 s, once a machine): rank 0 first, the others load its result."""
    import torch
    import torch.distributed as dist
    from deepspeed.ops.op_builder import QuantizerBuilder

    major, minor = torch.cuda.get_device_capability()
    os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"  # its build fails for 9.0a, what torch may choose itself
    if dist.get_rank() == 0:
        QuantizerBuilder().load()
    dist.barrier()
    QuantizerBuilder().load()
