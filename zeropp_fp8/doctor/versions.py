"""Which packages are there, which are needed, and how a run gets the plugin."""

from __future__ import annotations

import configparser
import os
import platform
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

import zeropp_fp8
from zeropp_fp8.config import RECIPE_VARIABLE
from zeropp_fp8.doctor.problems import Problem

SHOWN = ("torch", "triton", "deepspeed", "transformers", "peft", "accelerate", "trl", "torchao")
LONGEST_COMPILATION = 1200  # seconds; `cpu_adam` takes some minutes on two cores


def versions() -> dict[str, str]:
    """The versions of Python, this package, CUDA, NCCL and those of SHOWN that are there."""
    import torch

    found = {"python": platform.python_version(), "zeropp_fp8": zeropp_fp8.__version__}
    found |= {name: installed for name in SHOWN if (installed := _version(name)) is not None}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def needed() -> list[str]:
    """The package's requirements as its metadata has them, Python's first; those of a checkout that is not installed
    from its setup.cfg."""
    try:
        return [f"python{metadata('zeropp_fp8')['Requires-Python']}", *(requires("zeropp_fp8") or [])]
    except PackageNotFoundError:
        parser = configparser.ConfigParser()
        parser.read(Path(zeropp_fp8.__file__).parents[1] / "setup.cfg")
        options = parser["options"]
        return [f"python{options['python_requires']}", *options["install_requires"].split("\n")[1:]]


def version_problems(requirements: list[str]) -> list[Problem]:
    """A problem for each package that is missing or outside its range; extras are not needed."""
    from packaging.requirements import Requirement

    problems = []
    for line in requirements:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, wanted = requirement.name, str(requirement.specifier)
        found = platform.python_version() if name == "python" else _version(name)
        remedy = "start with another Python" if name == "python" else f'pip install "{name}{wanted}"'
        if found is None:
            problems.append(Problem(f"{name} is not installed, and {name}{wanted} is needed", remedy))
        elif not requirement.specifier.contains(found, prereleases=True):
            problems.append(Problem(f"{name} {found} is outside of what is supported, {wanted}", remedy))
    return problems


def deepspeed_problem() -> Problem | None:
    """Where DeepSpeed cannot be imported here, or lacks a name that the plugin relies on."""
    from zeropp_fp8.plugin.relied_on import verify

    try:
        verify()
    except RuntimeError as error:
        return Problem(str(error))
    except Exception as error:  # what DeepSpeed raises on import depends on compilers, drivers and accelerators
        remedy = "mend that first; on a machine without a GPU set DS_ACCELERATOR=cpu"
        return Problem(f"DeepSpeed cannot be imported: {type(error).__name__}: {error}", remedy)
    return None


def compilation_problems() -> Iterator[Problem]:
    """Locks of compilations of DeepSpeed's ops that were killed: each later start waits for them, in silence."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "torch_extensions").expanduser()
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cache
    for lock in sorted(path for depth in ("*/lock", "*/*/lock") for path in Path(root).glob(depth)):
        made = lock.stat().st_mtime
        if time.time() - made > LONGEST_COMPILATION:
            what = f"{lock} is of {time.ctime(made)}: a job that needs this op of DeepSpeed waits for it, for ever"
            yield Problem(what, "delete it, unless a compiler still runs", serious=False)


def looks_at_ds_configs() -> bool:
    """Whether the plugin's .pth file was read when this interpreter started, so that a section is enough."""
    return "zeropp_fp8_autoload" in sys.modules and os.environ.get("ZEROPP_FP8_AUTOLOAD") != "0"


def switched_on() -> str:
    by_hand = "-m zeropp_fp8.run or zeropp_fp8.enable()"
    if not looks_at_ds_configs():
        return f"by {by_hand} alone: ds_configs are not looked at (ZEROPP_FP8_AUTOLOAD=0, or not installed by pip)"
    recipe = os.environ.get(RECIPE_VARIABLE)
    others = f", {RECIPE_VARIABLE}={recipe} in others" if recipe else ""
    return f"by the section of a ds_config, which is looked at{others}; or {by_hand}"
