"""Weights as they arrive in one process: the formats' own bytes, equal beginnings, and what the kept result says."""

import json

import pytest
import torch

from benchmarks import weight_fidelity as question
from benchmarks.harness.results import RESULTS, finished_result, read_result
from benchmarks.report import wire
from zeropp_fp8.formats import make_format


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [0.02 * torch.randn(shape, generator=generator) for shape in ((40, 33), (7,), (64, 64))]


@pytest.mark.parametrize("way", [question.INT8, question.INT4, ("fp8_e4m3", {"block_size": 256})])
def test_what_travels_whole_is_what_the_format_makes_of_it(way):
    sent = [one.bfloat16() for one in weights()]
    wire_of = question.Wire(question.Way(way), sent)
    wire_format = make_format(way[0], **way[1])
    for one, arrived in zip(sent, wire_of.send(sent)):
        expected = wire_format.decode(wire_format.encode(one), one.shape, one.dtype) if one.dim() > 1 else one
        assert torch.equal(arrived, expected)
    assert wire_of.sent == wire_of.kept == wire_format.payload_bytes(40 * 33) + 16 + wire_format.payload_bytes(64 * 64)


def test_differences_come_nearer_and_are_cheap():
    """First all, then half a byte per number; weights that stay are approached."""
    sent = [one.bfloat16() for one in weights()]
    wire_of = question.Wire(question.Way(question.BF16, question.CHANGES), sent)
    assert question.decibels(sent, wire_of.send(sent)) is None and wire_of.sent == wire_of.kept
    moved = [(one + 0.001 * other).bfloat16() for one, other in zip(weights(), weights(1))]
    first = question.decibels(moved, wire_of.send(moved))
    assert wire_of.sent < 0.3 * wire_of.kept
    assert first > 50 and question.decibels(moved, wire_of.send(moved)) > first + 15


def test_decibels():
    """10 log10 of 100: a tenth of each number is missing; vectors do not count."""
    one = [torch.ones(3, 3), torch.ones(4)]
    assert question.decibels(one, [0.9 * torch.ones(3, 3), torch.zeros(4)]) == pytest.approx(20, abs=1e-5)


def test_runs(tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 400)
    out = tmp_path / "out.json"
    chosen = ["--runs", "bf16", "int4 then int8 at 50 %", "difference", "--seeds", "0", "1"]
    sizes = ["--steps", "4", "--batch", "2", "--sequence", "16", "--evaluations", "2", "--eval-sequences", "4"]
    question.main([*chosen, *sizes, "--data", str(text), "--out", str(out)])
    result = finished_result(out)
    rows = {(row["run"], row["seed"]): row for row in result["rows"]}
    assert len(rows) == 6 and "difference" in capsys.readouterr().out
    for seed in (0, 1):
        exact, switched, difference = (rows[run, seed] for run in ("bf16", "int4 then int8 at 50 %", "difference"))
        assert [point["step"] for point in exact["steps"]] == [0, 2, 4]
        assert exact["held_out_loss"] == exact["checkpoint_loss"] and exact["steps"][-1]["db"] is None
        assert exact["steps"][0]["held_out_loss"] == difference["steps"][0]["held_out_loss"]
        assert [point["db"] > 30 for point in switched["steps"]] == [False, True, True]
        assert difference["whole_gathers"] >= 1 and exact["whole_gathers"] == 5
    assert rows["bf16", 0]["held_out_loss"] != rows["bf16", 1]["held_out_loss"]
    json.dumps(result, allow_nan=False)
    question.main(["--merge", str(out), str(out), "--out", str(tmp_path / "merged.json")])
    assert len(finished_result(tmp_path / "merged.json")["rows"]) == 6


def test_what_the_page_says_of_the_kept_result():
    """No choice between INT8 and INT4 sends less than differences, or is nearer than they are on the same memory."""
    found = wire.by_run(read_result(RESULTS / "weight_fidelity/cpu-1-local.json"))
    on_int8 = found["difference on int8"]
    choices = [name for name in found if name.startswith("int")]
    assert len(choices) == 6
    for name in choices:
        assert wire.sent(found[name]) >= wire.sent(on_int8) == wire.sent(found["difference"]), name
        assert wire.decibels(found[name], -1) < wire.decibels(on_int8, -1) + 0.2, name
    for name in ("difference", "difference on int8"):
        assert wire.decibels(found[name], -1, "fp8_db") > wire.decibels(found["difference on fp8"], -1) - 0.5
