"""Measured step times beside those of the plan's formulas, after fitting rates of the machine where that is asked for.

python -m benchmarks.plan_fit benchmarks/results/lora_step --fit machine
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.plan_fit.fit import Residual, calibrate, check, fitted, held_out, machine_of, measured_on
from benchmarks.plan_fit.points import PEERS, load_points
from zeropp_fp8.outputs import Parser, run_command, table
from zeropp_fp8.plan import METHODS, PlanError
from zeropp_fp8.plan.__main__ import add_machine, hardware_of
from zeropp_fp8.plan.hardware import preset_of


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser("plan_fit", __doc__)
    parser.prog = "python -m benchmarks.plan_fit"
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="results, or folders of them; without one the peers known"
    )
    parser.add_argument("--fit", default="", help='"machine", or up to three fields of Hardware to fit, with commas')
    parser.add_argument("--held-out", action="store_true", help="with --fit machine: predict each run from the others")
    add_machine(parser)
    parser.add_json()
    arguments = parser.parse_args(argv)
    if arguments.held_out and arguments.fit != "machine":
        parser.error("--held-out needs --fit machine: it fits to all runs but one")
    return arguments


def comparison(residuals: Sequence[Residual]) -> list[str]:
    """Measured and modelled step times."""
    rows = [("run", "source", "measured (ms)", "modelled", "error", "")]
    for residual in residuals:
        point, error = residual.point, f"{100 * residual.error:+.1f}%"
        times = (f"{1e3 * seconds:.0f}" for seconds in (point.step_s, residual.modelled_s))
        rows.append((point.label, point.source, *times, error, "" if point.steady else "unsteady: not fitted to"))
    worst = max(abs(residual.error) for residual in residuals)
    said = f"largest error {100 * worst:.1f}% of {len(residuals)} points"
    return [*table(rows, words=("run", "source", "")), said]


def run(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    """Print the table and put its points into `found`.

    Peers and files are not mixed: the host's share of a step is the machine's, and was twice as long on one day as on
    another.

    Raises:
        PlanError: no points, or none of a method that is modelled.
    """
    points = [point for path in arguments.paths for point in load_points(path)] if arguments.paths else list(PEERS)
    unknown = sorted({point.run for point in points if point.run not in METHODS})
    points = [point for point in points if point.run in METHODS]
    if not points:
        where = ", ".join(arguments.paths)
        raise PlanError(f"{where}: no step times measured on GPUs{f', only of {unknown}' if unknown else ''}")
    lines = [f"no model for: {', '.join(unknown)}"] if unknown else []
    residuals = []
    for gpu in sorted({point.gpu for point in points}):
        of_it = [point for point in points if point.gpu == gpu]
        if gpu and preset_of(gpu) is None:  # older results name none, and are of an H200
            lines.append(f"{gpu}: there is no preset of it; begun from an H200's")
        preset = hardware = hardware_of(arguments, measured_on(gpu))
        fields = arguments.fit.split(",") if arguments.fit else []
        if fields == ["machine"]:
            hardware = machine_of(of_it, preset)
            fields = fitted(preset, hardware)
        elif fields:
            hardware = calibrate(of_it, preset, fields)
        lines += [f"fitted {field} = {getattr(hardware, field):.4g} ({getattr(preset, field):.4g})" for field in fields]
        residuals += held_out(of_it, preset) if arguments.held_out else check(of_it, hardware)
    found["points"] = [{**asdict(each.point), "modelled_s": each.modelled_s} for each in residuals]
    print("\n".join([*lines, *comparison(residuals)]))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the comparison; exit status 2 where there is nothing to compare, with its reason."""
    arguments = parse(argv)
    run_command("plan_fit", arguments.json, partial(run, arguments), PlanError)


if __name__ == "__main__":
    main()
