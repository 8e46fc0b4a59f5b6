"""Losses of several seeds: means with their interval, and differences from a reference, by seed too."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

TARGET_PERCENT = 0.3  # by which the loss of a recipe may be above the reference's
# Student's t for 95 % on both sides together, of 1 ... 19 degrees of freedom: 2 ... 20 seeds.
T_975 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930),
)


class Interval(NamedTuple):
    """The mean of what was seen, and where the true one is with 95 %: at most half_width away (None: seen once)."""

    mean: float
    half_width: float | None

    def holds(self, value: float) -> bool | None:
        """Whether a value is in it."""
        return None if self.half_width is None else abs(value - self.mean) <= self.half_width


def interval(values: Sequence[float]) -> Interval:
    """mean +- t * s / sqrt(n), with the sample's own standard deviation s.

    Raises:
        ValueError: there are more values than T_975 knows.
    """
    if len(values) - 1 > len(T_975):
        raise ValueError(f"{len(values)} seeds: at most {len(T_975) + 1}")
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, None)
    return Interval(mean, T_975[len(values) - 2] * statistics.stdev(values) / len(values) ** 0.5)


def compare(rows: list[dict], references: Sequence[str]) -> list[dict]:
    """A line for each run of `rows` (run, seed, held_out_loss), in their order.

    Args:
        references: the run that others are compared with is the one of these with most seeds, the first of equals;
            where there is none, lines hold no comparison.

    A line says the mean over runs, its interval and their spread; `percent` that the mean is above the reference's, and
    whether it is inside the interval of that; `paired_percent`, the mean of how much it is above the reference of the
    same seed, with the interval of that: what seeds have in common falls out of it. A seed that was run several times
    counts as its mean there, and `apart_by_seed` says by how many percent its runs differ, in which nothing does.
    """
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[row["run"]][row["seed"]].append(row["held_out_loss"])
    reference = max(references, key=lambda name: len(found.get(name, ())))
    base = found.get(reference, {})
    around = interval(_all(base)) if base else None
    lines = []
    for run, losses in found.items():
        every = _all(losses)
        mean, half_width = interval(every)
        line = {"run": run, "seeds": sorted(losses), "runs": len(every), "mean": mean, "half_width": half_width}
        line["stdev"] = statistics.stdev(every) if len(every) > 1 else None
        line["apart_by_seed"] = {
            str(seed): 100 * (max(runs) / min(runs) - 1) for seed, runs in sorted(losses.items()) if len(runs) > 1
        }
        if around and run != reference:
            percent = 100 * (mean / around.mean - 1)
            line |= {"reference": reference, "percent": percent, "inside_interval": around.holds(mean)}
            line["within_target"] = percent <= TARGET_PERCENT
            pairs = {
                seed: 100 * (statistics.fmean(losses[seed]) / statistics.fmean(base[seed]) - 1)
                for seed in sorted(losses.keys() & base.keys())
            }
            if pairs:
                line["paired_by_seed"] = {str(seed): percent for seed, percent in pairs.items()}
                line["paired_percent"], line["paired_half_width"] = interval(list(pairs.values()))
        lines.append(line)
    return lines


def _all(losses: dict[int, list[float]]) -> list[float]:
    return [loss for of_seed in losses.values() for loss in of_seed]
