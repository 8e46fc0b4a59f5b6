"""Bits of codes of changed weights: against codes written out weight by weight; and the benchmark on a CPU."""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from hang_guard import HANG
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import weight_changes
from benchmarks.harness import changes
from benchmarks.harness.environment import ROOT
from benchmarks.harness.results import RESULTS, read_result
from zeropp_fp8.config import difference_bits
from zeropp_fp8.formats import exact, make_format

EVERY = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_integers_in_the_order_of_the_numbers(dtype):
    """Every bit pattern has its own; of numbers that are neighbours they differ by 1."""
    numbers = EVERY.view(dtype)
    integers = exact.in_order(numbers)
    assert integers.unique().numel() == 2**16
    assert integers.min() == -(2**15) and integers.max() == 2**15 - 1
    in_order = numbers[integers.argsort()].float()
    finite = in_order[in_order.isfinite()]
    assert (finite[1:] >= finite[:-1]).all() and (finite[1:] == finite[:-1]).sum() == 1, "-0 and 0"
    exponents = changes.exponents_of(numbers)
    normal = numbers.float().isfinite() & (exponents > 0)
    bias = 127 if dtype == torch.bfloat16 else 15
    _, of_half = numbers[normal].float().frexp()
    assert torch.equal(exponents[normal] - bias, of_half.long() - 1)


def by_hand(old, new):
    """Bits of each code of the ordered integers `old` and `new` and of the exponents of the old ones."""
    integers, exponents = old
    difference = [b - a for a, b in zip(integers, new)]
    found, of_small = Counter(), range(0, len(difference), 32)
    cost = [0 if d == 0 else 2 + 16 * (abs(d) > 1) for d in difference]
    found["bitmaps"] = sum(1 + 32 * any(difference[i : i + 32]) for i in of_small) + sum(cost)
    for i in range(0, len(difference), 128):
        block, costs = difference[i : i + 128], sum(cost[i : i + 128])
        count = sum(d != 0 for d in block)
        found["places"] += 8 + min(7 * count + costs, 128 + costs, 16 * 128)
    seldom = set()
    for exponent in set(exponents):
        own = [d for d, e in zip(difference, exponents) if e == exponent]
        widths = [sum(w + 16 * (abs(d) > min(127, 2 ** (w - 1) - 1)) for d in own) for w in range(2, 9)]
        dense = min(*widths, 16 * len(own))
        if sum(1 + (d != 0) * 2 + 16 * (abs(d) > 1) for d in own) <= dense:
            seldom.add(exponent)
        else:
            found["exponents"] += dense
    both = list(zip(difference, exponents))
    for i in range(0, len(both), 128):
        small = [[d for d, e in both[j : j + 32] if e in seldom] for j in range(i, min(i + 128, len(both)), 32)]
        changed = [d for some in small for d in some if d]
        in_bitmaps = sum(1 + len(some) * any(some) for some in small)
        found["exponents"] += 1 + min(in_bitmaps, 8 + 7 * len(changed))
        found["exponents"] += sum(2 + 16 * (abs(d) > 1) for d in changed)
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2**16 - 1), st.sampled_from([0, 0, 0, 1, -1, 2, 9, 130, -40000])), max_size=300),
    st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_codes_against_those_by_hand(pairs, dtype):
    """Of any bit patterns, differences and number of weights."""
    pairs = pairs or [(0, 0)]
    old = torch.tensor([a for a, _ in pairs]).to(torch.int16)
    new = torch.tensor([max(-(2**15), min(2**15 - 1, a - 2**15 + d)) for a, d in pairs])
    before = torch.tensor([a - 2**15 for a, _ in pairs])
    patterns = torch.where(before < 0, -(2**15) - 1 - before, before).to(torch.int16).view(dtype)
    after = torch.where(new < 0, -(2**15) - 1 - new, new).to(torch.int16).view(dtype)
    assert torch.equal(exact.in_order(patterns).long(), before) and len(old) == len(pairs)
    count = changes.Count(torch.device("cpu"))
    count.add(patterns, after)
    found = count.found()
    expected = by_hand((before.tolist(), changes.exponents_of(patterns).tolist()), new.tolist())
    int8 = make_format("int8", block_size=256)
    codes = [int8.encode_rows(each.view(1, -1)).view(torch.int8) for each in (after, patterns)]
    scale = changes.fp8_scale(patterns)
    of_fp8 = [(scale * each.float()).clamp(-448, 448).to(torch.float8_e4m3fn).view(1, -1) for each in (after, patterns)]
    for code, (late, early) in (
        ("exact", (after.view(1, -1), patterns.view(1, -1))),
        ("int8", codes),
        ("fp8", of_fp8),
    ):
        words = exact.field(exact.make_headers(late, early), exact.WORDS)
        expected[code] = 32 * (words.numel() + words.sum().item())
    assert {code: round(found[code] * len(pairs)) for code in changes.CODES} == expected
    own = Counter((new - before).tolist())
    assert found["entropy"] == pytest.approx(changes.entropy(own), abs=1e-9)
    assert found["changed"] == pytest.approx(1 - own[0] / len(pairs))


def test_what_does_not_change_costs_a_bit_for_each_block():
    weights = torch.randn(1024).bfloat16()
    count = changes.Count(weights.device)
    count.add(weights, weights)
    found = count.found()
    assert (found["changed"], found["entropy"], found["given_exponent"]) == (0, 0, 0)
    assert (
        found["bitmaps"] == 1 / 32
        and found["exponents"] == 5 / 128
        and found["exact"] == 32 / 1024
        and found["places"] == 8 / 128
        and found["fp8"] == 32 / 1024
        and found["int8"] == 2 * 32 / 1024  # a second chunk, for 4 scales of 2 bytes in 16
    )


def test_gradients_of_one_exponent_cost_sign_and_mantissa():
    gradients = {"a": torch.full((256,), 1.5), "b": torch.full((100,), -1.25)}
    assert changes.bits_of_gradients(gradients) == {"numel": 356, "exponent": 8.0, "in_blocks": 8.0625}
    mixed = changes.bits_of_gradients({"a": torch.tensor([1.0, 2.0] * 64)})
    assert (mixed["exponent"], mixed["in_blocks"]) == (9.0, 9.0625)


def run(command, **environment):
    subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=True, timeout=HANG, capture_output=True)


def test_the_benchmark(tmp_path):
    """Fine-tuning goes on from the weights of the pretraining, and changes less at a smaller rate."""
    out = tmp_path / "changes.json"
    options = ["--runs", "sft-1e-5,lion", "--steps", "4", "--sft-steps", "4", "--batch", "2", "--out", str(out)]
    run([sys.executable, "-m", "benchmarks.weight_changes", *options], ZEROPP_FP8_COMMIT="tested")
    result = json.loads(out.read_text())
    assert result["finished"] and not result["failed"]
    rows = {row["run"]: row for row in result["rows"]}
    points = {name: row["points"] for name, row in rows.items()}
    assert [point["step"] for point in points["lion"]] == weight_changes.looked_at(4) == [1, 2, 3, 4]
    for point in points["lion"]:
        assert set(point["bf16"]) == {"embedding and head", "attention", "MLP", "vectors", "all"}
        parts = [found for kind, found in point["bf16"].items() if kind != "all"]
        assert sum(found["numel"] for found in parts) == point["bf16"]["all"]["numel"] == point["gradients"]["numel"]
    last = {name: own[-1]["bf16"]["all"]["changed"] for name, own in points.items()}
    assert 0 < last["sft-1e-5"] < 0.2 * last["lion"]
    assert {(line["run"], line["dtype"]) for line in result["comparison"]} == {
        (run, dtype) for run in rows for dtype in weight_changes.DTYPES
    }


def test_a_script_whose_engines_are_watched(tmp_path):
    """Its own words reach it; steps are counted from 1, and those that were asked for are written down."""
    out = tmp_path / "changes.jsonl"
    words = ["--steps", "3", "--preset", "tiny", "--out", str(tmp_path / "run")]
    script = ROOT / "benchmarks/tests/watched_script.py"
    command = [sys.executable, str(ROOT / "benchmarks/harness/watched.py"), "--local_rank=0", str(script), *words]
    of_launcher = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    run(command, WATCHED_STEPS="1,3", WATCHED_OUT=str(out), **of_launcher)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["engine"], line["step"]) for line in lines] == [(0, 1), (0, 3)]
    assert all(line["lr"] == 0.1 and line["bfloat16"]["all"]["changed"] > 0.5 for line in lines)


@pytest.mark.parametrize(
    ("file", "runs", "most"),
    [
        ("cpu-1-local", ("adamw", "sft"), 4 / 3),
        ("h200-1-local-sft", ("sft",), 2),  # late in tuning 85 M parameters less changes than at first
    ],
)
def test_the_plan_goes_by_bits_near_the_kept_ones(file, runs, most):
    """Of AdamW, of codes after the first two steps: at most a quarter less, and hardly more."""
    kept = read_result(RESULTS / f"weight_changes/{file}.json")
    points = [p for row in kept["rows"] if row["run"].startswith(runs) for p in row["points"] if p["lr"] >= 1e-7]
    assert len(points) > 20
    for point, (code, name) in itertools.product(points, (("exact", "none"), ("int8", "int8"), ("fp8", "fp8_e4m3"))):
        if code != "exact" and point["step"] <= 2:
            continue  # codes change by up to twice as much then
        ratio = difference_bits(point["lr"], name, point["step"] - 1) / point["bf16"]["all"][code]
        assert 0.75 < ratio < most, (point["lr"], code, ratio)


def test_the_scale_of_fp8_codes():
    """A power of two with which the largest weight is in the upper half of the range."""
    for largest in (0.02, 3.0, 448.0, 1e4):
        scale = changes.fp8_scale(torch.tensor([largest / 7, -largest])).item()
        assert 224 < scale * largest <= 448 and scale == 2 ** round(torch.tensor(scale).log2().item())
    assert torch.isfinite(changes.fp8_scale(torch.zeros(3)))
