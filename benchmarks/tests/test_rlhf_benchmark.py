"""benchmarks/rlhf_step.py: what it counts against formulas written out, its comparison, its command line."""

import argparse
import json
import math
import subprocess
import sys

import pytest
import torch
from hang_guard import HANG
from ranks import run_ranks

from benchmarks import rlhf_step
from benchmarks.rlhf_step import compare, measure, parse, show
from tests.places import ROOT

# The tiny Llama: hidden 256, 3 layers with 4 heads of which 2 have keys, MLP of 768, 512 tokens.
LINEAR = 3 * (256 * 256 + 2 * 256 * 128 + 256 * 256 + 3 * 256 * 768)
EMBEDDING, NORMS, HEAD = 512 * 256, 7 * 256, 256
ACTOR, CRITIC = LINEAR + NORMS + 2 * EMBEDDING, LINEAR + NORMS + EMBEDDING + HEAD
ADAPTER = 3 * 16 * (2 * (256 + 256) + 2 * (256 + 128) + 3 * (256 + 768))
# Bytes per parameter, scales included: QLoRA (arXiv 2305.14314), section 3; 8 bits with a scale per tensor.
NF4, FP8 = 0.5 + 0.127 / 8, 1
# Bytes of both ranks. PEFT keeps a head for each adapter, and the one that was there.
WEIGHTS = {
    "stock-four": 4 * (ACTOR + CRITIC) + 2 * (2 * ADAPTER + HEAD),
    "qlora": 2 * LINEAR * NF4 + 2 * (ACTOR + CRITIC - 2 * LINEAR + 4 * ADAPTER + 2 * HEAD),
    "stock-full": 4 * (ACTOR + CRITIC),
    "fp8-lm": 2 * (ACTOR + CRITIC) + 2 * LINEAR * FP8 + 2 * (ACTOR + CRITIC - 2 * LINEAR),
}
LORA, FULL = 2 * ADAPTER + HEAD, ACTOR + CRITIC
TRAINED = {"stock-four": LORA, "qlora": LORA, "stock-full": FULL, "fp8-lm": FULL}


def rows_of(run):
    """Return what each of two ranks, a node each, measures."""
    args = {"size": "tiny-gqa", "batch": 2, "prompt": 7, "tokens": 9, "warmup": 1, "steps": 2, "ranks": 2, "leaf": True}
    args = argparse.Namespace(**args, gbit=None)
    env = {"NODE_INTERFACE": "lo"}
    return run_ranks(measure, 2, ranks_per_node=1, env=env, name=run, args=args, device=torch.device("cpu"))


@pytest.mark.parametrize("run", WEIGHTS)
def test_bytes_and_phases(run):
    row, same = rows_of(run)
    assert row == same  # of all ranks together
    assert row["parameters"] == 2 * (ACTOR + CRITIC)
    kinds = row["bytes"]
    assert kinds["all"] == sum(kinds[kind] for kind in ("weights", "states", "secondary", "rest"))
    assert min(kinds.values()) >= 0
    assert row["built"]["weights"] == kinds["weights"]
    assert row["trained_parameters"] == TRAINED[run]
    assert kinds["weights"] == pytest.approx(WEIGHTS[run] / 2, rel=1e-3)
    # Master weights and two moments in fp32, and of stock gradients in bf16, which the plugin drops after the step;
    # FP8-LM (arXiv 2310.18313), section 2: 2 + 1 + 2 and 1.
    states = {"fp8-lm": 6, "qlora": 12}.get(run, 14)
    assert kinds["states"] == pytest.approx(states * TRAINED[run] / 2, rel=5e-3)
    assert (row["built"]["states"] < kinds["states"]) == (run != "fp8-lm")  # AdamW's moments come with the first step
    # A node has a copy of the frozen codes, half of which are this rank's own, and one in 8 bits of what is not stored.
    copy, others = LINEAR * NF4, ACTOR + CRITIC - 2 * LINEAR + 4 * ADAPTER + 2 * HEAD
    assert kinds["secondary"] == 0 if run != "qlora" else copy < kinds["secondary"] < copy + 1.2 * others
    for phase in ("experience", "training"):
        times = row[f"{phase}_times_ms"]
        assert len(times) == 2 and row[f"{phase}_ms"] == sum(times) / 2 > 0
    assert row["training_tx_bytes_per_node"] is None  # no link is measured
    assert len(row["losses"]) == 3
    assert all(math.isfinite(loss) for losses in row["losses"] for loss in losses.values())
    assert row["losses"][0]["value_loss"] > 0


def test_over_ranks():
    """The slowest rank and the busiest node of each iteration, then the median; bytes of the fullest rank."""
    ranks = [
        {
            "times": [(1.0, 10.0), (2.0, 40.0), (9.0, 20.0)],
            "sent": [(5, 7), (6, 8), (1, 9)],
            "losses": [{"value_loss": 1.0}],
            "bytes": {"weights": 5, "all": 6},
            "built": {"weights": 1, "all": 3},
            "peak": 4,
        },
        {
            "times": [(3.0, 30.0), (1.0, 20.0), (1.0, 50.0)],
            "sent": [(4, 8), (4, 1), (2, 10)],
            "losses": [{"value_loss": 2.0}],
            "bytes": {"weights": 2, "all": 7},
            "built": {"weights": 2, "all": 2},
            "peak": 3,
        },
    ]
    row = rlhf_step._over_ranks(ranks)
    assert (row["experience_times_ms"], row["experience_ms"]) == ([3.0, 2.0, 9.0], 3.0)
    assert (row["training_times_ms"], row["training_ms"]) == ([30.0, 40.0, 50.0], 40.0)
    assert (row["experience_tx_bytes_per_node"], row["training_tx_bytes_per_node"]) == (5, 8)
    assert (row["bytes"]["weights"], row["built"]["weights"], row["peak_bytes"]) == (2, 1, 4)
    assert row["losses"] == [{"value_loss": 1.5}]


def test_the_script(tmp_path):
    out = tmp_path / "result.json"
    given = ["--runs", "stock-lora", "--size", "tiny-gqa", "--warmup", "1", "--steps", "1", "--out", str(out)]
    given += ["--batch", "1", "--prompt", "4", "--tokens", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.rlhf_step", *given], cwd=ROOT, capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert [row["run"] for row in result["rows"]] == ["stock-lora"]
    assert result["failed"] == []
    assert done.stdout.splitlines()[-1].split()[0] == "stock-lora"
    assert "memory in MiB a rank" in done.stdout


def row_of(run, training_ms, weights, states):
    kinds = {"weights": weights, "states": states, "secondary": 3, "rest": 4, "all": weights + states + 7}
    return {
        "run": run,
        "training_ms": training_ms,
        "experience_ms": 1.0,
        "peak_bytes": None,
        "training_tx_bytes_per_node": None,
        "bytes": kinds,
        "parameters": 100,
        "trained_parameters": 10,
    }


def test_comparison(capsys):
    """With LoRA there are two stocks to compare with, else one; the fastest round counts."""
    rows = [row_of("stock-lora", 30.0, 30, 70), row_of("stock-four", 60.0, 40, 70), row_of("qlora", 20.0, 10, 70)]
    rows += [row_of("qlora", 15.0, 10, 70), row_of("zeropp", 8.0, 25, 80)]
    lines = {line["run"]: line for line in compare(rows, ranks=4)}
    assert list(lines) == ["stock-lora", "stock-four", "qlora", "zeropp"]
    qlora, zeropp = lines["qlora"], lines["zeropp"]
    assert (qlora["times_stock-lora"], qlora["times_stock-four"], qlora["times_stock-full"]) == (2.0, 4.0, None)
    assert qlora["of_bf16_computed"] == 10 / (100 * 2 / 4)
    assert qlora["of_bf16_measured"] == 10 / 40
    assert qlora["states_per_trained_parameter"] == 70 * 4 / 10
    assert [zeropp[f"times_{stock}"] for stock in ("stock-lora", "stock-four", "stock-full")] == [None] * 3
    assert zeropp["of_bf16_measured"] is None
    settings = {
        "nodes": 2,
        "ranks": 4,
        "gbit": 25.0,
        "batch": 1,
        "prompt": 2,
        "tokens": 3,
        "size": "8b",
    }
    show({"rows": rows, "comparison": list(lines.values()), "settings": settings})
    printed = capsys.readouterr().out
    assert "2 node(s) x 2 rank(s), 25 Gbit/s between nodes" in printed
    assert printed.splitlines()[-2].split()[:4] == ["qlora", "15.0", "2.00", "4.00"]


def test_all_runs_by_default():
    args = parse([])
    assert args.runs == ["stock-lora", "stock-four", "qlora", "stock-full", "zeropp", "fp8-lm", "fp8-lm-zeropp"]
    assert (args.ranks, args.nodes, args.leaf) == (1, 1, True)


@pytest.mark.parametrize(
    "given, message",
    [
        (["--runs", "stock-lora,stock"], "unknown run stock; runs are stock-lora"),
        (["--gbit", "-1"], "--gbit: -1: give a finite number of at least 0"),
        (["--gbit", "25"], "1 ranks cannot be cut into 2 nodes"),
        (["--steps", "0"], "--steps: 0: give a whole number of at least 1"),
        (["--warmup", "0"], "--warmup: 0: give a whole number of at least 1"),
    ],
)
def test_command_line_errors(given, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(given)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
