"""The summary of a pipeline: how each policy answers the held-out prompts, what its stages logged, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.intervals import paired_difference, wilson_interval
from common.monitor import LOG, read_log

LAST = ("eval_accuracy", "eval_reward_loss", "eval_sft_loss", "memory_gb", "wire_inter_mb", "wire_intra_mb",
        "outside_inter_mb", "outside_intra_mb")  # fmt: skip
BEFORE, AFTER = "#999999", "#0072b2"
IN_WORDS = {"exact_match": "exact answers", "gsm8k": "right numbers (gsm8k)", "format": "answers in the format"}


def read_answers(path: Path, metric: str) -> list[dict]:
    """The rows that evaluate.py wrote.

    Raises:
        ValueError: the metric says something else than 0 or 1 of one.
    """
    rows = read_log(path)
    other = [row[metric] for row in rows if row[metric] not in (0, 1)]
    if other:
        raise ValueError(f"{path}: {metric} is {other[0]}; intervals are those of a metric of 0 and 1")
    return rows


def summarize(out: Path, policies: Sequence[str], metric: str, stages: Sequence[str]) -> dict:
    """The figures of a run.

    Args:
        out: the pipeline's folder, with evaluate/NAME.jsonl and STAGE/log.jsonl.
        policies: folders of the policies, in the order in which they were made.
        metric: by which the answers are judged.

    Returns:
        NAME of each policy: rate, number of prompts, 95 % interval, rate of each kind of prompt where they have kinds;
        "difference", of two policies or more: the last one's rate less the first one's, with its interval; "logs": what
        each stage logged last of LAST; "curves": of each stage what may be drawn, [step, value] by name.
    """
    names = [Path(policy).name for policy in policies]
    answers = {name: read_answers(out / "evaluate" / f"{name}.jsonl", metric) for name in names}
    summary = {name: rates(rows, metric) for name, rows in answers.items()}
    if len(names) > 1:
        before, after = ([row[metric] == 1 for row in answers[name]] for name in (names[0], names[-1]))
        difference, interval = paired_difference(before, after)
        summary["difference"] = {"of": [names[-1], names[0]], metric: difference, "interval": list(interval)}
    logs = {stage: read_log(out / stage / LOG) for stage in stages}
    summary["logs"] = {stage: latest(log) for stage, log in logs.items()}
    summary["curves"] = {stage: curves_in(log, metric) for stage, log in logs.items()}
    return summary


def latest(log: Sequence[dict]) -> dict:
    """The last value of each name of LAST that a log has."""
    values = {name: value for row in log for name, value in row.items()}
    return {name: values[name] for name in LAST if name in values}


def curves_in(log: Sequence[dict], metric: str) -> dict[str, list[list[float]]]:
    """[step, value] of each name of `panels_of` that a log has."""
    names = [name for *_, curves in panels_of(metric) for name, _ in curves]
    curves = {name: [[row["step"], row[name]] for row in log if name in row] for name in names}
    return {name: points for name, points in curves.items() if points}


def rates(rows: Sequence[dict], metric: str) -> dict:
    """The rate of right answers, of all prompts and of each kind."""
    right = int(sum(row[metric] for row in rows))
    figures = {metric: right / len(rows), "n_eval": len(rows), "interval": list(wilson_interval(right, len(rows)))}
    kinds: dict[str, list] = {}
    for row in rows:
        if row.get("kind") is not None:
            kinds.setdefault(str(row["kind"]), []).append(row[metric])
    if kinds:
        figures["by_kind"] = {kind: sum(kinds[kind]) / len(kinds[kind]) for kind in sorted(kinds)}
    return figures


def rates_in(summary: dict) -> dict[str, dict]:
    """The part of a summary that is about policies, by their names."""
    return {name: figures for name, figures in summary.items() if isinstance(figures, dict) and "n_eval" in figures}


def lines(summary: dict, metric: str) -> list[str]:
    """The rates as text for the console."""
    said = []
    for name, figures in rates_in(summary).items():
        low, high = figures["interval"]
        said.append(
            f"{name:<8} {metric} {100 * figures[metric]:5.1f} %  [{100 * low:.1f}, {100 * high:.1f}] of "
            f"{figures['n_eval']} held-out prompts"
        )
    if "difference" in summary:
        figures = summary["difference"]
        low, high = figures["interval"]
        said.append(
            f"{figures['of'][0]} - {figures['of'][1]}: {100 * figures[metric]:+.1f} points  [{100 * low:+.1f}, "
            f"{100 * high:+.1f}]  (95 % intervals)"
        )
    return said


# --- the picture -------------------------------------------------------------------------------------------------


def score_of(options: dict, model_weight: float, penalty: float) -> str:
    """How the score of a stage's responses is made of rewards.

    Args:
        options: the stage's; model_weight, penalty: what holds where they say nothing of these.
    """
    weights = {"reward model": options.get("reward_model_weight", model_weight)} if options.get("reward_model") else {}
    weights |= dict(zip(options["reward_functions"], options["reward_weights"]))
    penalty = options.get("missing_eos_penalty", penalty)
    parts = [f"{weight:g} x {IN_WORDS.get(name, name)}" for name, weight in weights.items()]
    return f"score = {' + '.join(parts)}" + (f" - {penalty:g} where a response does not end" if penalty else "")


def draw(summary: dict, metric: str, path: Path, setting: str) -> None:
    """The curves of the last stage, the rates of all policies, and those of the first and the last one by kind.

    `setting`: the model, the recipe and the ranks, for the title, and what a score is.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    stage, known = list(summary["curves"].items())[-1]
    panels = [panel for panel in panels_of(metric) if any(name in known for name, _ in panel[-1])]
    columns = max(3, -(-(len(panels) + 2) // 2))
    figure = plt.figure(figsize=(4.3 * columns, 7.2), layout="constrained")
    grid = figure.add_gridspec(2, columns)
    for number, (title, unit, curves) in enumerate(panels):
        axes, factor = figure.add_subplot(grid[divmod(number, columns)]), 100 if unit.startswith("%") else 1
        for name, label in curves:
            if name in known:
                steps, values = zip(*known[name])
                axes.plot(steps, [factor * value for value in values], **style_of(name), label=label)
        xlabel = "iteration" if stage in ("ppo", "grpo") else "step"
        axes.set(title=f"{stage}: {title}", xlabel=xlabel, ylabel=unit)
        if len(axes.lines) > 1:
            axes.legend(frameon=False, fontsize=8)
    policies = rates_in(summary)
    bars(figure.add_subplot(grid[divmod(len(panels), columns)]), policies, metric)
    if all("by_kind" in figures for figures in policies.values()):
        bars_by_kind(figure.add_subplot(grid[divmod(len(panels) + 1, columns)]), policies)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    figure.suptitle(f"{setting}\n{lines(summary, metric)[-1]}", fontsize=11, color="#444444")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def panels_of(metric: str) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """(title, unit of its axis, [(name in the log, label)]) of what may be drawn."""
    words = IN_WORDS.get(metric, metric)
    return [
        ("score, the weighted sum of rewards", "points per response", [("reward", "score")]),
        ("reward model, before its weight", "points per response", [("reward_reward_model", "reward model")]),
        (words, "% of responses", [(f"reward_{metric}", "samples"), (f"eval_{metric}", "held out, greedy")]),
        ("KL to the reference", "nats per response", [("kl", "KL")]),
        ("entropy", "nats per token", [("entropy", "entropy")]),
        ("value loss", "points squared", [("value_loss", "value loss")]),
        ("SFT loss", "nats per token", [("sft_loss", "training"), ("eval_sft_loss", "held out")]),
        ("DPO loss", "nats per pair", [("dpo_loss", "training"), ("eval_dpo_loss", "held out")]),
        ("accuracy on preferences", "% of pairs", [("accuracy", "training"), ("eval_accuracy", "held out")]),
    ]


def style_of(name: str) -> dict:
    if name.startswith("eval_"):
        return {"color": AFTER, "marker": "o", "markersize": 4, "linewidth": 1.4}
    return {"color": "#d55e00" if name == "reward_reward_model" else "#444444", "linewidth": 1.2}


def bars(axes, policies: dict, metric: str) -> None:
    """The rate of each policy with its interval."""
    names, heights = list(policies), [100 * figures[metric] for figures in policies.values()]
    ends = [[100 * abs(figures[metric] - end) for end in figures["interval"]] for figures in policies.values()]
    colors = [BEFORE] * (len(names) - 1) + [AFTER]
    drawn = axes.bar(names, heights, 0.6, yerr=list(zip(*ends)), capsize=6, color=colors)
    axes.bar_label(drawn, [f"{height:.1f} %" for height in heights], padding=3)
    count = next(iter(policies.values()))["n_eval"]
    axes.set(title=f"{IN_WORDS.get(metric, metric)}, {count} held-out prompts, greedy", ylabel="% of prompts")
    axes.margins(y=0.15)


def bars_by_kind(axes, policies: dict) -> None:
    """The rates of the first and the last policy, a pair of bars for each kind of prompt."""
    first, last = next(iter(policies)), list(policies)[-1]
    kinds = list(policies[first]["by_kind"])
    for name, color, shift in ((first, BEFORE, -0.2), (last, AFTER, 0.2)):
        heights = [100 * policies[name]["by_kind"][kind] for kind in kinds]
        axes.barh([i + shift for i in range(len(kinds))], heights, 0.4, color=color, label=name)
    axes.set_yticks(range(len(kinds)), kinds, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set(title="by kind of task", xlabel="% of prompts")
    axes.legend(frameon=False, fontsize=8)
