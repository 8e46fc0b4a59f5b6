"""Step time against what a node sends to others, as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from zeropp_fp8.outputs import drawn
from zeropp_fp8.plan.job import Job, PlanError

LOWEST, HIGHEST, POINTS = 1.0, 1000.0, 61  # Gbit/s, evenly by their logarithm


def draw(file: str, seconds_of: Mapping[str, Callable[[float], float]], job: Job, of: str) -> None:
    """Write a picture, in the format of the file's ending, with a line per method; the legend has the slowest first.

    Args:
        seconds_of: method -> seconds at so many Gbit/s.
        of: what takes the time, in words.
    """
    if (cluster := job.cluster).nodes == 1:
        raise PlanError("--picture draws step time against the rate between nodes, and there is one node; give --nodes")
    rates = [LOWEST * (HIGHEST / LOWEST) ** (i / (POINTS - 1)) for i in range(POINTS)]
    nodes = f"{cluster.nodes} x {cluster.ranks_per_node} GPUs, {job.micro_batches} x {job.tokens:,} tokens per GPU"
    with drawn(file, [max(4.5, 0.22 * len(seconds_of))]) as (axes,):
        for i, (name, seconds) in enumerate(sorted(seconds_of.items(), key=lambda it: -it[1](cluster.inter_gbit))):
            style = ("-", "--", ":", "-.")[i // 10 % 4]  # matplotlib has ten colours
            label = f"{name}, {1e3 * seconds(cluster.inter_gbit):.4g} ms"
            axes.loglog(rates, [1e3 * seconds(rate) for rate in rates], style, label=label, subs=(2, 5))
        axes.axvline(cluster.inter_gbit, color="gray", linewidth=1)
        for label in (axes.xaxis.set_major_formatter, axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            label("{x:g}")
        axes.set(xlabel="Gbit/s that one node sends", ylabel=f"ms per {of.split()[-1]} (modelled)")
        axes.set_title(f"{job.model.parameters / 1e9:.3g} B parameters{', LoRA' if job.lora else ''}, {nodes}")
        axes.grid(which="both", alpha=0.3)
        axes.legend(title=f"At {cluster.inter_gbit:g} Gbit/s:", loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
