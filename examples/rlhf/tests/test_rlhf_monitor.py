"""Writing of a run of the RLHF examples: log, samples, DeepSpeed's monitor, figures, plots."""

import csv
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common.monitor import Monitor, draw, draw_curves, mean_over_ranks, memory_and_bytes, read_log
from hypothesis import given, settings
from hypothesis import strategies as st
from models import batches, ds_config, llama, section
from ranks import printed, run_ranks
from running import forward_backward


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- log ---------------------------------------------------------------------------------------------------------


def test_log(tmp_path, capsys):
    folder = tmp_path / "new" / "run"
    monitor = Monitor(folder)
    monitor.log(1, reward=0.25, kl=torch.tensor(1.5e-5, dtype=torch.float64), tokens=12)
    monitor.log(2, reward=-1234.5, kl=math.nan, tokens=123456)
    monitor.log(3, reward=1e7, kl=0.0, tokens=0)
    rows = lines_of(folder / "log.jsonl")
    assert rows[0] == {"step": 1, "reward": 0.25, "kl": 1.5e-5, "tokens": 12}
    assert list(rows[1]) == ["step", "reward", "kl", "tokens"] and math.isnan(rows[1]["kl"])
    assert rows == read_log(folder / "log.jsonl")[:1] + rows[1:]
    assert capsys.readouterr().out.splitlines() == [
        "step      1  reward      0.25  kl   1.5e-05  tokens        12",
        "step      2  reward     -1234  kl       nan  tokens    123456",
        "step      3  reward  10000000  kl         0  tokens         0",
    ]


def test_a_new_run_starts_an_empty_log(tmp_path):
    for value in (1.0, 2.0):
        monitor = Monitor(tmp_path)
        monitor.log(1, x=value)
        monitor.sample(1, ["p"], ["c"], [value])
    assert [row["x"] for row in lines_of(tmp_path / "log.jsonl")] == [2.0]
    assert [row["reward"] for row in lines_of(tmp_path / "samples.jsonl")] == [2.0]


def test_every_and_shown(tmp_path, capsys):
    monitor = Monitor(tmp_path, every=3, shown=("kl", "reward"))
    for step in range(1, 8):
        monitor.log(step, reward=step / 2, kl=0.5, lr=0.1)
    monitor.log(9, held_out=2.0)
    assert [row["step"] for row in lines_of(tmp_path / "log.jsonl")] == [3, 6, 9]
    assert lines_of(tmp_path / "log.jsonl")[0] == {"step": 3, "reward": 1.5, "kl": 0.5, "lr": 0.1}
    assert capsys.readouterr().out.splitlines() == [
        "step      3  kl       0.5  reward       1.5",
        "step      6  kl       0.5  reward         3",
        "step      9  held_out         2",
    ]


def test_samples(tmp_path, capsys):
    monitor = Monitor(tmp_path)
    prompts, completions = ["2+2=\n", "é", "x"], ["4", "y" * 500, "z"]
    monitor.sample(7, prompts, completions, torch.tensor([1.0, 0.0, 0.5]))
    assert lines_of(tmp_path / "samples.jsonl") == [
        {"step": 7, "prompt": p, "completion": c, "reward": r} for p, c, r in zip(prompts, completions, (1.0, 0.0, 0.5))
    ]
    first, second = capsys.readouterr().out.splitlines()
    assert first == r"step      7  reward 1  '2+2=\n' -> '4'"
    assert second == "step      7  reward 0  'é' -> 'y" + "y" * 195 + "..."
    with pytest.raises(ValueError, match="zip"):
        monitor.sample(8, ["p"], ["c"], [])
    monitor.sample(9, ["p"], ["c"])
    assert lines_of(tmp_path / "samples.jsonl")[-1] == {"step": 9, "prompt": "p", "completion": "c"}
    assert capsys.readouterr().out == "step      9  'p' -> 'c'\n"


def test_bar(tmp_path, capfd):
    monitor = Monitor(tmp_path)
    with monitor.bar(10, start=4, name="ppo") as bar:
        monitor.log(5, x=1)
        bar.update()
        assert (bar.n, bar.total, bar.initial) == (5, 10, 4)
    captured = capfd.readouterr()
    assert captured.out == "step      5  x         1\n"
    assert "ppo" in captured.err and "5/10" in captured.err


# --- resuming ----------------------------------------------------------------------------------------------------


def write_steps(monitor, steps, sample_every):
    for step in steps:
        if step % sample_every == 0:
            monitor.sample(step, [f"p{step}"], ["c"], [step])
        monitor.log(step, x=step / 3)
        if step % 4 == 0:
            monitor.log(step, held_out=step / 7)


@settings(derandomize=True, max_examples=60)
@given(
    saved=st.integers(0, 12),
    lost=st.integers(0, 6),
    every=st.integers(1, 4),
    sample_every=st.integers(1, 5),
    half_a_line=st.sampled_from(("", '{"step": 1', "\x00\x00")),
)
def test_a_resumed_run_writes_what_an_uninterrupted_run_writes(
    tmp_path_factory, saved, lost, every, sample_every, half_a_line
):
    """Killed `lost` steps after the checkpoint, perhaps in the middle of a line, and resumed from the checkpoint."""
    whole, resumed = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("resumed")
    write_steps(Monitor(whole, every=every), range(1, 25), sample_every)
    write_steps(Monitor(resumed, every=every), range(1, saved + lost + 1), sample_every)
    for name in ("log.jsonl", "samples.jsonl"):
        with (resumed / name).open("a") as file:
            file.write(half_a_line)
    write_steps(Monitor(resumed, every=every, resume=True), range(saved + 1, 25), sample_every)
    for name in ("log.jsonl", "samples.jsonl"):
        assert (resumed / name).read_text() == (whole / name).read_text()


def test_resuming_cuts_nothing_before_something_is_written(tmp_path):
    write_steps(Monitor(tmp_path), range(1, 6), 1)
    before = (tmp_path / "log.jsonl").read_text()
    Monitor(tmp_path, resume=True)
    assert (tmp_path / "log.jsonl").read_text() == before != ""


def test_resuming_in_an_empty_folder(tmp_path):
    monitor = Monitor(tmp_path / "new", resume=True)
    monitor.log(5, x=1)
    assert lines_of(tmp_path / "new" / "log.jsonl") == [{"step": 5, "x": 1}]


def test_a_broken_line_is_an_error(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(ValueError, match=r'log\.jsonl, line 2 is no JSON: \{"step": '):
        read_log(path)


# --- DeepSpeed's monitor, ranks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [True, False])
def test_events_for_deepspeed(tmp_path, enabled):
    events = []
    engine = SimpleNamespace(monitor=SimpleNamespace(enabled=enabled, write_events=events.extend), global_samples=96)
    Monitor(tmp_path, engine).log(3, reward=0.5, kl=torch.tensor(0.25))
    assert events == ([("Train/reward", 0.5, 96), ("Train/kl", 0.25, 96)] if enabled else [])


def train_and_log(folder):
    """Two ranks, one step of a small Llama with recipe zeropp and DeepSpeed's CSV monitor."""
    import deepspeed

    import zeropp_fp8

    rank = torch.distributed.get_rank()
    engines = []
    for plugin in (section("zeropp", ranks_per_node=1), None):
        zeropp_fp8.enable() if plugin else zeropp_fp8.disable()
        config = ds_config(plugin, csv_monitor={"enabled": bool(plugin), "output_path": folder, "job_name": "csv"})
        model = llama(layers=1, hidden=32)
        engine, *_ = deepspeed.initialize(
            model=model, config=config, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3)
        )
        for tokens in batches(2, rank):
            forward_backward(engine, tokens)
            engine.step()
        with torch.no_grad():
            engine(input_ids=tokens)
        engines.append(engine)

    reduced, all_reduce = [], torch.distributed.all_reduce
    torch.distributed.all_reduce = lambda *args, **kwargs: reduced.append(args) or all_reduce(*args, **kwargs)
    numbers = {"a": torch.tensor(rank + 1.0), "lr": 0.1, "b": torch.tensor(10 * rank), "c": torch.tensor(float("nan"))}
    means = mean_over_ranks(numbers)
    torch.distributed.all_reduce = all_reduce

    monitor = Monitor(f"{folder}/run{rank}", engines[0])
    monitor.log(1, **means)
    monitor.sample(1, ["p"], ["c"], [1.0])
    with monitor.bar(3) as bar:
        bar.update()
    return {
        "means": means,
        "reductions": len(reduced),
        "written": sorted(path.name for path in Path(folder).glob(f"run{rank}/*")),
        "printed": "'p' -> 'c'" in printed(rank),
        "report": zeropp_fp8.wire_report(engines[0]),
        "figures": [memory_and_bytes(*chosen) for chosen in (engines[:1], engines, engines[:1] * 2, engines[1:])],
        "peak": next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line),
    }


def test_on_two_ranks(tmp_path):
    results = run_ranks(train_and_log, world=2, ranks_per_node=1, folder=str(tmp_path))
    for result in results:
        means = result["means"]
        assert list(means) == ["a", "lr", "b", "c"] and result["reductions"] == 1
        assert (means["a"], means["lr"], means["b"]) == (1.5, 0.1, 5.0) and math.isnan(means["c"])

        alone, with_stock, twice, stock = result["figures"]
        report = result["report"]
        inter = sum(kind["inter"] for kind in report["per_step"].values()) / 1e6
        assert inter > 0 and alone["wire_inter_mb"] == pytest.approx(inter) and alone["wire_intra_mb"] == 0
        outside = report["outside_steps"]["inter"] / 1e6
        assert outside > 0 and alone["outside_inter_mb"] == pytest.approx(outside) and alone["outside_intra_mb"] == 0
        assert with_stock["wire_inter_mb"] == alone["wire_inter_mb"]
        assert twice["wire_inter_mb"] == pytest.approx(2 * inter)
        assert twice["outside_inter_mb"] == pytest.approx(2 * outside)
        assert list(stock) == ["memory_gb"]
        peak = int(result["peak"].split()[1]) * 1024 / 1e9
        assert stock["memory_gb"] == pytest.approx(peak, rel=0.1)

    assert results[0]["written"] == ["log.jsonl", "samples.jsonl"] and results[1]["written"] == []
    assert results[0]["printed"] and not results[1]["printed"]
    with (tmp_path / "csv" / "Train_a.csv").open() as file:
        assert list(csv.reader(file)) == [["step", "a"], ["8", "1.5"]]  # 2 steps of 2 sequences on 2 ranks


def test_mean_of_one_process():
    numbers = {"a": torch.tensor(2.5), "lr": 0.1, "n": 3}
    assert mean_over_ranks(numbers) == {"a": 2.5, "lr": 0.1, "n": 3}
    assert mean_over_ranks({"lr": 0.1}) == {"lr": 0.1}


# --- plots -------------------------------------------------------------------------------------------------------


@pytest.fixture
def figures(monkeypatch):
    """Figures that were drawn, as they were closed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    closed, close = [], pyplot.close
    monkeypatch.setattr(pyplot, "close", lambda figure: closed.append(figure) or close(figure))
    return closed


def write_log(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def curves_of(axes):
    return [(list(line.get_xdata()), list(line.get_ydata()), line.get_label()) for line in axes.lines]


def test_draw_curves(tmp_path, figures):
    seeds = [
        write_log(tmp_path / "0", [{"step": s, "reward": s, "kl": 0.1} for s in (1, 2, 3)]),
        write_log(tmp_path / "1", [{"step": s, "reward": 3 * s} for s in (1, 2, 3, 4)]),
    ]
    other = write_log(tmp_path / "2", [{"step": 2, "reward": 5.0}, {"step": 4, "held_out": 1.0}])
    keys = ["kl", "reward", "held_out", "reward"]
    draw_curves({"quantized": seeds, "bf16": str(other)}, keys, tmp_path / "x.png")
    (figure,) = figures
    kl, reward, held_out, _, *hidden = figure.axes
    assert [axes.get_title() for axes in (kl, reward, held_out)] == ["kl", "reward", "held out"]
    assert curves_of(kl) == [([1, 2, 3], [0.1, 0.1, 0.1], "quantized")]
    assert [curve[:2] for curve in curves_of(reward)] == [
        ([1, 2, 3], [1, 2, 3]),
        ([1, 2, 3, 4], [3, 6, 9, 12]),
        ([1, 2, 3], [2, 4, 6]),
        ([2], [5]),
    ]
    assert [curve[2] for curve in curves_of(reward)][2:] == ["quantized", "bf16"]
    assert curves_of(held_out) == [([4], [1], "bf16")]
    assert len(hidden) == 2 and not any(axes.get_visible() for axes in hidden)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["quantized", "bf16"]
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match=r"no log has 'nonsense'; there are held_out, kl, reward"):
        draw_curves({"a": seeds, "b": other}, ["reward", "nonsense"], tmp_path / "y.png")


def test_draw(tmp_path, figures, capsys):
    monitor = Monitor(tmp_path)
    for step in (1, 2):
        monitor.log(step, value_loss=step / 2, lr=0.1)
        monitor.log(step, held_out=3.0)
    assert draw(tmp_path) == tmp_path / "log.png" and (tmp_path / "log.png").is_file()
    assert [axes.get_title() for axes in figures[0].axes] == ["value loss", "lr", "held out"]
    assert curves_of(figures[0].axes[0])[0][:2] == ([1, 2], [0.5, 1.0]) and not figures[0].legends
    draw(tmp_path, ["lr"])
    assert [axes.get_title() for axes in figures[1].axes] == ["lr"]


def test_draw_of_a_run_shorter_than_its_logging(tmp_path):
    (tmp_path / "log.jsonl").write_text("")
    assert draw(tmp_path) is None and draw(tmp_path, ["reward"]) is None
    write_log(tmp_path / "log.jsonl", [{"step": 1, "reward": 1.0}])
    assert draw(tmp_path, ["reward", "kl"]) == tmp_path / "log.png"
