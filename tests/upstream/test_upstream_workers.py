"""Running DeepSpeed's tests in processes that may die or hang, here with a few tests in its place."""

import json
import multiprocessing
import time

import psutil
import pytest
from upstream.upstream_plugin import raised_in_pools
from upstream.workers import Run, lines_of

TESTS = """
import os
import subprocess
import sys
import threading
import pytest
from zeropp_fp8.config import RECIPE_VARIABLE

print("import")

class TestOutcomes:
    def test_passes(self):
        print("zeropp_fp8: recipe lossless (from ...)")
    def test_fails(self):
        assert False, "of its own"
    def test_skips(self):
        pytest.skip("no GPU")
    def test_starts(self):
        subprocess.run([sys.executable, "-c", "raise ValueError('of a child')"], check=True)

class TestDeath:
    def test_before(self):
        pass
    def test_dies(self):
        os._exit(7)
    def test_after(self):
        assert not os.environ.get(RECIPE_VARIABLE)

@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_stage(zero_stage):
    assert zero_stage == 3

def test_hangs():
    threading.Event().wait()
"""


@pytest.fixture
def upstream(tmp_path):
    folder = tmp_path / "DeepSpeed" / "tests" / "unit"
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(TESTS)
    # As DeepSpeed has one: without it pytest takes the settings of any folder above, also those of others in /tmp.
    (folder.parent / "pytest.ini").write_text("[pytest]\n")
    return tmp_path / "DeepSpeed"


def a_run(upstream, tmp_path, timeout=600, gpus=()):
    return Run(upstream / "tests", tmp_path / "stock.jsonl", None, timeout, list(gpus))


def forever():
    return time.monotonic() + 1e6


def test_each_test_gets_a_result(upstream, tmp_path):
    tests = a_run(upstream, tmp_path).collect(["unit"])
    names = [test.removeprefix("unit/test_some.py::") for test in tests]
    assert names == [
        "TestOutcomes::test_passes",
        "TestOutcomes::test_fails",
        "TestOutcomes::test_skips",
        "TestOutcomes::test_starts",
        "TestDeath::test_before",
        "TestDeath::test_dies",
        "TestDeath::test_after",
        "test_stage[3]",
        "test_hangs",
    ]
    a_run(upstream, tmp_path).run(tests[:-1], 2, forever())
    finished = a_run(upstream, tmp_path).finished()
    found = [finished[test] for test in tests[:-1]]
    assert [one["outcome"] for one in found] == [
        "passed",
        "failed",
        "skipped",
        "failed",
        "passed",
        "failed",
        "passed",
        "passed",
    ]
    assert [one["engines"] for one in found] == [1, 0, 0, 0, 0, 0, 0, 0]
    assert found[3]["says"].startswith("ValueError: of a child\n") and "exit status 1" in found[3]["says"]
    assert found[1]["says"].startswith("AssertionError: of its own") and "no GPU" in found[2]["says"]
    assert "the process died" in found[5]["says"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["DeepSpeed", "stock.jsonl"]

    again = len(lines_of(tmp_path / "stock.jsonl"))
    a_run(upstream, tmp_path).run(tests[:-1], 2, forever())  # nothing is left to do
    assert len(lines_of(tmp_path / "stock.jsonl")) == again


LEAVES = """
import os
import subprocess
import sys
from pathlib import Path

def test_dies_before_its_rank():
    waits = "import os, threading; print(os.getpid(), flush=True); threading.Event().wait()"
    rank = subprocess.Popen([sys.executable, "-c", waits], stdout=subprocess.PIPE, start_new_session=True)
    Path("rank").write_bytes(rank.stdout.readline())
    os._exit(7)
"""


def test_ranks_in_sessions_of_their_own_end_too(upstream, tmp_path):
    """As launchers start them; where the test that started them has been cut off."""
    (upstream / "tests/unit/test_some.py").write_text(LEAVES)
    run = a_run(upstream, tmp_path)
    run.run(run.collect(["unit"]), 1, forever())
    rank = int((upstream / "tests/rank").read_text())
    assert not psutil.pid_exists(rank) or psutil.Process(rank).status() == psutil.STATUS_ZOMBIE


def test_a_test_that_hangs_has_failed(upstream, tmp_path):
    test = "unit/test_some.py::test_hangs"
    a_run(upstream, tmp_path, timeout=0.1).run([test], 1, forever())
    found = a_run(upstream, tmp_path).finished()[test]
    assert (found["outcome"], found["says"]) == ("failed", "hung: no rank has raised anything")


def test_what_the_deadline_cuts_off_has_no_result(upstream, tmp_path):
    a_run(upstream, tmp_path).run(["unit/test_some.py::test_hangs"], 1, time.monotonic())
    assert a_run(upstream, tmp_path).finished() == {}


def test_workers_begin_with_different_gpus(upstream, tmp_path):
    (upstream / "tests/unit/test_gpus.py").write_text(
        "import os\ndef test_them(): assert False, os.environ['CUDA_VISIBLE_DEVICES']\n"
    )
    run = a_run(upstream, tmp_path, gpus=["4", "5", "6"])
    for worker, expected in ((1, "5,6,4"), (3, "4,5,6")):
        (_, result) = run._run_pytest(worker, ["unit/test_gpus.py"])[0]
        assert result["says"].startswith(f"AssertionError: {expected}")


def test_nothing_collected_is_an_error(upstream, tmp_path):
    with pytest.raises(RuntimeError, match="pytest collected nothing"):
        a_run(upstream, tmp_path).collect(["unit/no_such_file.py"])


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "lines"
    path.write_text(json.dumps({"test": "a"}) + '\n{"test": "b"')
    assert lines_of(path) == [{"test": "a"}] and lines_of(tmp_path / "none") == []


def raise_or_wait(rank, release):
    if rank == 0:
        raise ValueError("of rank 0")
    release.wait()


def test_what_a_rank_raised_is_known_while_others_wait():
    context = multiprocessing.get_context("fork")
    release = context.Manager().Event()
    with context.Pool(2) as pool:
        result = pool.starmap_async(raise_or_wait, [(0, release), (1, release)], chunksize=1)
        while result._success:
            time.sleep(0.01)
        assert raised_in_pools() == ["ValueError('of rank 0')"]
        release.set()
        with pytest.raises(ValueError, match="of rank 0"):
            result.get()
