"""A run about itself: console, JSON lines, DeepSpeed's monitor, progress bar, samples, plots.

Only rank 0 writes. Where a number differs between ranks, average it first: `mean_over_ranks`, on every rank.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from tqdm import tqdm

import zeropp_fp8

GIGA, MEGA = 1e9, 1e6
LOG, SAMPLES = "log.jsonl", "samples.jsonl"
PRINTED_SAMPLES, PRINTED_CHARACTERS = 2, 200

Number = float | int | Tensor


class Monitor:
    """The log of a run.

    Args:
        folder: gets log.jsonl and samples.jsonl; made if it is not there.
        engine: a DeepSpeed engine; what its ds_config has under "tensorboard", "wandb", "csv_monitor" or "comet" gets
            every number as Train/NAME, over the samples that the engine has trained on.
        every: steps that it does not divide are left out of the log.
        resume: go on with the files of an earlier run. The first step that is logged or sampled cuts them back to the
            steps before it, so that at the end they are those of a run that was never stopped. Without it they start
            empty.
        shown: the numbers that the console shows; all of a line that has none of them.
    """

    def __init__(
        self,
        folder: str | Path,
        engine=None,
        every: int = 1,
        resume: bool = False,
        shown: Sequence[str] = (),
    ) -> None:
        self.folder = Path(folder)
        self._engine, self._every, self._shown = engine, every, shown
        self._is_main = not dist.is_initialized() or dist.get_rank() == 0
        self._cut_pending = resume
        if self._is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in (LOG, SAMPLES):
                with (self.folder / name).open("a" if resume else "w"):
                    pass

    def log(self, step: int, **numbers: Number) -> None:
        """Write the numbers of a step. No communication: a tensor is taken as rank 0 has it."""
        if not self._is_main or step % self._every:
            return
        values = {name: value.item() if isinstance(value, Tensor) else value for name, value in numbers.items()}
        self._write(LOG, step, [values])
        shown = {name: values[name] for name in self._shown if name in values} or values
        self._print(f"step {step:>6}  " + "  ".join(f"{name} {_short(value):>9}" for name, value in shown.items()))
        if self._engine is not None and self._engine.monitor.enabled:
            samples = self._engine.global_samples
            self._engine.monitor.write_events([(f"Train/{name}", value, samples) for name, value in values.items()])

    def sample(
        self, step: int, prompts: Sequence[str], completions: Sequence[str], rewards: Sequence[float] | None = None
    ) -> None:
        """Write what the model says to prompts, and print two of them."""
        if not self._is_main:
            return
        rows = [{"prompt": prompt, "completion": text} for prompt, text in zip(prompts, completions, strict=True)]
        if rewards is not None:
            rows = [{**row, "reward": float(reward)} for row, reward in zip(rows, rewards, strict=True)]
        self._write(SAMPLES, step, rows)
        for row in rows[:PRINTED_SAMPLES]:
            texts = " -> ".join(_cut(repr(row[name])) for name in ("prompt", "completion"))
            reward = f"reward {_short(row['reward'])}  " if "reward" in row else ""
            self._print(f"step {step:>6}  {reward}{texts}")

    def bar(self, total: int, start: int = 0, name: str = "", unit: str = "step") -> tqdm:
        """A progress bar, shown on rank 0; the lines of `log` and `sample` go above it."""
        return tqdm(
            total=total,
            initial=start,
            desc=name or None,
            unit=unit,
            disable=not self._is_main,
            mininterval=0.5 if sys.stderr.isatty() else 5.0,
            dynamic_ncols=True,
        )

    def _write(self, name: str, step: int, rows: Sequence[dict]) -> None:
        if self._cut_pending:
            self._cut_pending = False
            for each in (LOG, SAMPLES):
                _cut_back(self.folder / each, step)
        with (self.folder / name).open("a") as file:
            file.writelines(json.dumps({"step": step, **row}) + "\n" for row in rows)

    def _print(self, line: str) -> None:
        tqdm.write(line)
        sys.stdout.flush()  # a pipe to a launcher or to `tee` would keep it back


def _short(value: float) -> str:
    if isinstance(value, int) or abs(value) >= 1e4:
        return f"{value:.0f}"
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.4g}"


def _cut(text: str) -> str:
    return text if len(text) <= PRINTED_CHARACTERS else text[: PRINTED_CHARACTERS - 3] + "..."


def _cut_back(path: Path, step: int) -> None:
    """Keep the lines of the steps before `step`."""
    kept = [json.dumps(row) + "\n" for row in read_log(path) if row["step"] < step]
    new = path.with_suffix(".new")
    new.write_text("".join(kept))
    new.replace(path)


def read_log(path: str | Path) -> list[dict]:
    """The lines of a JSON lines file. A last line that was not written to its end, when a run was killed, is left out.

    Raises:
        ValueError: another line is no JSON.
    """
    *lines, _unfinished = Path(path).read_text().split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is no JSON: {_cut(line)}") from error
    return rows


# --- numbers -----------------------------------------------------------------------------------------------------


def mean_over_ranks(numbers: Mapping[str, Number]) -> dict[str, float]:
    """The same dict with each tensor (a scalar) replaced by its mean over ranks, a float; other values stay.

    One all-reduce: call it on every rank, with the same names in the same order.
    """
    tensors = {name: value.detach().double() for name, value in numbers.items() if isinstance(value, Tensor)}
    if not tensors:
        return dict(numbers)
    means = torch.stack(list(tensors.values()))
    if dist.is_initialized():
        dist.all_reduce(means)
        means /= dist.get_world_size()
    return {**numbers, **dict(zip(tensors, means.tolist()))}


def memory_and_bytes(*engines) -> dict[str, float]:
    """This rank's memory, and what the engines' communication sent from it, summed over engines.

    Returns:
        memory_gb: the most that torch has held on the GPU, or on the CPU the process's largest resident set; 1e9 bytes.
        wire_inter_mb, wire_intra_mb: sent between and within nodes in an optimizer step, 1e6 bytes.
        outside_inter_mb, outside_intra_mb: the same outside of steps (rollouts, evaluation, checkpoints), so far.
        The last four only with engines that run with zeropp_fp8.
    """
    if get_accelerator().device_name() == "cuda":  # ranks may be on the CPU of a machine that has GPUs
        memory = torch.cuda.max_memory_allocated()
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss: bytes on macOS, KiB on Linux
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    figures = {"memory_gb": memory / GIGA}
    reports = [zeropp_fp8.wire_report(e) for e in engines if getattr(e, "zeropp_fp8_session", None) is not None]
    for link in ("inter", "intra") if reports else ():
        sent = sum(kind[link] for report in reports for kind in report["per_step"].values())
        figures[f"wire_{link}_mb"] = sent / MEGA
        figures[f"outside_{link}_mb"] = sum(report["outside_steps"][link] for report in reports) / MEGA
    return figures


# --- plots -------------------------------------------------------------------------------------------------------


def draw_curves(
    log_paths: Mapping[str, str | Path | Sequence[str | Path]], keys: Sequence[str], out_png: str | Path
) -> None:
    """Draw numbers of logs over steps: a panel a key, a colour a label.

    Args:
        log_paths: label to log.jsonl, or to those of several seeds: these are drawn thin, their mean thick.
        keys: names in the logs. A label whose logs do not have one is left out of its panel.
        out_png: the picture.

    Raises:
        ValueError: no log has a key.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    logs = {
        label: [read_log(path) for path in ([paths] if isinstance(paths, (str, Path)) else paths)]
        for label, paths in log_paths.items()
    }
    columns = min(3, len(keys))
    rows = -(-len(keys) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(4.4 * columns, 2.9 * rows), layout="constrained", squeeze=False)
    for axes, key in zip(grid.flat, keys):
        for number, (label, seeds) in enumerate(logs.items()):
            curves = [curve for log in seeds if (curve := {row["step"]: row[key] for row in log if key in row})]
            for curve in curves if len(curves) > 1 else ():
                axes.plot(list(curve), list(curve.values()), color=f"C{number}", linewidth=0.7, alpha=0.35)
            steps = sorted(set.intersection(*map(set, curves))) if curves else []
            if steps:
                means = [sum(curve[step] for curve in curves) / len(curves) for step in steps]
                axes.plot(steps, means, color=f"C{number}", linewidth=1.8, label=label)
        if not axes.lines:
            known = sorted({name for seeds in logs.values() for log in seeds for row in log for name in row} - {"step"})
            raise ValueError(f"draw_curves: no log has {key!r}; there are {', '.join(known)}")
        axes.set_title(key.replace("_", " "), fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    for axes in grid.flat[len(keys) :]:
        axes.set_visible(False)
    for axes in grid.flat[max(0, len(keys) - columns) : len(keys)]:
        axes.set_xlabel("step")
    if len(logs) > 1:
        lines = {line.get_label(): line for axes in grid.flat for line in axes.get_legend_handles_labels()[0]}
        figure.legend(lines.values(), lines.keys(), loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(out_png, dpi=110)
    plt.close(figure)


def draw(folder: str | Path, keys: Sequence[str] = ()) -> Path | None:
    """Draw FOLDER/log.jsonl into FOLDER/log.png: all its numbers, or those of `keys` that it has.

    Returns:
        its path; None where nothing was logged, as in a run shorter than --log_every.
    """
    folder = Path(folder)
    names = dict.fromkeys(name for row in read_log(folder / LOG) for name in row if name != "step")
    drawn = [name for name in keys or names if name in names]
    if not drawn:
        return None
    draw_curves({folder.name: folder / LOG}, drawn, folder / "log.png")
    return folder / "log.png"
