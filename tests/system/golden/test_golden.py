"""No recipe changes a bit: training of today is compared with golden.json."""

import json
import subprocess
import sys

import pytest
import torch

from tests.hang_guard import HANG
from tests.places import ROOT
from tests.system.golden.golden_traces import KEPT, environment, merged, names

GOLDEN = json.loads(KEPT.read_text())
STOCK = "stock, 1 x 4"


@pytest.fixture(scope="module")
def recorded(request, tmp_path_factory):
    """The traces of today that are asked for.

    A test is skipped where plain torch computes other bits than where golden.json was made.
    """
    found = torch.__version__.partition("+")[0]
    if found != GOLDEN["torch"]:
        pytest.skip(f"golden.json is of torch {GOLDEN['torch']}, and this is {found}")
    path = tmp_path_factory.mktemp("golden") / "traces.json"
    command = [sys.executable, "-m", "tests.system.golden.golden_traces", "--out", str(path)]
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    command += [item.callspec.params["trace"] for item in items] or [STOCK]
    run = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert run.returncode == 0, run.stderr[-4000:]
    traces = json.loads(path.read_text())
    if traces["arithmetic"] != GOLDEN["arithmetic"]:
        pytest.skip("plain torch trains to other bits on this machine than where golden.json was made")
    return traces["traces"]


def test_every_recipe_is_kept(request):
    missing = [name for name in names() if name not in GOLDEN["traces"]]
    if missing:
        request.getfixturevalue("recorded")  # skips where they cannot be recorded
    command = "python -m tests.system.golden.golden_traces --out tests/system/golden/golden.json"
    assert not missing, f"run: {command} {' '.join(map(json.dumps, missing))}"
    assert list(GOLDEN["traces"]) == names()


def test_single_traces_are_recorded_into_the_others():
    recorded = {**GOLDEN, "traces": {STOCK: {"fresh": "new"}}}
    found = merged({**GOLDEN, "traces": {"gone, 1 x 4": {}, **GOLDEN["traces"]}}, recorded)
    assert list(found["traces"]) == names() and found["traces"] == GOLDEN["traces"] | recorded["traces"]
    for key in ("torch", "arithmetic"):
        with pytest.raises(ValueError, match=f"{key} is other here, and {GOLDEN[key]} where .* record all"):
            merged(GOLDEN, {**recorded, key: "other"})


@pytest.mark.parametrize("trace", GOLDEN["traces"])
def test_trace(trace, recorded):
    for run, kept in GOLDEN["traces"][trace].items():
        found = recorded[trace][run]
        assert found == kept, f"{trace}, {run}: {[key for key in kept if found[key] != kept[key]]} changed"


def test_what_the_kept_traces_say():
    """A resumed run goes on as if it had never ended, accumulation differs, and the exact recipe is stock."""
    for trace, runs in GOLDEN["traces"].items():
        for part in ("weights", "states", "extra"):
            assert runs["fresh"][part] == runs["resumed"][part], (trace, part)
        assert runs["fresh"]["weights"] != runs["accumulated"]["weights"], trace
        assert runs["fresh"]["weights"] == GOLDEN["traces"][STOCK]["fresh"]["weights"] or trace[:8] != "lossless"
