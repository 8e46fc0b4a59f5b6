"""benchmarks/rlhf_sft.py: its rows, its table, and the whole script with one recipe."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from common.tokenizer import make_byte_tokenizer
from common.tokens import encode_sft
from hang_guard import HANG

from benchmarks.rlhf_sft import parse, show, write_rows


def test_rows_are_as_long_as_asked(tmp_path):
    write_rows(tmp_path / "rows.jsonl", 128, 5)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    items = [encode_sft(row, make_byte_tokenizer(), 128) for row in rows]
    assert [len(item["input_ids"]) for item in items] == [128] * 5
    assert [sum(item["response_mask"]) for item in items] == [128 - 64] * 5, "all but the prompt"
    assert len({row["completion"] for row in rows}) == 5


def test_ratios_are_to_the_better_of_bf16(capsys):
    row = {"losses": [2.0, 1.5], "memory_gb": 3.0}
    show([row | {"recipe": name, "tokens_s": s} for name, s in (("stock", 100), ("lossless", 110), ("fp8-lm", 143))])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[-3:]] == [
        ["stock", "100", "0.91"], ["lossless", "110", "1.00"], ["fp8-lm", "143", "1.30"],
    ]  # fmt: skip


def test_refusals(capsys):
    with pytest.raises(SystemExit):
        parse(["--recipes", "nonsense"])
    assert "there is no ds_configs/nonsense.json" in capsys.readouterr().err


def test_the_script(tmp_path):
    command = [sys.executable, "-m", "benchmarks.rlhf_sft", "--recipes", "lossless", "--steps", "1"]
    command += ["--out", str(tmp_path / "sft.json")]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "sft.json").read_text())["rows"]
    assert row["recipe"] == "lossless" and row["tokens_s"] > 0 and row["parameters"] > 100_000
    assert row["losses"][0] == pytest.approx(5.77, abs=0.1), "log 320: nothing is known at the start"
