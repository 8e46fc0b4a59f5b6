"""benchmarks/handover_link.py on the CPU, without a link: what it sends, and that its two processes end."""

import json
import os
import subprocess
import sys

from hang_guard import HANG

from benchmarks.harness.environment import ROOT


def test_a_trainer_and_a_receiver(tmp_path):
    out = tmp_path / "found.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.handover_link",
        "--size",
        "tiny-bytes",
        "--repeats",
        "1",
        "--out",
        str(out),
    ]
    env = {**os.environ, "ZEROPP_FP8_COMMIT": "tested"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["run"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["whole", "exact", "exact-background"]
    assert rows["whole"]["bits_per_weight"] == 16
    for run in ("exact", "exact-background"):
        assert 0 < rows[run]["bits_per_weight"] < 0.5 and rows[run]["stalled"] <= rows[run]["seconds"]
        assert f"\n{run} " in done.stdout
