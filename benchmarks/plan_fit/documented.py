"""The table of benchmarks/results/plan_fit/README.md fitted anew: line by line, where they differ, and its totals.

python -m benchmarks.plan_fit.documented
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Sequence

from benchmarks.harness.results import RESULTS
from benchmarks.plan_fit.fit import Residual, check, fitted, held_out, machine_of, measured_on
from benchmarks.plan_fit.points import load_points
from zeropp_fp8.plan import METHODS

PAGE = RESULTS / "plan_fit/README.md"
HEAD = "| steady runs, below `benchmarks/results` |"
BEYOND = 0.15  # an error that the totals count


def errors(residuals: Sequence[Residual]) -> list[float]:
    """Of steady runs."""
    return [abs(residual.error) for residual in residuals if residual.point.steady]


def main() -> int:
    """Print what the table holds now; exit status 1 where a line says otherwise."""
    totals: dict[str, list[float]] = {"fitted": [], "held out": [], "without a fit": []}
    constants, differing = 0, 0
    for line in PAGE.read_text().partition(HEAD)[2].partition("\n\n")[0].splitlines()[2:]:
        what, *said = (cell.strip() for cell in line.strip("|").split("|"))
        names = re.findall(r"`([^`]+)`", what.partition("`: ")[0] + "`")
        points = [p for name in names for path in sorted(RESULTS.glob(f"{name}.json")) for p in load_points(path)]
        points = [point for point in points if point.run in METHODS]
        preset = measured_on(points[0].gpu)
        machine = machine_of(points, preset)
        moved = len(fitted(preset, machine))
        of_line = [errors(check(points, machine)), errors(held_out(points, preset)), errors(check(points, preset))]
        found = [str(moved), *(f"{100 * max(each):.0f} %" for each in of_line[:2])]
        differing += found != said
        print(f"{'' if found == said else 'DIFFERS: '}{what} | {' | '.join(found)}", flush=True)
        constants += moved
        for total, each in zip(totals.values(), of_line):
            total += each
    print(f"\n{len(totals['fitted'])} runs, {constants} constants")
    for name, each in totals.items():
        beyond = sum(error > BEYOND for error in each)
        print(f"{name}: {beyond} beyond {100 * BEYOND:.0f} %, half within {100 * statistics.median(each):.1f} %")
    return differing > 0


if __name__ == "__main__":
    sys.exit(main())
