"""Ratios of numbers before and after, by definition; and the command that shows a run's samples."""

import copy
import json
import math

import pytest
import torch
from error_bounds import signal_to_noise_db
from transformers import BatchEncoding

from zeropp_fp8.__main__ import main as command
from zeropp_fp8.compute import casts
from zeropp_fp8.compute.scaling import DelayedScaling
from zeropp_fp8.config import ComputeConfig
from zeropp_fp8.numerics.bisect import Bisection, say
from zeropp_fp8.numerics.measure import SUMS, meaning, measure
from zeropp_fp8.numerics.reference import Experiment, Run, distance, layer_table
from zeropp_fp8.numerics.sample import Sampler, progress
from zeropp_fp8.numerics.show import latest, read
from zeropp_fp8.numerics.trial import fingerprint


def measured(exact, decoded):
    sums, amax = measure(torch.tensor(exact), torch.tensor(decoded))
    return meaning(sums.tolist(), amax.item())


def test_every_number_by_its_definition():
    found = measured([4.0, 0.0, 1e-3, -460.0, 1000.0, math.nan, 5.0], [4.0, 0.0, 0.0, -448.0, 448.0, 1.0, math.inf])
    noise = 1e-6 + 12.0**2 + 552.0**2
    signal = 16 + 1e-6 + 460.0**2 + 1000.0**2
    assert found["snr_db"] == pytest.approx(10 * math.log10(signal / noise), rel=1e-6)
    assert found["amax"] == 1000
    # 460 is within half a step of 448 (E4M3), 1000 is not.
    assert (found["underflow"], found["overflow"], found["non_finite"]) == (1 / 7, 1 / 7, 2 / 7)
    assert measured([0.0, 1.0], [0.0, 1.0])["snr_db"] is None
    assert measured([0.0, 0.0], [0.0, 1.0])["snr_db"] == -300, "all is lost where there was nothing"
    assert measured([math.nan, math.nan], [math.nan, 1.0])["snr_db"] is None
    assert measured([1e-9, 2.0], [0.0, 0.0])["overflow"] == 0
    assert measured([1e-9, 2.0], [0.0, 0.0])["underflow"] == 1
    sums, amax = measure(torch.empty(0), torch.empty(0))
    assert not sums.any() and amax == 0 and meaning(sums.tolist(), 0.0)["snr_db"] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_of_parts_are_those_of_the_whole(dtype):
    exact = torch.randn(999, 7).to(dtype)
    decoded = exact.float().to(torch.float8_e4m3fn).float()
    parts = [measure(a, b) for a, b in zip(exact.split(100), decoded.split(100))]
    sums, amax = sum(one for one, _ in parts), max(one for _, one in parts)
    found = meaning(sums.tolist(), amax.item())
    assert found["snr_db"] == pytest.approx(signal_to_noise_db(exact, decoded), abs=1e-6)
    assert found["amax"] == exact.abs().max().item() and sums[SUMS.index("count")] == exact.numel()


def row(kind, layer, snr_db, **others):
    return {"kind": kind, "layer": layer, "snr_db": snr_db, "amax": 1.0, "underflow": 0.0, "overflow": 0.0} | {
        "non_finite": 0.0,
        **others,
    }


SAMPLES = [
    {"engine": 0, "step": 100, "cost": None, "rows": [row("weights", "a", 43.0), row("weights", "b", 12.0)]},
    {"engine": 1, "step": 100, "cost": None, "rows": [row("weights", "other", 1.0)]},
    {
        "engine": 0,
        "step": 200,
        "cost": {"seconds": 1.0, "share": 0.004},
        "rows": [row("weights", "a", 42.0), row("gradients", "a", None, underflow=0.25, non_finite=0.5)],
    },
]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "numerics.jsonl"
    file.write_text("".join(json.dumps(sample) + "\n" for sample in SAMPLES))
    return file


def test_the_command_shows_the_worst_layers(path, tmp_path, capsys):
    picture = tmp_path / "numerics.png"
    command(["numerics", str(path), "--worst", "1", "--picture", str(picture)])
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["gradients", "-", "1", "25%", "0%", "50%", "200", "a"],
        ["weights", "12.0", "1", "0%", "0%", "0%", "100", "b"],
    ]
    assert lines[3:] == ["weights: 1 more", "samples took 0.4 % of the time of 1 intervals"]
    first = picture.read_bytes()
    assert first[:4] == b"\x89PNG"
    command(["numerics", str(path), "--picture", str(picture), "--of", "underflow"])
    other = picture.read_bytes()
    assert other[:4] == b"\x89PNG" and other != first
    assert [(one["layer"], one["step"]) for one in latest(read(path))] == [("a", 200), ("b", 100), ("a", 200)]


def test_layers_that_are_not_finite_come_first(tmp_path, capsys):
    """In the table, and in the line of the run: their finite numbers alone would say that nothing is wrong."""
    rows = [
        row("weights", "exact", None),
        row("weights", "low", 12.0),
        row("weights", "some", 40.0, non_finite=0.25),
        row("weights", "all", None, non_finite=1.0),
    ]
    path = tmp_path / "numerics.jsonl"
    path.write_text(json.dumps({**SAMPLES[0], "rows": rows}) + "\n")
    command(["numerics", str(path)])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(line[1], line[-1]) for line in shown] == [
        ("-", "all"),
        ("40.0", "some"),
        ("12.0", "low"),
        ("exact", "exact"),
    ]
    broken = "weights 100 % not finite in all"
    assert progress(7, rows, None).endswith(f"step 7: lowest weights 12.0 dB in low, {broken}")
    assert progress(7, rows[3:], None).endswith(f"step 7: lowest {broken}")
    assert progress(7, rows[:1], None).endswith("lowest none: nothing was rounded")


def test_a_run_that_was_killed_leaves_a_file_that_can_be_shown(path, capsys):
    whole = path.read_text()
    path.write_text(f"{whole}\n{whole[: len(whole) // 3]}\n\n{whole}")
    command(["numerics", str(path)])
    said = capsys.readouterr()
    assert said.err == f"numerics: {path}: left out, because they are cut: line 5\n" and "12.0" in said.out
    assert len(read(path)) == 4


def test_what_cannot_be_shown(path, tmp_path):
    for arguments, said in (
        ([str(path), "--engine", "7"], 'no sample of engine 7; set "numerics".*; --engine may be 0 or 1'),
        ([str(tmp_path / "none")], "none: no such file"),
    ):
        with pytest.raises(SystemExit, match=said):
            command(["numerics", *arguments])
    path.write_text(json.dumps({**SAMPLES[0], "rows": []}) + "\n")
    with pytest.raises(SystemExit, match="nothing was rounded"):
        command(["numerics", str(path), "--picture", str(tmp_path / "p.png")])
    sample = SAMPLES[0]
    wrong = [{**sample, "rows": None}, {**sample, "rows": [{"kind": "weights"}]}, {**sample, "cost": 3}]
    for line in ('{"loss": 1}', "no JSON", *map(json.dumps, wrong)):
        path.write_text(f"{line}\n")
        with pytest.raises(SystemExit, match=f"{path}, line 1, is no sample"):
            command(["numerics", str(path)])


@pytest.mark.parametrize("name", ["reference", "bisect"])
def test_a_launch_line_that_cannot_be_started(name):
    with pytest.raises(SystemExit, match=r"the launch line cannot be started: .*no-such-command"):
        command([name, "--steps", "1", "--", "no-such-command"])


def test_operands_that_are_cast_where_they_are_made():
    """Norms and gated products hand operands on; a sample sees them, and changes nothing."""
    scaling = DelayedScaling(ComputeConfig(format="fp8"))
    scaling.add_layer(), scaling.add_layer()
    x, gate, up = (torch.randn(32, 64) for _ in range(3))
    weight, ones = torch.rand(64), torch.rsqrt(x.square().mean(dim=1) + 1e-6)

    def made():
        normed = scaling.made_input(0, casts.rms_norm, (x, weight, ones), True, True)
        return normed, scaling.made_input(1, casts.swiglu, (gate, up), True, True)

    before = made()
    sampler = Sampler.__new__(Sampler)  # no engine: only what a step of it looks at
    kinds = [("compute_activations", 0), ("compute_activations", 1)]
    sampler.rows, sampler._replaced = {key: row for row, key in enumerate(kinds)}, []
    sampler.sums, sampler.amax = torch.zeros(2, len(SUMS), dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    sampler._host_seconds = 0.0
    sampler._look_at_products(scaling)
    after = made()
    assert copy.deepcopy(scaling).quantize.__func__ is DelayedScaling.quantize  # copies are not looked at
    for owner, name in sampler._replaced:
        delattr(owner, name)
    for (values, pair), (other_values, other_pair) in zip(before, after):
        assert torch.equal(values, other_values)
        for one, other in zip(pair, other_pair):
            assert torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8))
    exact = [
        weight.double() * x.double() * ones.double()[:, None],
        gate.double() * torch.sigmoid(gate.double()) * up.double(),
    ]
    for row, (values, (_, (operand, _))) in enumerate(zip(exact, after)):
        found = meaning(sampler.sums[row].tolist(), sampler.amax[row].item())
        assert found["snr_db"] == pytest.approx(signal_to_noise_db(values, operand.dequantize()), abs=1e-3)
        assert found["amax"] == pytest.approx(values.abs().max().item(), rel=1e-5)
    assert sampler.rows == {}


class Pretended(Bisection):
    """Two pieces of four layers: `fault` carries seven tenths of the distance, of which its layer c has most."""

    def __init__(self, fault, gemms=()):
        self.fault, self.at_fault, self.what = fault, gemms, "loss"

    def distance(self, name, high=(), skip_modules=None, gemms=None):
        layers = {piece: ["a", "b", "c", "d"] for piece in ("weights", "compute")}
        run = Run(pieces=["weights", "compute", "optimizer"], layers=layers, gemms=["output", "grad_input"])
        carried = 0.7 if self.fault in high or "c" in (skip_modules or {}).get(self.fault, ()) else 0.0
        for gemm, named in (gemms or {}).items():
            found = "c" in named or named == ["*"]
            carried = max(carried, 0.7 / len(self.at_fault) if found and gemm in self.at_fault else 0.0)
        return 1.0 - carried, run


@pytest.mark.parametrize(
    ("fault", "gemms", "said"),
    [
        ("compute", ["grad_input"], '"compute": {"high_precision_gemms": {"grad_input": ["c"]}}'),
        ("compute", ["output", "grad_input"], '"compute": {"skip_modules": ["c"]}'),
        ("weights", [], '"weights": {"skip_modules": ["c"]}'),
    ],
)
def test_a_bisection_names_what_keeps_the_fault_away(capsys, fault, gemms, said):
    say(Pretended(fault, gemms), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["nothing", "1"] and lines[2].split() == [fault, "0.3"]
    assert f"{fault} carries most of the difference" in lines
    assert (f"{gemms[0]} carries most of that" in lines) if len(gemms) == 1 else True
    assert ("no GEMM by itself carries most of that" in lines) == (len(gemms) == 2)
    assert lines[-2:] == [
        "it is in 1 of 4 layers; these are in high precision with",
        f"{said}, besides what is there",
    ]


def test_a_bisection_says_where_layers_cannot_be_left_out(capsys):
    say(Pretended("optimizer"), {})
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "optimizer carries most of the difference",
        "layers of optimizer cannot be left out one by one",
    ]


@pytest.mark.parametrize("kind", [dict, BatchEncoding])
def test_batches_that_differ_have_other_fingerprints(kind):
    given, other = (kind({"input_ids": torch.tensor([[1, 2, last]])}) for last in (3, 4))
    assert fingerprint((given,)) == fingerprint((kind(given),)) != fingerprint((other,))
    assert fingerprint((given,)) == 1 * 1 + 2 * 2 + 3 * 3


def test_a_bisection_of_losses_that_nobody_has_seen():
    """A script that calls loss.backward(): they are NaN in all runs, which is not that they agree."""

    class Unseen(Experiment):
        def run(self, name, **changes):
            return Run(steps=[{"step": 1, "state": 1.0, "data": 1.0, "loss": math.nan, "grad_norm": 2.0}])

    bisection = Bisection(Unseen(["a line"], 1), "loss")
    with pytest.raises(SystemExit, match=r"finite loss; .* engine\.backward\(loss\): .* --by grad_norm"):
        bisection.distance("as it is")
    assert Bisection(bisection.experiment, "grad_norm").distance("as it is")[0] == 0


def test_steps_whose_gradients_are_not_finite_in_both_runs():
    """fp16's loss scale settles in them: they are no difference, and the first step that has gradients counts."""
    run, other = (Run(steps=[{"grad_norm": math.nan}, {"grad_norm": norm}]) for norm in (3.0, 1.0))
    assert distance(run, other, "grad_norm") == 2.0
    other.steps[0]["grad_norm"] = 1.0
    assert distance(run, other, "grad_norm") == math.inf
    for one in (run, other):
        one.steps[1]["grad_norm"] = one.steps[0]["grad_norm"] = math.nan
    assert math.isnan(distance(run, other, "grad_norm"))
    rows = layer_table({"a": [math.nan, 0.01, 0.03], "b": [math.nan, 0.5, 0.5], "none": [math.nan] * 3}).splitlines()
    assert [row.split() for row in rows[1:]] == [["b", "50", "%", "50", "%"], ["a", "1", "%", "2", "%"]]
