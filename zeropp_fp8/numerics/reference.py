"""How far a job is from the same job in high precision: its launch line, run twice for some steps, and the difference.

python -m zeropp_fp8 reference --steps 50 -- deepspeed --module zeropp_fp8.run train.py --deepspeed ds_config.json

The line runs as it is, then with the recipe `lossless`; each time all ranks end after so many steps. Both runs must
begin with the same weights and see the same data, so the script has to seed what it draws. If it does not, the command
says from which step on they differ, and exits with status 1. `--repeat` runs `lossless` twice: what differs then is not
precision. `--picture` draws losses, their difference, and how far each layer's gradients differ in each step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeropp_fp8.config import TRIAL_VARIABLE, Trial
from zeropp_fp8.numerics.picture import height_of, layer_map
from zeropp_fp8.outputs import Parser, drawn, json_at, said, table, whole

SAME = 1e-9  # relative, of sums in fp64 in another order


@dataclass
class Run:
    """The outcome of a run of the launch line, of one of its engines.

    Attributes:
        steps: what trial.py has written of each.
        pieces: what is in low precision in it; layers: of pieces, those that can be left out; gemms: of linear layers.
        matrices: those that train, in the order of each step's sketches.
    """

    steps: list[dict] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    layers: dict[str, list[str]] = field(default_factory=dict)
    gemms: list[str] = field(default_factory=list)
    matrices: list[str] = field(default_factory=list)


def read_run(path: Path, engine: int) -> Run:
    """The records of the engine of that number; an empty Run where there is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    mine = [values for values in map(json.loads, lines) if values["engine"] == engine]
    if not mine:
        return Run()
    return Run(mine[1:], **{name: mine[0][name] for name in ("pieces", "layers", "gemms", "matrices")})


class Experiment:
    """Runs a launch line as different trials.

    Args:
        line: the words of the launch line.
        steps: of each run.
        engine: which of the script's engines that train is looked at, in the order of their making.
    """

    def __init__(self, line: Sequence[str], steps: int, engine: int = 0) -> None:
        self.line, self.steps, self.engine = list(line), steps, engine

    def run(self, name: str, **changes) -> Run:
        """One run, of a `Trial` with these changes; what it prints goes to stderr.

        Raises:
            SystemExit: it failed, or made fewer steps with the plugin; with what to do.
        """
        print(f"zeropp_fp8: {self.steps} steps {name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "steps.jsonl")
            trial = Trial(steps=self.steps, file=str(file), engine=self.engine, **changes)
            environment = {**os.environ, TRIAL_VARIABLE: trial.model_dump_json()}
            try:
                status = subprocess.run(self.line, env=environment, stdout=sys.stderr).returncode
            except OSError as error:
                raise SystemExit(f"the launch line cannot be started: {error}") from None
            found = read_run(file, self.engine)
        if status:
            raise SystemExit(f"the launch line ended with status {status} {name}; see what it has printed above")
        if len(found.steps) < self.steps:
            raise SystemExit(
                f"engine {self.engine} of the script made {len(found.steps)} steps of {self.steps} with the plugin "
                f"{name}; start it with -m zeropp_fp8.run or enable() and a section, or ask for fewer steps"
            )
        return found


def distance(run: Run, reference: Run, what: str) -> float:
    """Root mean square over steps of the difference in "loss" or "grad_norm"; infinite where one run's is not finite.

    Steps in which neither run's is are left out: fp16's loss scale settles in them. NaN where that is all of them.
    """
    pairs = [(a[what], b[what]) for a, b in zip(run.steps, reference.steps)]
    squares = [(a - b) ** 2 for a, b in pairs if math.isfinite(a) or math.isfinite(b)]
    if not all(map(math.isfinite, squares)):
        return math.inf
    return math.sqrt(sum(squares) / len(squares)) if squares else math.nan


def by_layer(run: Run, reference: Run) -> dict[str, list[float]]:
    """{layer: of each step the norm of the difference in its gradient, by that of the reference's}.

    From sketches (trial.py), within 6 % or so; NaN where gradients are not finite, or none came. In the first step
    weights are the same in both runs, and the difference is rounding; later ones are of weights that differ too.
    """
    found: dict[str, list[float]] = {name: [] for name in run.matrices if name in reference.matrices}
    for a, b in zip(run.steps, reference.steps):
        sketches = dict(zip(run.matrices, a["sketches"])), dict(zip(reference.matrices, b["sketches"]))
        for name, values in found.items():
            (*mine, _), (*exact, square) = (sketch[name] for sketch in sketches)
            values.append(math.dist(mine, exact) / math.sqrt(square) if square else math.nan)
    return found


def check_the_same(run: Run, reference: Run, name: str) -> None:
    """End with what prevents a comparison: other weights at start, or other data."""
    pairs = [*zip(run.steps, reference.steps)]
    if not math.isclose(pairs[0][0]["state"], pairs[0][1]["state"], rel_tol=SAME):
        raise SystemExit(f"{name}: began with different weights; seed the model, or let it begin from a checkpoint")
    for a, b in pairs:
        if not math.isclose(a["data"], b["data"], rel_tol=SAME):
            raise SystemExit(
                f"{name}: saw different data from step {a['step']} on; seed their order, or try fewer steps"
            )


def step_table(run: Run, reference: Run) -> str:
    rows = [("step", "loss", "lossless", "difference", "grad norm", "lossless")]
    for a, b in zip(run.steps, reference.steps):
        losses = (f"{a['loss']:.6f}", f"{b['loss']:.6f}", f"{a['loss'] - b['loss']:.2e}")
        rows.append((str(a["step"]), *losses, f"{a['grad_norm']:.5g}", f"{b['grad_norm']:.5g}"))
    return "\n".join(table(rows))


def layer_table(layers: dict[str, list[float]], worst: int = 5) -> str:
    """The layers whose gradients differ most in the first step that has some, and on average."""
    found = {name: [value for value in values if math.isfinite(value)] for name, values in layers.items()}
    found = {name: values for name, values in found.items() if values}
    rows = [("gradients differ", "first step", "all steps")]
    for name in sorted(found, key=lambda name: -found[name][0])[:worst]:
        rows.append((name, *(f"{100 * value:.2g} %" for value in (found[name][0], statistics.fmean(found[name])))))
    return "\n".join(table(rows, words=rows[0][:1]))


def draw(runs: dict[str, Run], reference: Run, path: str) -> None:
    """Losses, differences in loss, and differences in gradients, layer by layer, of the first of `runs`."""
    layers, steps = by_layer(next(iter(runs.values())), reference), [step["step"] for step in reference.steps]
    with drawn(path, [2.5, 2.5, *([height_of(layers)] if layers else [])]) as axes:
        for name, run in {**runs, "lossless": reference}.items():
            losses = [step["loss"] for step in run.steps]
            axes[0].plot(steps, losses, label=name)
            if run is not reference:
                differences = [loss - step["loss"] for loss, step in zip(losses, reference.steps)]
                axes[1].plot(steps, differences, label=name)
        for axis, title in zip(axes, ("loss", "difference in loss, run less lossless")):
            axis.set(title=title, xlabel="step", ylabel="in the job's unit")
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.legend(fontsize=7)
        if layers:
            percent = {name: [100 * value for value in values] for name, values in layers.items()}
            layer_map(axes[2], percent, steps, "difference in gradients", "% of lossless's norm")


def parser_of(command: str, text: str, steps: int) -> Parser:
    parser = Parser(command, text)
    parser.add_json()
    parser.add_argument("--steps", type=whole(), default=steps, help=f"of each run ({steps})")
    parser.add_engine()
    parser.add_argument("line", nargs=argparse.REMAINDER, metavar="-- LAUNCH LINE", help="what starts the job")
    return parser


def experiment_of(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Experiment:
    line = arguments.line[arguments.line[:1] == ["--"] :]
    if not line:
        parser.error("give a launch line after --")
    return Experiment(line, arguments.steps, arguments.engine)


def main(argv: Sequence[str] | None = None) -> None:
    """Exit status 1 where the runs cannot be compared."""
    parser = parser_of("reference", __doc__, 50)
    parser.add_argument("--repeat", action="store_true", help="run `lossless` twice, to see what is not precision")
    parser.add_picture("draw both runs, and their difference by step and layer, into this file")
    arguments = parser.parse_args(argv)
    experiment = experiment_of(parser, arguments)
    with json_at(arguments.json) as found:
        compare(experiment, arguments.repeat, arguments.picture, found)


def compare(experiment: Experiment, repeat: bool, picture: str | None, found: dict[str, Any]) -> None:
    """Make the runs, and print how far they are from each other."""
    runs = {"as it is": experiment.run("as it is")}
    reference = experiment.run("in high precision", high=["all"])
    if repeat:
        runs["lossless again"] = experiment.run("in high precision, again", high=["all"])
    print(step_table(runs["as it is"], reference))
    for name, run in runs.items():
        loss, norm = (distance(run, reference, what) for what in ("loss", "grad_norm"))
        found[name] = {"loss": loss, "grad_norm": norm, "steps": [_named(step) for step in run.steps]}
        print(f"{name}: loss differs by {loss:.3g}, gradient norm by {norm:.3g} (root mean square over steps)")
    found["lossless"] = {"steps": [_named(step) for step in reference.steps]}
    layers = found["gradients_differ"] = by_layer(runs["as it is"], reference)
    print(layer_table(layers))
    if picture:
        try:
            draw(runs, reference, picture)
        except OSError as error:
            raise SystemExit(f"reference: {said(error)}") from None
    for name, run in runs.items():
        check_the_same(run, reference, name)


def _named(step: dict) -> dict:
    return {name: step[name] for name in ("step", "loss", "grad_norm")}


if __name__ == "__main__":
    main()
