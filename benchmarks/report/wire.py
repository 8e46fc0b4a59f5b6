"""The block of wire_convergence: a result is one run, and how many there are grows."""

from __future__ import annotations

from benchmarks.harness.results import RESULTS
from benchmarks.harness.wire_runs import groups_of
from benchmarks.report.blocks import Block, paragraph, since, table

QUESTION = "wire_convergence"
FILES = tuple(f"{QUESTION}/{path.stem}" for path in sorted((RESULTS / QUESTION).glob("*.json")))
CASES = {"pretrain": "Pretraining", "sft": "Fine-tuning on docstrings"}


def compared(*results: dict) -> str:
    """A table for each group of runs that can be compared."""
    if not results:
        return "No results are kept yet."
    return "\n\n".join(_of_group(group) for group in groups_of(list(results)))


def _of_group(group: dict) -> str:
    row, chosen = group["rows"][0], group["settings"]
    commits = ", ".join(dict.fromkeys(since(each) for each in group["rows"]))
    reference = next((line["reference"] for line in group["comparison"] if "reference" in line), None)
    head = f"""{CASES[chosen["case"]]}, {row["parameters"] / 1e6:.0f} M parameters, {row["tokens"] / 1e6:.1f} M tokens,
        {chosen["ranks"]} ranks as {chosen["nodes"]} nodes, {group["hardware"]["gpu"] or group["hardware"]["cpu"]},
        learning rate {chosen["lr"]:g}, then along a cosine to {100 * chosen["least_rate"]:g} % of it"""
    if reference:
        head += f"; differences are from `{reference}`"
    rows = [
        [
            f"`{line['run']}`",
            str(len(line["seeds"])),
            _with_half(line["mean"], line["half_width"], ".4f"),
            "" if line["stdev"] is None else f"{line['stdev']:.4f}",
            f"{line['percent']:+.2f} %" if "percent" in line else "",
            {True: "yes", False: "no", None: ""}[line.get("inside_interval")],
            _with_half(line["paired_percent"], line["paired_half_width"], "+.2f", " %")
            if "paired_percent" in line
            else "",
        ]
        for line in group["comparison"]
    ]
    columns = [
        "",
        "seeds",
        "held-out loss",
        "spread of seeds",
        "mean's difference",
        "in the interval",
        "paired by seed",
    ]
    return f"{paragraph(f'{head} ({commits}):')}\n\n{table(columns, rows)}"


def _with_half(mean: float, half_width: float | None, form: str, unit: str = "") -> str:
    text = f"{mean:{form}}"
    return text + ("" if half_width is None else f" ± {half_width:{form.lstrip('+')}}") + unit


BLOCKS = {"wire_convergence": Block(compared, FILES, sourced=False)}
