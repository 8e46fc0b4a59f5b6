"""Test-wide settings: CPU accelerator, one thread. What tests import beside packages is on setup.cfg's pythonpath."""

import datetime
import gc
import os

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu" if os.environ.get("ZEROPP_FP8_TEST_DEVICE", "cpu") == "cpu" else "cuda")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ZEROPP_FP8_COMMIT", "tests")  # of results that nobody keeps: the history may not be there
os.environ.pop("ZEROPP_FP8_TRIAL", None)
os.environ.pop("ZEROPP_FP8_RECIPE", None)  # it would make another thing of every stage-3 ds_config without a section

import torch
from hypothesis import HealthCheck, settings

from tests.thinning import FULL, PART_VARIABLE, part_of

# How long an example takes, or how fast examples are made, tells of the machine.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

torch.set_num_threads(1)
# Ranks wake each other thousands of times a second. With more ranks than cores, half of the time went into a rank being
# interrupted by the one that it had just woken: 4 ranks on 2 cores took 3.1 s for what takes 1.6 s under this policy,
# which all that is started from here inherits.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_collection_finish():
    """Leave out of every later collection of garbage what was imported: dynamo's reset and DeepSpeed ask for them."""
    gc.collect()
    gc.freeze()


def pytest_configure(config):
    """Let a run of everything take one of two parts, in turns by the day; processes of workers inherit which."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and not FULL:
        os.environ.setdefault(PART_VARIABLE, str(datetime.datetime.now(datetime.timezone.utc).toordinal() % 2))
        part = f"{PART_VARIABLE}={os.environ[PART_VARIABLE]}: of tests/system, one part of 0 and 1"
        print(f"{part}; ZEROPP_FP8_TEST_FULL=1 runs both, and whole products", flush=True)


def _choose_part(config, items):
    """Leave out the other part of tests/system."""
    system = config.rootpath / "tests" / "system"
    functions = [
        (item.path, item.originalname) if item.path.is_relative_to(system) and hasattr(item, "callspec") else None
        for item in items
    ]
    kept = part_of(functions, int(os.environ[PART_VARIABLE]))
    config.hook.pytest_deselected(items=[item for item, keep in zip(items, kept) if not keep])
    items[:] = [item for item, keep in zip(items, kept) if keep]


def pytest_runtest_logreport(report):
    """Show a failure when it happens: a run that is stopped from outside prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}\n{report.longreprtext[-3000:]}", flush=True)


# Files that start first: with several workers a long one that comes last leaves the others idle.
LONGEST = "any_model golden compile endings installed differences zero numerics operators fp8_lm casts rlhf "
LONGEST += "examples numerics_watch conformance_kernels several_engines trainer_features breadth gathered backwards "
LONGEST += (
    "parity rlhf_demo checkpointed_functions pipeline pairs doctor wire_benchmark integrations freezing rlhf_runs"
)


def pytest_collection_modifyitems(config, items):
    if os.environ.get(PART_VARIABLE):
        _choose_part(config, items)
    place = {f"test_{name}": number for number, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; this machine has none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
