"""How far a rate may be from what a number of answers shows: 95 % intervals of rates and of their differences."""

from __future__ import annotations

import math
from collections.abc import Sequence

NORMAL_95 = 1.959964  # 97.5 % of a normal distribution lie below this


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """The rates p for which `right` of `count` lies within 1.96 standard deviations, sqrt(p (1 - p) / count), of p.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference" (1927). Unlike rate +- 1.96
    standard deviations it never leaves [0, 1] and is no point where all answers or none are right.

    Raises:
        ValueError: no answers, or more right ones than there are.
    """
    if count < 1 or not 0 <= right <= count:
        raise ValueError(f"wilson_interval: {right} right answers of {count}")
    rate, square = right / count, NORMAL_95**2
    center = (rate + square / (2 * count)) / (1 + square / count)
    half = NORMAL_95 / (1 + square / count) * math.sqrt(rate * (1 - rate) / count + square / (4 * count**2))
    # At the ends of [0, 1] rounding would miss them by 1e-16.
    return (center - half if right > 0 else 0.0), (center + half if right < count else 1.0)


def paired_difference(before: Sequence[bool], after: Sequence[bool]) -> tuple[float, tuple[float, float]]:
    """(rate after - rate before, its interval) where both answered the same questions, in the same order.

    The difference comes from the questions whose answer became right or wrong. Those that both got right or wrong are
    no noise, so the interval is narrower than that of two independent samples. It is Wald's for paired rates with one
    question added to each of the two kinds of change (Bonett and Price, "Adjusted Wald confidence interval for a
    difference of binomial proportions based on paired data", 2012), which also holds where few answers changed.

    Raises:
        ValueError: no answers, or not as many before as after.
    """
    count = len(before)
    if count < 1 or count != len(after):
        raise ValueError(f"paired_difference: {count} answers before, {len(after)} after")
    gained = sum(b and not a for a, b in zip(before, after))
    lost = sum(a and not b for a, b in zip(before, after))
    gains, losses = (gained + 1) / (count + 2), (lost + 1) / (count + 2)
    center = gains - losses
    half = NORMAL_95 * math.sqrt((gains + losses - center**2) / (count + 2))
    return (gained - lost) / count, (max(-1.0, center - half), min(1.0, center + half))
