"""benchmarks/faults.py and soak.py: a few cases and steps through their command lines, and how they judge."""

import argparse
import json
import math
import subprocess
import sys

import pytest
from hang_guard import HANG

from benchmarks import faults, soak
from tests.places import ROOT


def called(script, out, options):
    """(exit status, what was printed, the result file)."""
    command = [sys.executable, "-m", script.__name__, *options.split(), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3 * HANG)
    assert out.exists(), done.stderr
    return done.returncode, done.stdout, json.loads(out.read_text())


def test_cases(tmp_path):
    """A rank that raises in backward or while it saves, and NaN; the time limits are far away: only real ends count."""
    options = f"--recipes zeropp --faults exception nan --places backward save --timeout {HANG} --margin {HANG}"
    status, printed, result = called(faults, tmp_path / "faults.json", options)
    assert status == 0, printed
    assert "3 of 3 cases are well, 0 are not" in printed
    in_backward, while_saving, nan = result["rows"]
    assert faults.CAUSE.search(in_backward["ranks"][0]["error"])
    assert "was not saved: rank 1: " in while_saving["ranks"][0]["error"]
    assert [rank["status"] for rank in in_backward["ranks"]] == [1, 1]
    assert [rank["status"] for rank in nan["ranks"]] == [0, 0]
    assert [row["resumed_from"] for row in result["rows"]] == [faults.SAVED] * 3


CLOSED = {"status": 1, "seconds": 0.1, "hung": False, "error": "RuntimeError: Connection closed by peer"}
KILLED = {"status": -9, "seconds": 0.1, "hung": False}


def nan_rank(loss, skipped=0):
    return {"status": 0, "seconds": 1, "hung": False, "skipped": skipped, "steps": {str(faults.LAST): [loss]}}


@pytest.mark.parametrize(
    "fault, ranks, said",
    [
        ("kill", [CLOSED, KILLED], None),
        ("kill", [CLOSED, {**KILLED, "seconds": None}], "never reached"),
        ("kill", [{**CLOSED, "hung": True}, KILLED], "rank 0 was still there"),
        ("kill", [{**CLOSED, "status": 0}, KILLED], "rank 0 ended with status 0"),
        ("kill", [{**CLOSED, "error": "IndexError: 3"}, KILLED], "rank 0 does not name the cause: IndexError: 3"),
        ("stop", [CLOSED, {**CLOSED, "status": 0}], "rank 1 ended with status 0"),
        ("nan", [nan_rank(math.nan), nan_rank(math.nan)], None),
        ("nan", [nan_rank(2.0, skipped=1), nan_rank(2.5, skipped=1)], None),
        ("nan", [nan_rank(2.0, skipped=1), nan_rank(2.0)], "ranks skipped [1, 0] steps"),
        ("nan", [nan_rank(2.0), nan_rank(math.nan)], "a later loss is NaN on some ranks"),
        ("nan", [nan_rank(2.0), nan_rank(2.0)], "a later loss is NaN on some ranks, or on none"),
    ],
)
def test_judging_the_start_with_the_fault(tmp_path, fault, ranks, said):
    for rank in range(2):
        (tmp_path / f"log{rank}").write_text("printed")
    wrong = faults.wrong_in(argparse.Namespace(struck=1), fault, ranks, tmp_path)
    assert wrong is None if said is None else said in wrong


def test_judging_the_next_start(tmp_path):
    right = [{"steps": {"1": [4.0], "2": [3.0], "3": [2.0], "4": [1.0]}}]
    resumed = {"status": 0, "loaded": 2, "steps": {"3": [2.0], "4": [1.0]}}
    assert faults.wrong_after([resumed], right, tmp_path) is None
    for wrong in ({"loaded": 0}, {"steps": {"3": [2.0], "4": [1.0000001]}}, {"steps": {"3": [2.0]}}):
        assert "from step" in faults.wrong_after([{**resumed, **wrong}], right, tmp_path)


def test_soak(tmp_path):
    """A short run notes these; so soon, how much memory it takes says nothing."""
    status, printed, result = called(soak, tmp_path / "soak.json", "--recipes lossless --steps 8 --every 2")
    ranks = result["recipes"]["lossless"]
    assert [[note["step"] for note in rank["notes"]] for rank in ranks] == [[2, 4, 6, 8]] * 2
    assert all(min(note.values()) > 0 for rank in ranks for note in rank["notes"])
    assert status == int(any(rank["too_much"] for rank in ranks)) and "lossless, rank 1, 8 steps: " in printed


@pytest.mark.parametrize(
    "each_step, too_much",
    [
        ({}, []),
        ({"rss": 100_000}, ["rss"]),
        ({"descriptors": 0.01}, ["descriptors"]),
        ({"tensor_bytes": 1}, ["tensor_bytes"]),
    ],
)
def test_what_grows(each_step, too_much):
    still = {"rss": 1 << 29, "descriptors": 25, "threads": 10, "tensor_bytes": 1 << 20}
    notes = [{"step": s} | {k: int(v + s * each_step.get(k, 0)) for k, v in still.items()} for s in range(50, 1001, 50)]
    assert soak.growth(notes)["too_much"] == too_much
