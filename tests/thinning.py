"""Products of parameters: each value of each on a CPU, the whole product where there is a GPU.

And all tests in two parts, because cases of tests/system take most of the time. ZEROPP_FP8_TEST_FULL=1 asks for whole
products anywhere, and for both parts.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable

import torch

FULL = os.environ.get("ZEROPP_FP8_TEST_FULL") == "1" or torch.cuda.is_available()


PART_VARIABLE = "ZEROPP_FP8_TEST_PART"
FEWEST = 3  # cases of a function of which a run takes every other one


def part_of(functions: list, part: int) -> list[bool]:
    """Whether each case belongs to part 0 or 1 of a run in two parts, by the function that it is a case of.

    Both parts have the functions of few cases whole, and every other case of the others; None is in both as well.
    """
    counts, places = Counter(functions), Counter()
    kept = []
    for function in functions:
        kept.append(function is None or counts[function] < FEWEST or places[function] % 2 == part)
        places[function] += 1
    return kept


def latin_square(first: Iterable, second: Iterable, third: Iterable) -> list[tuple]:
    """As many cases as the first two parameters have together, in which every two values of any two parameters meet.

    The third must not be longer than the others.
    """
    first, second, third = list(first), list(second), list(third)
    if len(third) > min(len(first), len(second)):
        raise ValueError("give the shortest parameter last")
    return [(a, b, third[(i + j) % len(third)]) for i, a in enumerate(first) for j, b in enumerate(second)]


def thinned(*parameters: Iterable, full: bool = FULL) -> list[tuple]:
    """The product of parameters; thinned, as many of its cases as the first parameter has values.

    The other parameters go through their own product meanwhile, again and again. The first one must be long enough for
    each value of each to come.
    """
    values = [list(parameter) for parameter in parameters]
    if full:
        return list(itertools.product(*values))
    others = itertools.cycle(case[::-1] for case in itertools.product(*reversed(values[1:])))
    cases = [(first, *rest) for first, rest in zip(values[0], others)]
    for place, wanted in enumerate(values):
        missing = [value for value in wanted if value not in [case[place] for case in cases]]
        if missing:
            raise ValueError(f"{missing} in no case: give the longest parameter first")
    return cases
