"""Step time of this version of the package beside another one's: is a change free?

    mkdir -p runs/7e85fbb && git archive 7e85fbb zeropp_fp8 | tar -x -C runs/7e85fbb
    python -m benchmarks.before_after --before runs/7e85fbb --ranks 2 --out runs/before_after.json
    python -m benchmarks.before_after --before runs/7e85fbb --ranks 4 --gbit 25 --out runs/25gbit.json    (root)

A step on NVLink waits for Python, whose speed varies from minute to minute: both versions take turns, --rounds of them,
each turn in processes of its own, odd rounds backwards. The difference is that of the medians over all rounds; beside
it stands how far each version's own rounds are apart.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch

from benchmarks.harness.command import add_batch, add_link, add_steps, choose_runs, command, cut_into_nodes
from benchmarks.harness.engines import EngineRun
from benchmarks.harness.jobs import Job
from benchmarks.harness.measuring import random_tokens, timed_steps
from benchmarks.harness.nodes import set_rate_everywhere
from benchmarks.harness.peers import SECTIONS
from benchmarks.harness.question import Question
from benchmarks.harness.sizes import SIZES
from benchmarks.harness.tables import link_of

TARGET = 2.0  # percent that a step may become slower


def measure(run: str, args, device: torch.device) -> dict:
    """The row of one recipe, version and round."""
    import zeropp_fp8

    size = SIZES[args.size]
    if args.gbit is not None:
        set_rate_everywhere(None)
    trainer = EngineRun(SECTIONS[run], size, device, micro_batch=args.micro_batch)
    if args.gbit:
        set_rate_everywhere(args.gbit)
    batches = random_tokens(size.vocabulary, args.micro_batch, args.sequence, device)
    row = {"run": run, "version": args.version, "round": args.round, "package": Path(zeropp_fp8.__file__).parts[-3]}
    row |= timed_steps(trainer, batches, args.warmup, args.steps, device)
    trainer.close()
    return row


def turns(args) -> list[Job]:
    """A job for each round and version, of all recipes."""
    jobs = []
    for n in range(args.rounds):
        for version in ("before", "after")[:: -1 if n % 2 else 1]:
            cwd = args.before if version == "before" else None
            jobs.append(Job(f"{version}, round {n}", args.runs, {"round": n, "version": version}, cwd))
    return jobs


def compare(rows: list[dict]) -> list[dict]:
    """A line a recipe: the median of each version's rounds, how far they are apart, and the difference."""
    lines = []
    for run in dict.fromkeys(row["run"] for row in rows):
        line = {"run": run}
        for version in ("before", "after"):
            times = [row["step_ms"] for row in rows if (row["run"], row["version"]) == (run, version)]
            line |= {f"{version}_ms": statistics.median(times), f"{version}_by_round": times}
            line[f"{version}_spread_percent"] = 100 * (max(times) / min(times) - 1)
        line["percent_slower"] = 100 * (line["after_ms"] / line["before_ms"] - 1)
        line["met"] = line["percent_slower"] <= TARGET
        lines.append(line)
    return lines


def show(result: dict) -> None:
    """Print the table."""
    settings = result["settings"]
    print(
        f"\nStep time of {result['commit']} beside {settings['version_before']}, Llama {settings['size']}, "
        f"{settings['ranks']} rank(s) in {link_of(settings)}, {settings['rounds']} rounds; at most {TARGET:g} % slower"
    )
    print(f"{'':<14}{'before, ms':>12}{'rounds apart':>14}{'after, ms':>12}{'rounds apart':>14}{'slower':>9}")
    for line in result["comparison"]:
        cells = (f"{line[f'{v}_ms']:>12.1f}{line[f'{v}_spread_percent']:>12.1f} %" for v in ("before", "after"))
        met = "met" if line["met"] else "MISSED"
        print(f"{line['run']:<14}{''.join(cells)}{line['percent_slower']:>+7.1f} %  {met}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = command(__doc__, "before_after", SECTIONS, SIZES, "1.3b" if on_gpu else "tiny")
    parser.add_argument("--before", required=True, metavar="FOLDER", help="that holds the other version's zeropp_fp8")
    add_link(parser)
    add_batch(parser, sequence=1024 if on_gpu else 64)
    add_steps(parser, steps=20 if on_gpu else 4, warmup=5 if on_gpu else 1, rounds=4 if on_gpu else 2)
    args = parser.parse_args(argv)
    if not Path(args.before, "zeropp_fp8", "__init__.py").exists():
        parser.error(f"--before {args.before}: there is no package zeropp_fp8 in it")
    args.before = str(Path(args.before).resolve())
    args.version_before = Path(args.before).name
    cut_into_nodes(args, parser)
    choose_runs(args, parser, SECTIONS)
    return args


QUESTION = Question(
    name="before_after",
    parse=parse,
    settings=(
        "size",
        "ranks",
        "nodes",
        "gbit",
        "micro_batch",
        "sequence",
        "steps",
        "warmup",
        "rounds",
        "version_before",
    ),
    jobs=turns,
    work=measure,
    line=lambda row: f"{row['run']}, {row['version']}, round {row['round']}: {row['step_ms']:.1f} ms a step",
    compared=lambda result: {"comparison": compare(result["rows"])},
    show=show,
)

if __name__ == "__main__":
    QUESTION.answer()
