"""Mixtures of experts in benchmarks: their sizes, their values in shards, the speed of their experts."""

import json

import pytest
import torch

from benchmarks import fp8_experts
from benchmarks.harness.hf_llama import maker_of
from benchmarks.harness.sizes import MIXTURES
from benchmarks.plan_fit.points import load_points


@pytest.mark.parametrize("name", MIXTURES)
def test_sizes_are_those_of_the_models(name):
    with torch.device("meta"):
        model = maker_of(MIXTURES[name])()
    assert sum(p.numel() for p in model.parameters()) == MIXTURES[name].parameters


def test_the_shape_of_qwen3_30b_a3b():
    """https://huggingface.co/Qwen/Qwen3-30B-A3B: 30.5 billion parameters."""
    assert MIXTURES["30b-a3b"].parameters == pytest.approx(30.5e9, rel=2e-3)


def test_speed_of_experts(tmp_path, capsys, monkeypatch):
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["fp8_experts", "--tokens", "32,1", "--out", str(out)])
    fp8_experts.main()
    result = json.loads(out.read_text())
    assert result["finished"] and [row["tokens"] for row in result["rows"]] == [32] * 4 + [1] * 4
    assert [row["run"] for row in result["rows"]] == [*fp8_experts.RUNS] * 2
    assert all(row["ms"] > 0 and row["times_bf16"] > 0 for row in result["rows"])
    assert "8 experts of 64, 32 tokens to 2 of them each" in capsys.readouterr().out


def test_the_plan_passes_over_mixtures(tmp_path):
    row, path = {"run": "zeropp", "gbit": 25, "step_ms": 500.0}, tmp_path / "result.json"
    named, by_sizes = {"model": "4b-moe"}, {"settings": {"model": vars(MIXTURES["4b-moe"])}}
    for said in (named, by_sizes):
        path.write_text(json.dumps({**said, "rows": [row]}))
        assert load_points(path) == []
    path.write_text(json.dumps({"rows": [row]}))
    assert len(load_points(path)) == 1
