"""Comparison over seeds, and what wire_convergence is built of: equal beginnings, shared GPUs, text, report."""

import math
import statistics
import time
import types

import pytest
import torch

from benchmarks import wire_convergence
from benchmarks.harness import nodes, seeds
from benchmarks.harness.learning import docstrings, rate_factor
from benchmarks.harness.llama import Llama
from benchmarks.harness.results import begin_result, finished_result, read_result
from benchmarks.harness.sizes import SIZES
from benchmarks.harness.wire_runs import groups_of
from benchmarks.report import pictures, wire


def central_probability(t, freedom):
    """P(|T| <= t) of Student's t: its density by Simpson's rule."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    xs = torch.linspace(0, t, 20_001, dtype=torch.float64)
    density = scale * (1 + xs**2 / freedom) ** (-(freedom + 1) / 2)
    weights = torch.full_like(xs, 2).index_fill_(0, torch.arange(1, 20_000, 2), 4)
    weights[[0, -1]] = 1
    return 2 * (density * weights).sum().item() * (t / 20_000) / 3


def test_students_t():
    for freedom, t in enumerate(seeds.T_975, start=1):
        assert central_probability(t, freedom) == pytest.approx(0.95, abs=1e-5), freedom


def test_an_interval_written_out():
    """3.1824 * sqrt(5/3) / 2 around 2.5, of 1, 2, 3, 4."""
    found = seeds.interval([1.0, 2.0, 3.0, 4.0])
    assert found.mean == 2.5 and found.half_width == pytest.approx(2.0542, abs=1e-4)
    assert found.holds(0.45) and not found.holds(0.44) and found.holds(4.55) and not found.holds(4.56)
    assert seeds.interval([3.0]) == (3.0, None) and seeds.interval([3.0]).holds(3.0) is None
    with pytest.raises(ValueError, match="21 seeds: at most 20"):
        seeds.interval([0.0] * 21)


def rows(**losses):
    """Rows of runs by the losses of seeds 0, 1, ... ; None: that seed was not run."""
    return [
        {"run": run.replace("_", "-"), "seed": seed, "held_out_loss": loss}
        for run, of_seeds in losses.items()
        for seed, loss in enumerate(of_seeds)
        if loss is not None
    ]


def test_comparison():
    """Seeds that differ by 10 % hide what pairs show."""
    found = seeds.compare(
        rows(lossless=(1.0, 1.1, 1.2), zeropp=(1.001, 1.101, 1.201), stock=(1.0,)), ("stock", "lossless")
    )
    base, zeropp, stock = found
    assert base["run"] == "lossless" and "reference" not in base and base["seeds"] == [0, 1, 2]
    assert base["mean"] == pytest.approx(1.1) and base["half_width"] == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)
    assert zeropp["reference"] == "lossless" and zeropp["inside_interval"] and zeropp["within_target"]
    assert zeropp["percent"] == pytest.approx(100 * (1.101 / 1.1 - 1))
    pairs = [0.1, 100 * (1.101 / 1.1 - 1), 100 * (1.201 / 1.2 - 1)]
    assert list(zeropp["paired_by_seed"].values()) == pytest.approx(pairs)
    assert zeropp["paired_percent"] == pytest.approx(statistics.fmean(pairs))
    assert zeropp["paired_half_width"] == pytest.approx(4.3027 * statistics.stdev(pairs) / 3**0.5, rel=1e-4)
    assert stock["paired_percent"] == 0 and stock["paired_half_width"] is None, "the reference has more seeds"


def test_what_is_worse_and_what_cannot_be_paired():
    base, worse, apart = seeds.compare(
        rows(stock=(1.0, 1.001, None), zeropp=(1.2, 1.21, None), zeropp_diff=(None, None, 1.0)), ("stock", "lossless")
    )
    assert "percent" not in base
    assert worse["inside_interval"] is False and worse["within_target"] is False and worse["percent"] > 20
    assert "paired_percent" not in apart and apart["within_target"]
    assert all("reference" not in line for line in seeds.compare(rows(zeropp=(1.0,)), ("stock", "lossless")))


def test_seeds_that_were_run_again():
    """The reference's interval is over its four runs, a pair's reference the mean of its seed's two."""
    twice = rows(lossless=(1.0, 1.1)) + rows(lossless=(1.02, 1.1))
    base, zeropp = seeds.compare(twice + rows(zeropp=(1.01, 1.21)), ("lossless",))
    assert base["runs"] == 4 and base["seeds"] == [0, 1] and base["mean"] == pytest.approx(1.055)
    assert base["half_width"] == pytest.approx(3.1824 * statistics.stdev([1.0, 1.02, 1.1, 1.1]) / 2, rel=1e-4)
    assert base["apart_by_seed"] == {"0": pytest.approx(2), "1": 0} and not zeropp["apart_by_seed"]
    assert list(zeropp["paired_by_seed"].values()) == pytest.approx([0, 10])


def test_the_rate_ends_at_the_least():
    assert rate_factor(0, 10, 100, 0.01) == 0.1 and rate_factor(9, 10, 100, 0.01) == 1.0
    assert rate_factor(55, 10, 100, 0.01) == pytest.approx(0.505)
    assert rate_factor(100, 10, 100, 0.01) == pytest.approx(0.01) and rate_factor(100, 10, 100) == pytest.approx(0.1)


def test_stages_change_nothing():
    """Equal initial weights and losses, however many layers are gathered at once; 3 layers do not divide into 2."""
    size, tokens = SIZES["tiny-gqa"], torch.arange(40).view(2, 20)
    losses = []
    for layers in (1, 2, 3):
        torch.manual_seed(3)
        model = Llama(size, unit_layers=layers)
        assert [type(unit).__name__ for unit in model.layers] == (["Block"] * 3, ["Stage"] * 2, ["Stage"])[layers - 1]
        losses.append(model(tokens))
    assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], losses[2])


@pytest.mark.parametrize(
    "gpus, devices", [(0, ["0,1"] * 2 + ["2,3"] * 2), (4, ["0,1"] * 2 + ["2,3"] * 2), (1, ["0"] * 4)]
)
def test_ranks_share_gpus(gpus, devices, monkeypatch, tmp_path):
    started = []

    def start(words, env, cwd):
        started.append(env)
        return types.SimpleNamespace(poll=lambda: 0, returncode=0, wait=lambda: 0)

    monkeypatch.setattr(nodes.subprocess, "Popen", start)
    nodes.launch("none", [], 4, tmp_path / "store", 1, namespaces=False, gpus=gpus)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in started] == devices
    hosts = [env["NCCL_HOSTID"] for env in started]
    assert len(set(hosts)) == (4 if gpus == 1 else 2)
    assert [env["LOCAL_RANK"] for env in started] == (["0"] * 4 if gpus == 1 else ["0", "1"] * 2)
    assert {env["LOCAL_WORLD_SIZE"] for env in started} == {"2"}


def test_docstrings(tmp_path):
    (tmp_path / "a.py").write_text(
        '"""One."""\nclass A:\n    """Two."""\n    def f(self):\n        """Three\n        lines."""\n'
    )
    (tmp_path / "b.py").write_text("x = 1\n")
    (tmp_path / "newer.py").write_text("x = = 1\n")
    (tmp_path / "c.txt").write_text("none")
    assert docstrings([str(tmp_path)]) == [b"One.\n\nTwo.\n\nThree\nlines."]


def result(run, seed, loss, case="pretrain"):
    """A result file as far as the report reads it."""
    settings = {"case": case, "ranks": 2, "nodes": 2, "batch": 4, "sequence": 64, "lr": 1e-3, "least_rate": 0.01}
    settings["steps"] = 10
    row = {"run": run, "seed": seed, "held_out": [[0, 5.0], [10, loss]], "held_out_loss": loss}
    row |= {"parameters": 85e6, "tokens": 29.5e6, "commit": "abc1234"}
    return {"settings": settings, "data": {"sha256": "1"}, "hardware": {"gpu": "an H200", "cpu": "a CPU"}, **row}


def test_report():
    results = [
        result(run, s, 1 + 0.1 * s + more) for s in (1, 0) for run, more in (("zeropp", 0.002), ("lossless", 0.0))
    ]
    results += [result("lossless", 0, 0.5, "sft")]
    groups = groups_of(results)
    assert [len(group["rows"]) for group in groups] == [4, 1], "a case is not compared with another"
    assert [(row["run"], row["seed"]) for row in groups[0]["rows"]] == [
        *(("lossless", seed) for seed in (0, 1)),
        *(("zeropp", seed) for seed in (0, 1)),
    ]
    text = wire.compared(*results)
    assert "| `zeropp` | 2 | 1.0520 ± 0.6353 | 0.0707 | +0.19 % | yes | +0.19 ± 0.12 % |" in text
    assert "Pretraining, 85 M parameters, 29.5 M tokens" in text and "from `lossless` (commit `abc1234`)" in text
    assert wire.compared() == "No results are kept yet."
    pytest.importorskip("matplotlib")
    figure = pictures.learning(*results)
    labels = [line.get_label() for line in figure.axes[1].lines]
    assert "zeropp, 2 seed(s)" in labels and not any("lossless" in label for label in labels)


def test_what_is_refused(capsys):
    for words, said in (
        (["--runs", "zeropp,none"], "unknown run none"),
        (["--ranks", "3"], "2 equal nodes"),
        (["--ranks", "4", "--batch", "6"], "share --batch 6"),
        (["--runs", "stock", "--compile", "blocks"], "stock has no such setting"),
        *([] if torch.cuda.is_available() else [(["--runs", "in-tree"], "needs CUDA")]),
    ):
        with pytest.raises(SystemExit):
            wire_convergence.parse(words)
        assert said in capsys.readouterr().err


def test_no_run_starts_that_would_end_late(monkeypatch, tmp_path):
    """After one of 100 s none with 50 left; none at all after the end."""

    def join():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        return torch.device("cpu")

    def train(case, run, seed, *_):
        return {"run": run, "seed": seed, "held_out_loss": 1.0, "all_seconds": 100.0}

    for name, replaced in {"join": join, "train": train, "choose_gpus": lambda _: None}.items():
        monkeypatch.setattr(wire_convergence, name, replaced)
    (tmp_path / "a.txt").write_text("words " * 2000)
    for seconds, seeds_done in ((-1, []), (50, [0]), (None, [0, 1])):
        folder = tmp_path / str(seconds)
        args = wire_convergence.parse(
            ["--data", str(tmp_path), "--folder", str(folder), "--out", str(tmp_path / "out")]
        )
        args.until = None if seconds is None else time.time() + seconds
        args.runs, args.label, args.head = ["pretrain:zeropp:0", "pretrain:zeropp:1"], "all", {}
        begin_result(args.out, {})
        wire_convergence.worker(args)
        assert [row["seed"] for row in read_result(args.out)["rows"]] == seeds_done
        kept = [path for seed in (0, 1) if (path := wire_convergence.place(args, "pretrain", "zeropp", seed)).exists()]
        assert [finished_result(path)["seed"] for path in kept] == seeds_done
