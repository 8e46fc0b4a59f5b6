"""Weights as they arrive in one process: the formats' own bytes, equal beginnings, and what the kept result says."""

import json

import pytest
import torch

from benchmarks import weight_fidelity as question
from benchmarks.harness.results import RESULTS, finished_result, read_result
from benchmarks.report import wire
from zeropp_fp8.config import difference_bits
from zeropp_fp8.formats import make_format


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [0.02 * torch.randn(shape, generator=generator) for shape in ((40, 33), (7,), (64, 64))]


@pytest.mark.parametrize("way", [question.INT8, question.INT4, ("fp8_e4m3", {"block_size": 256})])
def test_what_arrives_is_what_the_format_makes_of_it(way):
    sent = [one.bfloat16() for one in weights()]
    wire_of = question.Wire(way, sent)
    wire_format = make_format(way[0], **way[1])
    for one, arrived in zip(sent, wire_of.send(sent)):
        expected = wire_format.decode(wire_format.encode(one), one.shape, one.dtype) if one.dim() > 1 else one
        assert torch.equal(arrived, expected)
    assert wire_of.num_bytes == wire_format.payload_bytes(40 * 33) + 16 + wire_format.payload_bytes(64 * 64)


def test_bf16_arrives_as_it_is():
    sent = [one.bfloat16() for one in weights()]
    wire_of = question.Wire(question.BF16, sent)
    assert all(map(torch.equal, sent, wire_of.send(sent))) and question.decibels(sent, wire_of.send(sent)) is None


def test_decibels():
    """10 log10 of 100: a tenth of each number is missing; vectors do not count."""
    one = [torch.ones(3, 3), torch.ones(4)]
    assert question.decibels(one, [0.9 * torch.ones(3, 3), torch.zeros(4)]) == pytest.approx(20, abs=1e-5)


def test_runs(tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 400)
    out = tmp_path / "out.json"
    chosen = ["--runs", "bf16", "int4 then int8 at 50 %", "int8", "--seeds", "0", "1"]
    sizes = ["--steps", "4", "--batch", "2", "--sequence", "16", "--evaluations", "2", "--eval-sequences", "4"]
    question.main([*chosen, *sizes, "--data", str(text), "--out", str(out)])
    result = finished_result(out)
    rows = {(row["run"], row["seed"]): row for row in result["rows"]}
    assert len(rows) == 6 and "int4 then int8 at 50 %" in capsys.readouterr().out
    for seed in (0, 1):
        exact, switched, int8 = (rows[run, seed] for run in ("bf16", "int4 then int8 at 50 %", "int8"))
        assert [point["step"] for point in exact["steps"]] == [0, 2, 4]
        assert exact["held_out_loss"] == exact["checkpoint_loss"] and exact["steps"][-1]["db"] is None
        assert exact["steps"][0]["checkpoint_loss"] == int8["steps"][0]["checkpoint_loss"]
        assert [point["db"] > 30 for point in switched["steps"]] == [False, True, True]
        assert int8["kept_bytes_a_parameter"] == switched["kept_bytes_a_parameter"] < exact["kept_bytes_a_parameter"]
        assert switched["later_bytes_a_parameter"] < int8["later_bytes_a_parameter"]
    assert rows["bf16", 0]["held_out_loss"] != rows["bf16", 1]["held_out_loss"]
    json.dumps(result, allow_nan=False)
    question.main(["--merge", str(out), str(out), "--out", str(tmp_path / "merged.json")])
    assert len(finished_result(tmp_path / "merged.json")["rows"]) == 6


def test_what_the_page_says_of_the_kept_result():
    """Up to 1e-4 exact differences send less than any choice between INT8 and INT4, at 1e-3 hardly more than one."""
    found = wire.by_run(read_result(RESULTS / "weight_fidelity/cpu-1-local.json"))
    choices = {name: wire.sent(rows) for name, rows in found.items() if name.startswith("int")}
    assert len(choices) == 6 and difference_bits(1e-4) / 16 < min(choices.values()) == choices["int4"]
    least = min(sent for name, sent in choices.items() if " at " in name)
    assert least < difference_bits(1e-3) / 16 < 1.1 * least
    assert wire.decibels(found["bf16"], -1) is None, "as with exact differences"
    assert all(wire.decibels(found[name], -1) < 44 for name in choices)
