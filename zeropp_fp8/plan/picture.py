"""Step time against what a node sends to others, as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from zeropp_fp8.outputs import drawn
from zeropp_fp8.plan.job import Cluster, PlanError

LOWEST, HIGHEST, POINTS = 1.0, 1000.0, 61  # Gbit/s, evenly by their logarithm


def draw(file: str, seconds_of: Mapping[str, Callable[[float], float]], cluster: Cluster, of: str) -> None:
    """Write a picture with a line a method.

    Args:
        file: its ending says the format.
        seconds_of: method -> seconds at so many Gbit/s.
        of: what takes the time, in words.

    Raises:
        PlanError: one node, which has no such link.
        OSError: the file cannot be written.
    """
    if cluster.nodes == 1:
        raise PlanError("--picture draws step time against the rate between nodes, and there is one node; give --nodes")
    rates = [LOWEST * (HIGHEST / LOWEST) ** (i / (POINTS - 1)) for i in range(POINTS)]
    with drawn(file, [4], width=8) as (axes,):
        for name, seconds in seconds_of.items():
            axes.loglog(rates, [1e3 * seconds(rate) for rate in rates], label=name)
        planned = f"{cluster.inter_gbit:g} Gbit/s, as planned"
        axes.axvline(cluster.inter_gbit, color="gray", linestyle=":", label=planned)
        axes.set_xlabel("a node sends (Gbit/s)")
        axes.set_ylabel(f"{of} (ms, modelled)")
        axes.grid(which="both", alpha=0.3)
        axes.legend()
