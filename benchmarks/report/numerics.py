"""Costs of sampling numerics."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.sizes import SIZES
from benchmarks.harness.tables import link_of
from benchmarks.numerics_cost import APART, TARGET
from benchmarks.report.blocks import Block, paragraph, table


def numerics_cost_says(*results: dict) -> str:
    """A sample, an idle section, and both, in steps that the host bounds; a line per recipe."""
    lines = [(result, line) for result in results for line in result["comparison"]]
    samples = {
        "met" if most < TARGET else "missed" if least >= TARGET else "not resolved"
        for _, line in lines
        for _, least, most in (line["sample_percent"],)
    }
    (tokens,) = {f"{of['micro_batch']} x {of['sequence']:,}" for of in (result["settings"] for result in results)}
    head = ["", "recipe", "parameters", "ms per step", "a sample, ms", f"one in {APART} steps, %"]
    head += ["idle section, %", "both, %", "both: target"]
    said = paragraph(
        f"""The target, below {TARGET:g} % of the time with a sample in {APART} steps, is
        {" or ".join(sorted(samples))} for samples. In brackets: intervals of 95 %. All with {tokens} tokens per GPU."""
    )
    return f"{table(head, [_row(*each) for each in lines])}\n\n{said}"


def _row(result: dict, line: dict) -> list[str]:
    settings = result["settings"]
    ranks, parameters = settings["ranks"], SIZES[settings["size"]].parameters

    def between(found: Sequence[float], digits: int) -> str:
        median, low, high = (f"{value:+.{digits}f}" for value in found)
        return f"{median} ({low} to {high})"

    return [
        f"{ranks} {result['hardware']['gpu']}" + (f" ({link_of(settings)})" * (ranks > 1)),
        f"`{line['run']}`",
        f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.0f} M",
        f"{line['without_ms']:.0f}",
        between(line["sample_ms"], 1),
        *(between(line[f"{what}percent"], 2) for what in ("sample_", "idle_", "")),
        line["verdict"],
    ]


BLOCKS = {
    "numerics_cost_says": Block(
        numerics_cost_says,
        ("numerics_cost/h100-1-local", "numerics_cost/h100-2-nvlink", "numerics_cost/h200-2-nvlink"),
    )
}
