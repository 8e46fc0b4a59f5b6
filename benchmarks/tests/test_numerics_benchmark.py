"""benchmarks/numerics_cost.py: two engines in turns, and what it makes of their times."""

import math
import os
import subprocess
import sys

import pytest
from hang_guard import HANG

from benchmarks import numerics_cost
from benchmarks.harness.environment import ROOT
from benchmarks.harness.results import finished_result
from benchmarks.report.numerics import numerics_cost_says


def line_of(cycles):
    (line,) = numerics_cost.compare([{"run": "zeropp", "cycles_ms": cycles}], group=4)
    return line


def test_what_a_sample_costs():
    """Steps of 100 ms, 100.2 with an idle section, and 20 ms a sample: 0.2 % and 0.2 % by one in 100, in any cycle."""
    cycles = [[400 + drift, 400.8 + drift, 400 + drift, 420.8 + drift] for drift in (-80, -2, -1, 0, 1, 2, 300)]
    line = line_of(cycles)
    assert line["without_ms"] == pytest.approx(100) and line["cycles"] == 7
    assert line["idle_percent"] == pytest.approx([0.2] * 3)
    assert line["sample_ms"] == pytest.approx([20] * 3) and line["sample_percent"] == pytest.approx([0.2] * 3)
    assert line["percent"] == pytest.approx([0.4] * 3) and line["verdict"] == "met"


def test_a_drift_inside_cycles_is_no_cost_of_the_section():
    assert line_of([[396, 400, 404, 408]] * 6)["idle_percent"] == pytest.approx([0] * 3)


@pytest.mark.parametrize(
    ("idle", "verdict"),
    [([404.4] * 6, "missed"), ([396] * 6, "met"), ([401, 402, 403, 404, 405, 406], "not resolved")],
)
def test_verdicts(idle, verdict):
    assert line_of([[400, ms, 400, ms] for ms in idle])["verdict"] == verdict


@pytest.mark.parametrize("count", range(numerics_cost.LEAST, 60))
def test_intervals_of_the_median(count):
    """The smallest that symmetric ranks give: one rank further inside, the true median is outside too often."""
    median, low, high = numerics_cost.median_of(range(count, 0, -1))
    assert median == (count + 1) / 2 and low - 1 == count - high

    def outside(cut):
        return 2 * sum(math.comb(count, heads) for heads in range(cut + 1)) / 2**count

    assert outside(low - 1) <= 0.05 < outside(low)


def test_too_few_cycles_are_refused(capsys):
    with pytest.raises(SystemExit):
        numerics_cost.parse(["--parts", "2", "--turns", "2"])
    assert "an interval takes 6 cycles" in capsys.readouterr().err


def test_on_two_ranks(tmp_path):
    out = tmp_path / "cost.json"
    words = ["--ranks", "2", "--nodes", "2", "--runs", "fp8-lm", "--parts", "1", "--turns", "99"]
    words += ["--seconds", "0.1", "--out", str(out)]  # which is over at once: as few cycles as an interval takes
    command = [sys.executable, "-m", "benchmarks.numerics_cost", *words]
    env = {**os.environ, "ZEROPP_FP8_COMMIT": "tested"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    result = finished_result(out)
    (row,), (line,) = result["rows"], result["comparison"]
    assert len(row["cycles_ms"]) == 6 and all(len(times) == 4 for times in row["cycles_ms"])
    for kind in ("weights", "gradients", "compute_activations"):
        assert f"numerics/{kind}/lowest_snr_db" in row["sampled_last"]
    assert line["without_ms"] > 0 and f"fp8-lm, {line['without_ms']:.1f} ms per step, 6 cycles" in done.stdout
    assert "Cost of sampled numerics, Llama tiny, 2 rank(s) in 2 nodes on the links of one" in done.stdout
    several = result | {"hardware": {"gpu": "H100"}, "comparison": [line, line | {"run": "zeropp-exact"}]}
    said = numerics_cost_says(several)
    assert said.count("| 2 H100 (2 nodes on the links of one) | `") == 2 and "| `zeropp-exact` |" in said
