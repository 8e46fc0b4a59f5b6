"""Step time of this version of the package beside another one's: is a change free?

    mkdir -p runs/7e85fbb && git archive 7e85fbb zeropp_fp8 | tar -x -C runs/7e85fbb
    python -m benchmarks.before_after --before runs/7e85fbb --ranks 2 --out runs/before_after.json
    python -m benchmarks.before_after --before runs/7e85fbb --ranks 4 --gbit 25 --out runs/25gbit.json    (root)

A step on NVLink waits for Python, whose speed varies from minute to minute: rounds of the same code differed by up to
56 % (benchmarks/results/plan_fit). So both versions are there at once, each in processes of its own on the same GPUs,
and step in turns. The difference is the median over the pairs of their steps.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.command import add_batch, add_link, add_steps, choose_runs, command, cut_into_nodes
from benchmarks.harness.engines import EngineRun
from benchmarks.harness.jobs import Job
from benchmarks.harness.measuring import random_tokens, synchronize, timed_steps
from benchmarks.harness.nodes import set_rate_everywhere
from benchmarks.harness.peers import SECTIONS
from benchmarks.harness.question import Question
from benchmarks.harness.sizes import SIZES
from benchmarks.harness.tables import link_of

TARGET = 2.0  # percent that a step may become slower
VERSIONS = ("before", "after")  # in the order of their turns


class Turns:
    """The steps of one run: this version's n-th begins when the other's before it has ended, on every rank.

    Args:
        path: of a file that all ranks of both versions see.
        seconds: that a rank waits for the others.
    """

    def __init__(self, path: str, run: str, version: str, seconds: float) -> None:
        self._store = dist.FileStore(path, -1)
        self._store.set_timeout(datetime.timedelta(seconds=seconds))
        self._run, self._version = run, version
        self._other = next(other for other in VERSIONS if other != version)

    def _ended(self, step: int) -> None:
        self._store.set(f"{self._run}, {self._version}, {step}, {dist.get_rank()}", "")

    def _wait(self, step: int) -> None:
        self._store.wait([f"{self._run}, {self._other}, {step}, {rank}" for rank in range(dist.get_world_size())])

    def of(self, batches: Iterable[Tensor], steps: int, device: torch.device) -> Iterator[Tensor]:
        """The first batches, each when the turn comes; to be exhausted, which waits for the other's last step."""
        self._ended(-1)
        for step, batch in zip(range(steps), batches):
            self._wait(step - (self._version == VERSIONS[0]))
            yield batch
            synchronize(device)
            self._ended(step)
        self._wait(steps - 1)


def measure(run: str, args, device: torch.device) -> dict:
    """The row of one recipe and version."""
    import zeropp_fp8

    size = SIZES[args.size]
    if args.gbit is not None:
        set_rate_everywhere(None)
    trainer = EngineRun(SECTIONS[run], size, device, micro_batch=args.micro_batch)
    if args.gbit:
        set_rate_everywhere(args.gbit)
    batches = random_tokens(size.vocabulary, args.micro_batch, args.sequence, device)
    turns = Turns(args.turns, run, args.version, args.timeout)
    batches = turns.of(batches, args.warmup + args.steps, device)
    row = {"run": run, "version": args.version, "package": Path(zeropp_fp8.__file__).parts[-3]}
    row |= timed_steps(trainer, batches, args.warmup, args.steps, device)
    next(batches, None)
    trainer.close()
    return row


def both_versions(args) -> list[Job]:
    """A job of all runs for each version."""
    folders, turns = {"before": args.before, "after": None}, str(Path(tempfile.mkdtemp(), "turns"))
    return [Job(v, args.runs, {"version": v, "turns": turns}, folders[v]) for v in VERSIONS]


def compare(rows: list[dict]) -> list[dict]:
    """A line per run: each version's median step, and the quartiles of the difference over pairs of steps."""
    lines = []
    for run in dict.fromkeys(row["run"] for row in rows):
        of_run = {row["version"]: row for row in rows if row["run"] == run}
        if set(of_run) != set(VERSIONS):
            continue  # one of them has failed, which the result says
        pairs = zip(*(of_run[version]["times_ms"] for version in VERSIONS), strict=True)
        slower = [100 * (after / before - 1) for before, after in pairs]
        first, median, third = statistics.quantiles(slower, n=4) if len(slower) > 1 else 3 * slower
        lines.append(
            {"run": run}
            | {f"{version}_ms": of_run[version]["step_ms"] for version in VERSIONS}
            | {"percent_slower": median, "quartiles_percent": [first, third], "met": median <= TARGET}
        )
    return lines


def show(result: dict) -> None:
    """Print the table."""
    settings = result["settings"]
    print(
        f"\nStep time of {result['commit']} beside {settings['version_before']}, Llama {settings['size']}, "
        f"{settings['ranks']} rank(s) in {link_of(settings)}, {settings['steps']} pairs of steps; "
        f"at most {TARGET:g} % slower"
    )
    print(f"{'':<18}{'before, ms':>12}{'after, ms':>12}{'slower':>9}{'half of the pairs':>22}")
    for line in result["comparison"]:
        times = "".join(f"{line[f'{version}_ms']:>12.1f}" for version in VERSIONS)
        first, third = line["quartiles_percent"]
        met = "met" if line["met"] else "MISSED"
        print(f"{line['run']:<18}{times}{line['percent_slower']:>+7.1f} %{first:>+12.1f} to {third:+.1f} %  {met}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = command(__doc__, "before_after", SECTIONS, SIZES, "1.3b" if on_gpu else "tiny")
    parser.add_argument("--before", required=True, metavar="FOLDER", help="that holds the other version's zeropp_fp8")
    add_link(parser)
    add_batch(parser, sequence=1024 if on_gpu else 64)
    add_steps(parser, steps=40 if on_gpu else 4, warmup=8 if on_gpu else 1)
    args = parser.parse_args(argv)
    if not Path(args.before, "zeropp_fp8", "__init__.py").exists():
        parser.error(f"--before {args.before}: there is no package zeropp_fp8 in it")
    args.before = str(Path(args.before).resolve())
    args.version_before = Path(args.before).name
    args.side_by_side = len(VERSIONS)
    cut_into_nodes(args, parser)
    choose_runs(args, parser, SECTIONS)
    return args


QUESTION = Question(
    name="before_after",
    parse=parse,
    settings=("size", "ranks", "nodes", "gbit", "micro_batch", "sequence", "steps", "warmup", "version_before"),
    jobs=both_versions,
    work=measure,
    line=lambda row: f"{row['run']}, {row['version']}: {row['step_ms']:.1f} ms per step",
    compared=lambda result: {"comparison": compare(result["rows"])},
    show=show,
)

if __name__ == "__main__":
    QUESTION.answer()
