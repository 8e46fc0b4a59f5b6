"""benchmarks/numerics_cost.py: its variants in turn, and what it makes of their times."""

import os
import subprocess
import sys

import pytest
from hang_guard import HANG

from benchmarks import numerics_cost
from benchmarks.harness.environment import ROOT
from benchmarks.harness.results import finished_result


def test_what_a_sample_costs():
    """100 ms without, 101 beside it, and 4 steps with a sample take 4 x 101 + 20: 1 % and 0.2 % by one in 100."""
    times = {"without": (100.0, 100.0, 90.0), "idle": (101.0, 101.0, 101.0), "sampled": (106.0, 106.0, 150.0)}
    rows = [
        {"run": "zeropp", "variant": variant, "round": n, "step_ms": times[variant][n]}
        for variant in times
        for n in range(3)
    ]
    (line,) = numerics_cost.compare(rows, every=4)
    assert line["sample_ms"] == pytest.approx(20.0) and line["sample_steps"] == pytest.approx(0.2)
    assert line["unsampled_percent"] == pytest.approx(1.0)
    assert line["percent"] == pytest.approx(1.2) and not line["met"]
    assert line["spread_percent"] == pytest.approx(100 * (150 / 106 - 1))
    assert numerics_cost.compare([row for row in rows if row["variant"] != "idle"], every=4) == []


def test_variants_take_turns():
    args = numerics_cost.parse(["--rounds", "2", "--runs", "zeropp"])
    order = ["without", "idle", "sampled", "sampled", "idle", "without"]
    assert [job.arguments["variant"] for job in numerics_cost.turns(args)] == order


def test_on_two_ranks(tmp_path):
    out = tmp_path / "cost.json"
    words = ["--ranks", "2", "--runs", "zeropp-fp8", "--every", "2", "--turns", "1", "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.numerics_cost", *words]
    env = {**os.environ, "ZEROPP_FP8_COMMIT": "tested"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    result = finished_result(out)
    rows = {row["variant"]: row for row in result["rows"]}
    assert rows.keys() == set(numerics_cost.VARIANTS) and all(len(row["group_ms"]) == 2 for row in rows.values())
    assert rows["without"]["sampled_last"] == rows["idle"]["sampled_last"] == {}
    told = rows["sampled"]["sampled_last"]
    for kind in ("weights", "gradients", "compute_activations"):
        assert f"numerics/{kind}/lowest_snr_db" in told
    (line,) = result["comparison"]
    assert line["without_ms"] > 0 and "Cost of sampled numerics, Llama tiny, 2 rank(s)" in done.stdout
