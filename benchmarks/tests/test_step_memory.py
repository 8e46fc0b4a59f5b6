"""The account of a step's memory: by owner where most is allocated, from a trace; on a CPU, between steps."""

import json
import os
import subprocess
import sys

import pytest
from hang_guard import HANG

from benchmarks.harness import memory
from benchmarks.harness.environment import ROOT
from benchmarks.report.zero import memory_of_step


def event(action, addr, size, *places):
    frames = [{"filename": file, "name": name, "line": 1} for file, name in places]
    return {"action": action, "addr": addr, "size": size, "frames": frames}


MADE = ("/x/zeropp_fp8/zero/as_deepspeed.py", "_make")
ADAM = ("/x/torch/optim/adamw.py", "step")


def test_an_allocation_has_the_owner_of_its_innermost_known_frame():
    gather = ("/x/zeropp_fp8/zero/gather/gatherer.py", "finish")
    values = ("/x/zeropp_fp8/zero/gather/buffers.py", "empty")
    assert memory.owner_of([{"filename": f, "name": n} for f, n in (values, gather)]) == memory.WEIGHTS
    assert memory.owner_of([{"filename": f, "name": n} for f, n in (gather, values)]) == memory.GATHERS
    assert memory.owner_of([{"filename": "/x/model.py", "name": "forward"}]) == memory.REST
    assert memory.owner_of([]) == memory.REST


def test_the_highest_point_of_a_trace():
    """Memory is free when it is asked to be; an address may come again, with another owner."""
    before = {1: (memory.MASTER, 100), 2: (memory.BEFORE, 10)}
    events = [
        event("alloc", 3, 50),
        event("free_requested", 3, 50),
        event("free_completed", 3, 50),
        event("alloc", 3, 40, MADE),
        event("free_requested", 2, 10),
        event("alloc", 4, 30, ADAM),  # the highest: 170
        event("free_requested", 4, 30),
        event("free_requested", 9, 1000),  # allocated before, unseen
        event("alloc", 4, 29, ADAM),
    ]
    assert memory.at_peak(before, events) == {memory.MASTER: 100, memory.MOMENTS: 30, memory.GRADIENTS: 40}
    assert memory.at_peak(before, []) == {memory.MASTER: 100, memory.BEFORE: 10}


def test_on_a_cpu(tmp_path):
    """Weights and moments in fp32 stay on the ranks; gradients do not."""
    out, runs = tmp_path / "profile.json", ("zeropp", "fsdp2")
    command = [sys.executable, "-m", "benchmarks.step_profile", "--ranks", "2", "--model", "tiny"]
    command += ["--runs", ",".join(runs), "--tokens", "32", "--warmup", "1", "--steps", "1", "--out", str(out)]
    env = {**os.environ, "ZEROPP_FP8_COMMIT": "tested"}
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=HANG)
    rows = json.loads(out.read_text())["rows"]
    assert [row["run"] for row in rows] == list(runs)
    for row in rows:
        gib = row["memory"]["between_steps_gib"]
        assert gib[memory.MOMENTS] == pytest.approx(2 * gib[memory.MASTER], rel=1e-3)
        assert memory.GRADIENTS not in gib
        assert (memory.SHARD in gib) == (row["run"] == "zeropp")


def test_the_table():
    """An owner that no run has is left out; one that a run lacks is an empty cell."""
    phases = {"forward": 3.0, "backward": 4.0, "update": 2.0}
    fsdp = {"peak_gib": 4.0, "reserved_gib": 5.0, "phases_gib": phases, "at_peak_gib": {memory.MASTER: 1.0}}
    own = fsdp | {"at_peak_gib": {memory.SHARD: 0.5, memory.MASTER: 1.0}}
    rows = [{"run": run, "highest_gib": 4.5, "memory": made} for run, made in (("fsdp2", fsdp), ("zeropp", own))]
    made = memory_of_step({"rows": rows})
    assert made.splitlines() == [
        "| GiB | `fsdp2` | `zeropp` |",
        "|---|---|---|",
        "| peak of all steps, the first among them | 4.50 | 4.50 |",
        "| peak of a later step | 4.00 | 4.00 |",
        "| reserved | 5.00 | 5.00 |",
        "| forward | 3.00 | 3.00 |",
        "| backward | 4.00 | 4.00 |",
        "| update | 2.00 | 2.00 |",
        "| at the peak: 16-bit shard | | 0.50 |",
        "| at the peak: fp32 weights | 1.00 | 1.00 |",
    ]
