"""How far a job is from the same job in high precision: its launch line, run twice for some steps, and the difference.

python -m zeropp_fp8 reference --steps 50 -- deepspeed --module zeropp_fp8.run train.py --deepspeed ds_config.json

The line runs as it is, then with the recipe `lossless`; each time all ranks end after so many steps. Script and
ds_config stay as they are. Both runs must begin with the same weights and see the same data, so the script has to seed
what it draws; where it does not the command says from which step on they differ, and its exit status is 1.
`--repeat` runs `lossless` twice: what differs then is not precision.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zeropp_fp8.config import TRIAL_VARIABLE, Trial

SAME = 1e-9  # relative, of sums in fp64 in another order


@dataclass
class Run:
    """What a run of the launch line gave, of one of its engines.

    Attributes:
        steps: what trial.py has written of each.
        pieces, layers: what is in low precision in it, and the linear layers that compute so.
    """

    steps: list[dict] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)


def read_run(path: Path, engine: int) -> Run:
    """What the engine of that number has written; an empty Run where there is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    mine = [values for values in map(json.loads, lines) if values["engine"] == engine]
    return Run(mine[1:], mine[0]["pieces"], mine[0]["layers"]) if mine else Run()


class Experiment:
    """Runs a launch line as different trials.

    Args:
        line: the words of the launch line.
        steps: of each run.
        engine: which of the script's engines that train is looked at, in the order of their making.
    """

    def __init__(self, line: Sequence[str], steps: int, engine: int = 0) -> None:
        self.line, self.steps, self.engine = list(line), steps, engine

    def run(self, name: str, high: Sequence[str] = (), skip_modules: Sequence[str] = ()) -> Run:
        """One run; what it prints goes to stderr.

        Raises:
            SystemExit: it failed, or made fewer steps with the plugin; with what to do.
        """
        print(f"zeropp_fp8: {self.steps} steps {name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "steps.jsonl")
            trial = Trial(steps=self.steps, file=str(file), high=list(high), skip_modules=list(skip_modules))
            environment = {**os.environ, TRIAL_VARIABLE: trial.model_dump_json()}
            status = subprocess.run(self.line, env=environment, stdout=sys.stderr).returncode
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
    """Root mean square over steps of the difference in "loss" or "grad_norm"; infinite where it is not finite."""
    squares = [(a[what] - b[what]) ** 2 for a, b in zip(run.steps, reference.steps)]
    return math.sqrt(sum(squares) / len(squares)) if all(map(math.isfinite, squares)) else math.inf


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


def table(run: Run, reference: Run) -> str:
    """Step by step."""
    lines = [f"{'step':>6}{'loss':>12}{'lossless':>12}{'difference':>12}{'grad norm':>12}{'lossless':>12}"]
    for a, b in zip(run.steps, reference.steps):
        loss = f"{a['loss']:>12.6f}{b['loss']:>12.6f}{a['loss'] - b['loss']:>12.2e}"
        lines.append(f"{a['step']:>6}{loss}{a['grad_norm']:>12.5g}{b['grad_norm']:>12.5g}")
    return "\n".join(lines)


def parser_of(command: str, text: str, steps: int) -> argparse.ArgumentParser:
    """What the commands that run a launch line have in common."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog=f"python -m zeropp_fp8 {command}", description=text, formatter_class=formatter
    )
    parser.add_argument("--steps", type=int, default=steps, help=f"of each run ({steps})")
    parser.add_argument("--engine", type=int, default=0, help="which engine that trains, in the order of their making")
    parser.add_argument("line", nargs=argparse.REMAINDER, metavar="-- LAUNCH LINE", help="what starts the job")
    return parser


def experiment_of(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Experiment:
    """The experiment that was asked for."""
    line = arguments.line[arguments.line[:1] == ["--"] :]
    if not line or arguments.steps < 1:
        parser.error("give a launch line after --, and at least one step")
    return Experiment(line, arguments.steps, arguments.engine)


def main(argv: Sequence[str] | None = None) -> None:
    """Exit status 1 where the runs cannot be compared."""
    parser = parser_of("reference", __doc__, 50)
    parser.add_argument("--repeat", action="store_true", help="run `lossless` twice, to see what is not precision")
    arguments = parser.parse_args(argv)
    experiment = experiment_of(parser, arguments)
    runs = {"as it is": experiment.run("as it is")}
    reference = experiment.run("in high precision", high=["all"])
    if arguments.repeat:
        runs["lossless again"] = experiment.run("in high precision, again", high=["all"])
    print(table(runs["as it is"], reference))
    for name, run in runs.items():
        loss, norm = (distance(run, reference, what) for what in ("loss", "grad_norm"))
        print(f"{name}: loss differs by {loss:.3g}, gradient norm by {norm:.3g} (root mean square over steps)")
    for name, run in runs.items():
        check_the_same(run, reference, name)


if __name__ == "__main__":
    main()
