"""benchmarks/loading.py on the CPU: peaks of loading, and what they are compared with."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from hang_guard import HANG

from benchmarks.harness.environment import ROOT
from benchmarks.harness.host_memory import PeakOfMemory
from benchmarks.loading import compare


def test_the_peak_of_memory(tmp_path):
    """Of what is gone at the end too, and without pages of a file, but for those that were written."""
    numel = 2**25
    torch.ones(numel, dtype=torch.uint8).numpy().tofile(tmp_path / "file")
    blocks = [bytearray(b"1" * 30_000) for _ in range(2000)]  # of the heap, as smaller ones than are mapped
    pin = blocks.pop()
    del blocks  # what is free below the pin stays with the process, as in one that has run other tests
    with PeakOfMemory() as memory:
        start, over = memory.peak, time.monotonic() + HANG
        held = torch.ones(numel, dtype=torch.uint8)
        while memory.peak < start + 0.9 * numel and time.monotonic() < over:  # on a busy machine threads start late
            time.sleep(0.001)
        del held
    assert memory.peak == pytest.approx(numel, rel=0.2) and memory.mapped < 0.2 * numel and pin
    with PeakOfMemory() as memory:
        mapped = torch.from_file(str(tmp_path / "file"), shared=False, size=numel, dtype=torch.uint8)
        assert mapped.max() == 1
    assert memory.mapped == pytest.approx(numel, rel=0.2) and memory.peak < 0.2 * numel


def test_loading(tmp_path):
    out = tmp_path / "loading.json"
    command = [sys.executable, "-m", "benchmarks.loading", "--ranks", "2", "--size", "tiny-moe", "--gb", "0.0001"]
    command += ["--runs", "stock-lora,nf4-dq", "--out", str(out)]
    env = {**os.environ, "ZEROPP_FP8_COMMIT": "tested", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    stock, stored = result["rows"]
    for row in (stock, stored):
        assert all(0 < rests < peak for rests, peak in zip(row["rest_bytes"], row["peak_bytes"])), row
        assert len(row["file_bytes"]) > 1 and max(row["file_bytes"]) < 1.5e5, row
        assert row["largest_bytes"] == 2 * 8 * 2 * 64 * 128, "of gate_up_proj"
    assert sum(stored["rest_bytes"]) < 0.6 * sum(stock["rest_bytes"])
    assert [line["run"] for line in result["comparison"]] == ["stock-lora", "nf4-dq"]
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [], "the checkpoint is removed"


def test_the_target():
    """By hand: the second rank has most beside what rests, 13 - 1, which is 1.2 times the largest file."""
    row = {"run": "nf4-dq", "peak_bytes": [14, 13], "rest_bytes": [3, 1], "file_bytes": [10, 5], "largest_bytes": 4}
    line = {"run": "nf4-dq", "beside_bytes": 12, "of_file": 1.2, "of_largest": 3.0, "met": True}
    assert compare([row]) == [line]
    (missed,) = compare([row | {"file_bytes": [9, 9]}])
    assert not missed["met"]
    assert "met" not in compare([row | {"run": "stock-lora"}])[0], "the target is the plugin's"
