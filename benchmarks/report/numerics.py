"""Costs of sampling numerics."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.sizes import SIZES
from benchmarks.harness.tables import link_of
from benchmarks.numerics_cost import APART, TARGET
from benchmarks.report.blocks import Block, paragraph


def numerics_cost_says(*results: dict) -> str:
    """A sample, an idle section, and both, in steps that the host bounds; a paragraph a recipe."""
    return "\n\n".join(_says(result, line) for result in results for line in result["comparison"])


def _says(result: dict, line: dict) -> str:
    settings = result["settings"]
    ranks = settings["ranks"]
    on = f"{'one' if ranks == 1 else ranks} {result['hardware']['gpu']}" + (f" ({link_of(settings)})" * (ranks > 1))
    _, least, most = line["sample_percent"]
    sampled = "met" if most < TARGET else "missed" if least >= TARGET else "not resolved"

    def between(found: Sequence[float], unit: str, digits: int) -> str:
        median, low, high = (f"{value:+.{digits}f}" for value in found)
        return f"{median} {unit} ({low} to {high})"

    def count(parameters: int) -> str:
        return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.0f} M"

    noise = ", the host's noise being larger than what four calls take" if line["verdict"] == "not resolved" else ""
    return paragraph(
        f"""On {on}, in `{line["run"]}` with {count(SIZES[settings["size"]].parameters)} parameters and
        {settings["micro_batch"]} x {settings["sequence"]:,} tokens ({line["without_ms"]:.0f} ms per step,
        {line["cycles"]} cycles), a sample costs {between(line["sample_ms"], "ms", 1)}: with one in {APART} steps
        {between(line["sample_percent"], "%", 2)} of the time, so that the target, below {TARGET:g} %, is {sampled} for
        samples. An idle section costs {between(line["idle_percent"], "%", 2)}, both
        {between(line["percent"], "%", 2)}: {line["verdict"]}{noise}."""
    )


BLOCKS = {
    "numerics_cost_says": Block(
        numerics_cost_says,
        ("numerics_cost/h100-1-local", "numerics_cost/h100-2-nvlink", "numerics_cost/h200-2-nvlink"),
    )
}
