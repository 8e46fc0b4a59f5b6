"""The suites that run with the plugin: DeepSpeed's own, and those of the libraries that train with it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import hub

BETWEEN = Path(__file__).parent / "between"  # see its only file


@dataclass(frozen=True)
class Suite:
    """Tests that concern ZeRO-3, where they lie in a checkout.

    `tests`: files or folders below the one that pytest runs in; of those what is there. `hub`: whether they ask for
    models and data by names of the Hugging Face hub, in whose place small random ones stand (see hub.py).
    """

    package: str
    tests: tuple[str, ...]
    hub: bool = True


SUITES = {
    "deepspeed": Suite("deepspeed", ("unit/v1/zero", "unit/runtime/zero", "unit/checkpoint"), hub=False),
    "accelerate": Suite("accelerate", ("tests/deepspeed",)),
    "transformers": Suite("transformers", ("tests/trainer/distributed/test_trainer_distributed_deepspeed.py",)),
    "trl": Suite("trl", ("tests/distributed",)),
}


def prepare(suite: Suite, upstream: Path, out: Path) -> tuple[Path, dict[str, str]]:
    """(where pytest runs, what its processes find in their environment besides).

    Children are started by launchers, so what has to reach them is in the environment. Accelerate's puts the folder
    where it runs before site-packages: `tests` is a package there, and a library in it hides the installed one, so the
    tests are copied to a folder with nothing else but a link to what is installed.
    """
    if not suite.hub:
        return upstream / "tests", {"PYTHONPATH": os.pathsep.join([str(upstream / "tests"), *_given_paths()])}
    tree = out / "tree"
    if not tree.exists():
        shutil.copytree(upstream / "tests", tree / "tests")
        # With no file of settings, pytest takes those of a folder above: of this project, where OUT is in it.
        (tree / "pytest.ini").write_text("[pytest]\n")
        (tree / suite.package).symlink_to(Path(importlib.util.find_spec(suite.package).origin).parent)
    hub.make(out / "hub")
    return tree, {
        "HF_HOME": str(out / "hub"),
        "HF_HUB_OFFLINE": "1",
        "RUN_SLOW": "1",  # the tests with launchers
        "WANDB_MODE": "offline",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(BETWEEN), *_given_paths()]),
    }


def _given_paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
