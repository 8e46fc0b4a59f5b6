"""benchmarks/start.py on the CPU: that each part of a start is there, and what its target is compared with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hang_guard import HANG

from benchmarks.harness.environment import ROOT
from benchmarks.harness.starting import FIRST_STEP, PARTS
from benchmarks.start import compare, jobs, parse


@pytest.fixture
def arguments(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    return lambda *argv: parse(["--runs", "stock,zeropp,fp8-lm", *argv])


def test_start(tmp_path):
    out = tmp_path / "start.json"
    command = [sys.executable, "-m", "benchmarks.start", "--ranks", "2", "--size", "tiny", "--rounds", "1"]
    command += ["--runs", "stock,zeropp", "--out", str(out)]
    env = {**os.environ, "ZEROPP_FP8_COMMIT": "tested", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert not result["failed"] and [line["run"] for line in result["comparison"]] == ["stock", "zeropp"]
    assert len(result["rows"]) == 2, "the first start of all does not count"
    stock, zeropp = result["comparison"]
    assert set(zeropp["seconds"]) == set(PARTS) == {*stock["seconds"], "plugin"}
    for line in (stock, zeropp):
        assert all(seconds > 0 for seconds in line["seconds"].values()) and line["kernels"] == [0, 0]
        assert line["total_s"] == pytest.approx(sum(line["seconds"].get(part, 0) for part in FIRST_STEP))
    assert zeropp["more_s"] == zeropp["total_s"] - stock["total_s"] and "met" not in stock
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [], "caches are removed"


def test_starts_of_rounds(arguments, tmp_path):
    """Stock first and last; on GPUs each recipe with an empty cache, then with what that start has left in it."""
    args = arguments("--rounds", "2")
    args.on_gpu = True
    starts = [(job.arguments["round"], *job.runs, job.arguments["cache"]) for job in jobs(args)]
    of_recipes = [(run, cache) for run in ("zeropp", "fp8-lm") for cache in ("cold", "warm")]
    assert starts[:6] == [(-1, "stock", "none"), (0, "stock", "none"), *((0, *each) for each in of_recipes)]
    assert starts[6:] == [*((1, *each) for each in of_recipes[2:] + of_recipes[:2]), (1, "stock", "none")]
    caches = [job.environment["TRITON_CACHE_DIR"] for job in jobs(args)]
    assert caches[2] == caches[3] != caches[4] == caches[5] and len(set(caches)) == 7
    assert all(Path(folder).parent == tmp_path for folder in caches)
    args.on_gpu = False
    assert [job.arguments["cache"] for job in jobs(args)] == ["none"] * 7


def test_the_target():
    """By hand: the fastest rounds count, 13.0 - 10.0 is 3 s, 13.1 - 10.0 is more."""

    def row(run, total_s, cache="warm", round=0):
        return {"run": run, "cache": cache, "round": round, "total_s": total_s, "kernels": [0, 0], "seconds": {}}

    rows = [row("zeropp", 13.0), row("stock", 10.0, "none"), row("zeropp", 13.1, "cold"), row("stock", 15.0, "none", 1)]
    lines = {(line["run"], line["cache"]): line for line in compare([*rows, row("zeropp", 20.0, round=1)])}
    assert list(lines) == [("stock", "none"), ("zeropp", "cold"), ("zeropp", "warm")]
    assert lines["zeropp", "warm"]["met"] and not lines["zeropp", "cold"]["met"]
    assert lines["zeropp", "warm"]["total_s_by_round"] == [13.0, 20.0]
    assert [line for line in compare(rows[:1]) if "met" in line] == [], "without stock there is no verdict"
