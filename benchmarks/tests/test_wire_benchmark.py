"""benchmarks/wire_convergence.py on 2 gloo ranks: equal runs, both cases, skipped runs, a failure."""

import os
import subprocess
import sys

import pytest
from hang_guard import HANG

from benchmarks.harness.environment import ROOT
from benchmarks.harness.results import finished_result
from benchmarks.wire_convergence import parse, place, waiting, weights_of

LENGTHS = ["--ranks", "2", "--steps", "3", "--sft-steps", "2", "--evaluations", "1", "--unit-layers", "2"]


def test_both_cases(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(25):
        (text / f"{number}.py").write_text(f'"""Some words about {number}."""\nx = {number}\n' * 20)
    folders = ["--folder", str(tmp_path / "results"), "--weights", str(tmp_path / "w"), "--out", str(tmp_path / "out")]
    words = [*LENGTHS, *folders, "--data", str(text), "--sft-data", str(text), "--sequence", "16"]
    args = parse(words)

    def done(*more):
        command = [sys.executable, "-m", "benchmarks.wire_convergence", *words, *more]
        env = {**os.environ, "ZEROPP_FP8_COMMIT": "tested"}
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANG)

    def file(case, run, seed):
        return finished_result(place(args, case, run, seed))

    first = done("--runs", "stock,lossless,zeropp-exact")
    assert first.returncode == 0, first.stdout + first.stderr
    stock, lossless, exact = (file("pretrain", run, 0) for run in ("stock", "lossless", "zeropp-exact"))
    for key in ("train", "held_out", "held_out_loss", "checkpoint_loss", "data"):
        assert stock[key] == lossless[key], "one beginning, one order, nothing rounded"
    assert lossless["checkpoint_loss"] == lossless["held_out_loss"], "bf16 weights are rounded master weights"
    assert [step for step, _ in stock["held_out"]] == [0, 3] and stock["held_out_loss"] < stock["held_out"][0][1]
    assert exact["held_out"][0] == lossless["held_out"][0] and exact["train"] != lossless["train"], "gradients rounded"
    assert exact["checkpoint_loss"] == exact["held_out_loss"], "no weight is rounded but to bf16"
    assert exact["commit"] == "tested" and exact["section"]["recipe"] == "zeropp-exact"
    assert stock["wire"] is None and exact["wire"]["per_step"]
    begun = place(args, "pretrain", "lossless", 0).stat().st_mtime_ns

    # The weights of the second seed cannot be read: its run fails, that of the first one goes on from what it has.
    weights_of(args, 1).write_bytes(b"no weights")
    second = done("--case", "sft", "--runs", "lossless", "--seeds", "1,0")
    assert second.returncode == 1 and "\nfailed: sft:lossless:1: " in second.stdout, second.stdout
    assert place(args, "pretrain", "lossless", 0).stat().st_mtime_ns == begun, "it is not trained again"
    sft = file("sft", "lossless", 0)
    assert sft["settings"]["lr"] == 2e-5 and sft["settings"]["from"]["lr"] == 6e-4
    assert sft["held_out"][0][1] < lossless["held_out"][0][1] - 0.1, "it begins with what was learned"

    other = parse([*words, "--runs", "lossless", "--lr", "1e-3"])
    with pytest.raises(ValueError, match="is of a run with another lr: give these, or another --folder"):
        waiting(other)
