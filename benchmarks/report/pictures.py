"""Pictures of results: each function takes results and returns matplotlib's figure."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from benchmarks.harness.results import RESULTS, finished_result, read_result
from benchmarks.harness.seeds import TARGET_PERCENT
from benchmarks.harness.wire_runs import ORDER, groups_of
from benchmarks.report import wire
from benchmarks.report.zero import HEADLINE, RATES, by_rate

NVLINK = "nvlink"  # the rate of one node
OURS = ("lossless", "zeropp", "zeropp-4bit")
BF16, THEN = "bf16", "_then_"
TRACED = ("mu", "saturated", "vanished")
TOLERATED_SHARE = 1e-5  # of saturated numbers, above which mu is halved


def drawing():
    """matplotlib's pyplot, without a window."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plain_ticks(axis) -> None:
    """Numbers as they are, not powers of ten, on an axis of logarithms; call it when all is drawn."""
    from matplotlib.ticker import LogLocator

    low, high = axis.get_view_interval()
    if high > 10 * low:
        axis.set_minor_locator(LogLocator(subs=(2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("{x:.2g}")


def step_time(*results: dict):
    """Step time against rate, a line per run; one node stands at the right."""
    pyplot, result = drawing(), results[0]
    found = {(row["run"], row["gbit"]): row for each in results for row in each["rows"]}.values()
    rates = sorted({row["gbit"] for row in found} - {NVLINK, 0}, key=float)
    at = {rate: rate for rate in rates} | {NVLINK: 2.5 * max(rates, default=1.0)}
    figure, axis = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for index, run in enumerate(dict.fromkeys(row["run"] for row in found)):
        rows = [row for row in found if row["run"] == run and row["gbit"] in at]
        rows.sort(key=lambda row: at[row["gbit"]])
        style = {"color": f"C{index}", "linestyle": "-" if run in OURS else "--", "marker": "o", "markersize": 4}
        points = [(at[row["gbit"]], row["step_ms"]) for row in rows]
        axis.plot(*zip(*points), label=run, **style)
    axis.set(xscale="log", yscale="log", xlabel="Gbit/s between the nodes", ylabel="ms per step (median)")
    ticks = [rate for rate in (*rates, NVLINK) if any(row["gbit"] == rate for row in found)]
    axis.set_xticks([at[rate] for rate in ticks], [f"{t:g}" if t != NVLINK else "one node" for t in ticks])
    axis.minorticks_off()
    times = [row["step_ms"] for row in found if row["gbit"] in at]
    low, high = math.floor(math.log2(min(times))), math.ceil(math.log2(max(times)))
    axis.set_yticks([2**n for n in range(low, high + 1)], [f"{2**n:g}" for n in range(low, high + 1)])
    axis.grid(alpha=0.3)
    figure.legend(frameon=False, loc="outside right upper")
    axis.set_title(f"{result['model']}, {result['micro_batch']} x {result['tokens']} tokens per rank, bf16")
    return figure


# run -> label and color, of the picture in README.md; over NVLink `zeropp` sends no differences.
COMPARED = {
    "stock-leaf": ("stock ZeRO-3", "#7f7f7f"),
    "in-tree-leaf": ("DeepSpeed's ZeRO++", "#bcbd22"),
    "hsdp": ("HSDP (in one node FSDP2)", "#17becf"),
    "zeropp-difference": ("zeropp", "#ff7f0e"),
    "zeropp-exact": ("zeropp-exact", "#d62728"),
}
IN_ONE_NODE = {"hsdp": "fsdp2", "zeropp-difference": "zeropp"}


def compared(*results: dict):
    """Step time of ways to train by rate, a group of bars per rate."""
    pyplot, found = drawing(), by_rate(*results)
    figure, axis = pyplot.subplots(figsize=(9, 4), layout="constrained")
    for place, (run, (label, color)) in enumerate(COMPARED.items()):
        names = [IN_ONE_NODE.get(run, run) if rate == NVLINK else run for rate in RATES]
        times = [found[name, rate]["step_ms"] for name, rate in zip(names, RATES)]
        bars = axis.bar([group + 0.17 * (place - 2) for group in range(len(RATES))], times, 0.16, color=color)
        bars.set_label(label)
        axis.bar_label(bars, [f"{ms:.0f}" for ms in times], fontsize=8)
    names = [f"two emulated nodes,\n{r:g} Gbit/s between them" if r != NVLINK else "one node,\nNVLink" for r in RATES]
    axis.set_xticks(range(len(RATES)), names)
    cut_short = {row["gbit"] for each in results if not each["finished"] for row in each["rows"]}
    short = [f"{rate:g}" for rate in RATES if rate in cut_short]
    if short:
        axis.set_xlabel(f"\nThe measurement at {' and '.join(short)} Gbit/s was cut short; all runs shown had ended.")
    axis.set(
        ylabel="ms per step", title="4 H200 as two emulated nodes or one, 1.35 B parameters, 1,024 tokens per GPU, bf16"
    )
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    return figure


def held_out(result: dict):
    """Held-out loss, and its difference to bf16, along the way; dotted: the targets."""
    pyplot = drawing()
    settings = result["settings"]
    tokens = settings["batch"] * settings["sequence"] / 1e6
    bf16 = {row["seed"]: dict(row["held_out"]) for row in result["rows"] if row["run"] == BF16}
    figure, (losses, differences) = pyplot.subplots(1, 2, figsize=(15, 6))
    colors = pyplot.get_cmap("tab20")
    runs = list(dict.fromkeys(row["run"] for row in result["rows"]))
    for row in result["rows"]:
        style = {
            "color": "black" if row["run"] == BF16 else colors(runs.index(row["run"]) % 20),
            "linestyle": "--" if THEN in row["run"] else "-",
            "label": row["run"] if row["seed"] == min(r["seed"] for r in result["rows"]) else None,
            "linewidth": 1.2,
        }
        losses.plot([step * tokens for step, _ in row["held_out"]], [loss for _, loss in row["held_out"]], **style)
        reference = bf16.get(row["seed"], {})
        points = [(step, 100 * (loss / reference[step] - 1)) for step, loss in row["held_out"] if step in reference]
        differences.plot([step * tokens for step, _ in points], [percent for _, percent in points], **style)
    losses.set(xlabel="million tokens", ylabel="held-out loss (nats per byte)", yscale="log")
    plain_ticks(losses.yaxis)
    differences.set(xlabel="million tokens", ylabel="held-out loss above bf16 (%)")
    targets = {line.get("target_percent") for line in result["comparison"]} - {None}
    for percent in targets:
        differences.axhline(percent, color="gray", linestyle=":", linewidth=0.8)
    differences.legend(fontsize=8)
    figure.tight_layout()
    return figure


def traces(result: dict):
    """mu, overflow, underflow and loss of every step of the runs that have FP8 gradients."""
    pyplot, rows = drawing(), [row for row in result["rows"] if row["trace"]]
    if not rows:
        raise ValueError("no run has FP8 gradients")
    figure, axes = pyplot.subplots(2, 2, figsize=(13, 8), layout="constrained")
    panels = list(axes.flat)
    several = len({row["seed"] for row in rows}) > 1
    for row in rows:
        steps = range(1, len(row["trace"]["mu"]) + 1)
        name = {"fp8-lm-o1": "auto (fp8-lm-o1)"}.get(row["run"], row["run"])
        style = {"label": f"{name}, seed {row['seed']}" if several else name, "linewidth": 1.0}
        for panel, quantity in zip(panels, TRACED):
            panel.plot(steps, row["trace"][quantity], **style)
    base = {row["seed"]: dict(row["held_out"]) for row in result["rows"] if row["run"] == BF16}
    for row in rows:
        reference = base.get(row["seed"])
        points = [
            (step, 100 * (loss / reference[step] - 1) if reference else loss)
            for step, loss in row["held_out"]
            if not reference or step in reference
        ]
        panels[3].plot(*zip(*points), marker=".", linewidth=1.0)
    panels[0].set(title="mu", yscale="log", xlabel="step")
    panels[1].set(title="share of numbers at the largest code (overflow)", xlabel="step")
    panels[1].set_yscale("symlog", linthresh=1e-7)
    panels[1].axhline(TOLERATED_SHARE, color="gray", linestyle=":", linewidth=0.8)
    panels[2].set(title="share of numbers that became zero (underflow)", xlabel="step")
    panels[2].set_yscale("symlog", linthresh=1e-5)
    panels[3].set(title="held-out loss above bf16 (%)" if base else "held-out loss", xlabel="step")
    panels[0].legend(fontsize=8)
    figure.suptitle(f"FP8 gradients, {result['settings']['ranks']} rank(s)")
    return figure


def policies(result: dict):
    """mu, signal-to-noise ratio, overflow and underflow of every step; colors are policies, line styles ranks."""
    pyplot, rows = drawing(), result["rows"]
    titles = {
        "mu": "mu",
        "snr_db": "signal-to-noise ratio (dB)",
        "saturated": "share of numbers at the largest code (overflow)",
        "vanished": "share of numbers that became zero (underflow)",
    }
    figure, axes = pyplot.subplots(2, 2, figsize=(13, 8), layout="constrained")
    for panel, (name, title) in zip(axes.flat, titles.items()):
        for style, row in zip(("-", "--", ":", "-."), rows):
            for color, (policy, series) in enumerate(row["policies"].items()):
                steps = range(1, len(series[name]) + 1)
                label = f"{policy}, {row['ranks']} ranks"
                panel.plot(steps, series[name], style, color=f"C{color}", label=label, linewidth=1.2)
        panel.set(title=title, xlabel="step")
    axes[0, 0].set_yscale("log")
    axes[1, 0].set_yscale("symlog", linthresh=1e-7)
    axes[1, 0].axhline(TOLERATED_SHARE, color="gray", linestyle=":", linewidth=0.8)
    axes[1, 1].set_yscale("log")
    axes[0, 0].legend(fontsize=8)
    return figure


# Sizes of `rlhf_quality`.
RLHF_MODELS = {"base": "Llama of 103 M parameters", "tiny": "Llama of 0.12 M parameters"}


def quality(result: dict):
    """Curves of both algorithms: each seed thin, the mean over seeds thick."""
    pyplot, rows, settings = drawing(), result["rows"], result["settings"]
    panels = [
        ("reward_exact_match", "exact answers, samples", "% of responses", 100),
        ("eval_exact_match", "exact answers, held out, greedy", "% of responses", 100),
        ("entropy", "entropy", "nats per token", 1),
    ]
    figure, grid = pyplot.subplots(
        2, len(panels), figsize=(4.2 * len(panels), 6.6), layout="constrained", squeeze=False
    )
    recipes = sorted({row["recipe"] for row in rows}, key=lambda name: (name != "stock", name))
    for axes_row, stage in zip(grid, ("ppo", "grpo")):
        for axes, (key, title, unit, factor) in zip(axes_row, panels):
            for number, recipe in enumerate(recipes):
                curves = [row["curves"][stage][key] for row in rows if row["recipe"] == recipe]
                curves = [(steps, [factor * value for value in values]) for steps, values in curves]
                for steps, values in curves:
                    axes.plot(steps, values, color=f"C{number}", linewidth=0.6, alpha=0.35)
                means = [statistics.fmean(values) for values in zip(*(values for _, values in curves))]
                label = "bf16" if recipe == "stock" else recipe
                axes.plot(curves[0][0][: len(means)], means, color=f"C{number}", linewidth=1.9, label=label)
            axes.set(title=f"{stage.upper()}: {title}", xlabel="iteration", ylabel=unit)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", alpha=0.25)
    grid[0][0].legend(frameon=False)
    model, ranks = RLHF_MODELS[settings["size"]], settings["ranks"]
    figure.suptitle(
        f"{model}, {ranks} rank{'s' * (ranks > 1)}; each of {settings['seeds']} seeds thin, their mean thick"
    )
    return figure


def _mean(curves: list[dict[int, float]]) -> dict[int, float]:
    return {step: statistics.fmean(curve[step] for curve in curves) for step in curves[0]}


def learning(*results: dict):
    """Held-out losses, and how far they are from the reference of the same seed; each seed thin, the mean thick.

    A seed that was run several times counts as the mean of its runs; what has nothing beside it is left out.
    """
    pyplot = drawing()
    groups = [group for group in groups_of(list(results)) if len({row["run"] for row in group["rows"]}) > 1]
    figure, grid = pyplot.subplots(len(groups), 2, figsize=(13, 4.4 * len(groups)), layout="constrained", squeeze=False)
    for (losses, differences), group in zip(grid, groups):
        chosen = group["settings"]
        million = chosen["batch"] * chosen["sequence"] / 1e6
        found: dict[str, dict[int, list[dict[int, float]]]] = {}
        for row in group["rows"]:
            found.setdefault(row["run"], {}).setdefault(row["seed"], []).append(dict(row["held_out"]))
        curves = {run: {seed: _mean(runs) for seed, runs in of_run.items()} for run, of_run in found.items()}
        named = [line["reference"] for line in group["comparison"] if "reference" in line]
        base = curves[named[0]] if named else {}
        for run, of_seeds in curves.items():
            place = ORDER.index(run)
            style = {"color": f"C{place % 10}", "linestyle": "--" if place >= 10 else "-"}
            losses_of = list(of_seeds.values())
            pairs = [
                {step: 100 * (loss / base[seed][step] - 1) for step, loss in curve.items()}
                for seed, curve in of_seeds.items()
                if seed in base and base is not of_seeds
            ]
            for axis, each in ((losses, losses_of), (differences, pairs)):
                for curve in each:
                    axis.plot([s * million for s in curve], curve.values(), **style, linewidth=0.6, alpha=0.4)
                if each:
                    mean, label = _mean(each), f"{run}, {len(each)} seed(s)"
                    axis.plot([s * million for s in mean], mean.values(), **style, linewidth=1.9, label=label)
        differences.axhline(TARGET_PERCENT, color="gray", linestyle=":", linewidth=0.8)
        losses.set(xlabel="million tokens", ylabel="held-out loss (nats per byte)", yscale="log")
        differences.set(xlabel="million tokens", ylabel=f"above {named[0]} of the same seed (%)" if named else "")
        if not base:
            differences.set_visible(False)
        plain_ticks(losses.yaxis)
        count, lr = group["rows"][0]["parameters"], chosen["lr"]
        size = f"{count / 1e6:.3g} M" if count < 1e9 else f"{count / 1e9:.3g} B"
        rate = f"learning rate {lr:g}" + (f" to {lr * chosen['least_rate']:g}" if chosen["least_rate"] < 1 else "")
        words = f"{chosen['case']}, {size} parameters, {chosen['steps']} steps, {rate}, {chosen['ranks']} ranks"
        losses.set_title(words, fontsize=10)
        losses.legend(frameon=False, fontsize=8)
    return figure


# Question: what is drawn of its results.
DRAWN = {
    "two_nodes": step_time,
    "convergence": held_out,
    "lora_quality": held_out,
    "fp8_lm_convergence": traces,
    "fp8_lm_policies": policies,
    "rlhf_quality": quality,
    wire.QUESTION: learning,
}
# What is kept: the picture, below benchmarks/results, its function, the results.
KEPT = {
    "two_nodes/h200-4": (compared, HEADLINE),
    "convergence/h200-1-local": (held_out, ("convergence/h200-1-local",)),
    "lora_quality/h200-1-local": (held_out, ("lora_quality/h200-1-local",)),
    "fp8_lm_convergence/h200-1-local": (held_out, ("fp8_lm_convergence/h200-1-local",)),
    "fp8_lm_convergence/h200-4-nvlink-mu": (traces, ("fp8_lm_convergence/h200-4-nvlink",)),
    "fp8_lm_policies/h200-1-local": (policies, ("fp8_lm_policies/h200-1-local",)),
    "rlhf_quality/h200-1-local": (quality, ("rlhf_quality/h200-1-local",)),
}
if wire.FILES:
    KEPT[f"{wire.QUESTION}/curves"] = (learning, wire.FILES)


def draw_kept() -> None:
    """All pictures beside the results."""
    for name, (function, files) in KEPT.items():
        save(function(*(read_result(RESULTS / f"{file}.json") for file in files)), RESULTS / f"{name}.png")


def draw(paths: list[str], to: str) -> None:
    """One picture of results of one question.

    Raises:
        UnfinishedError: one was cut short.
        ValueError: they are of several questions, or of one that is not drawn.
    """
    results = [finished_result(path) for path in paths]
    questions = {result["question"] for result in results}
    if len(questions) > 1 or not questions <= set(DRAWN):
        raise ValueError(f"results of {', '.join(sorted(questions))}: give those of one of {', '.join(DRAWN)}")
    save(DRAWN[questions.pop()](*results), Path(to))


def save(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    drawing().close(figure)
