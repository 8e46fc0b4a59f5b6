"""What sampling of numerics costs a training: below 1 % of a step?

    python -m benchmarks.numerics_cost --ranks 1 --out runs/numerics_cost.json                  # a GPU
    python -m benchmarks.numerics_cost --ranks 2 --gbit 0                                       # two nodes; as root

A run is a recipe, trained in three variants, each in processes of its own, --rounds of them in turns, odd rounds
backwards: without the section `numerics`, with it and no step sampled ("idle"), and with one sample in --every steps
("sampled"). What is timed is --every steps together, with one wait for the device at their end, so that waits of a
sample count; as many such groups as samples take to look at all gather units (`parts`) twice, and means of them.

    a sampled step costs        --every x (sampled - idle)     milliseconds a step, medians over rounds
    a step that is not          idle - without
    amortized                   of a step without the section, by one sample in 100 steps
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile

import torch

from benchmarks.harness.command import add_batch, add_link, choose_runs, command, cut_into_nodes
from benchmarks.harness.engines import EngineRun
from benchmarks.harness.jobs import Job
from benchmarks.harness.measuring import random_tokens, timed
from benchmarks.harness.nodes import set_rate_everywhere
from benchmarks.harness.question import Question
from benchmarks.harness.sizes import SIZES
from benchmarks.harness.tables import link_of
from examples.options import whole

TARGET = 1.0  # percent of a step, by one sample in APART steps
APART = 100
SECTIONS = {
    "zeropp": {"recipe": "zeropp"},
    "zeropp-fp8": {"recipe": "zeropp", "compute": {"format": "fp8"}},
    "fp8-lm": {"recipe": "fp8-lm"},
}
VARIANTS = ("without", "idle", "sampled")


def measure(run: str, args, device: torch.device) -> dict:
    """The row of one recipe, variant and round."""
    size, section = SIZES[args.size], dict(SECTIONS[run])
    if args.gbit is not None:
        set_rate_everywhere(None)
    with tempfile.TemporaryDirectory() as folder:
        if args.variant != "without":
            never = 10**9
            numerics = {"every": args.every if args.variant == "sampled" else never, "parts": args.parts}
            section["numerics"] = numerics | {"file": os.path.join(folder, "numerics.jsonl")}
        trainer = EngineRun(section, size, device, micro_batch=args.micro_batch)
        if args.gbit:
            set_rate_everywhere(args.gbit)
        batches = random_tokens(size.vocabulary, args.micro_batch, args.sequence, device)

        def group() -> None:
            for _ in range(args.every):
                trainer.step(next(batches))

        # A sample of each part has compiled what it runs.
        times = [timed(group, device)[0] for _ in range(args.parts + args.turns * args.parts)][args.parts :]
        samples = trainer.engine.zeropp_fp8_session.numerics
        trainer.close()
    return {
        "run": run,
        "variant": args.variant,
        "round": args.round,
        "step_ms": statistics.fmean(times) / args.every,
        "group_ms": times,
        "sampled_last": samples,
    }


def turns(args) -> list[Job]:
    """A job for each round and variant, of all recipes."""
    return [
        Job(f"{variant}, round {n}", args.runs, {"round": n, "variant": variant})
        for n in range(args.rounds)
        for variant in VARIANTS[:: -1 if n % 2 else 1]
    ]


def compare(rows: list[dict], every: int) -> list[dict]:
    """A line a recipe: the medians over rounds of its variants, and what they say of a sample's cost."""
    lines = []
    for run in dict.fromkeys(row["run"] for row in rows):
        found = {v: [row["step_ms"] for row in rows if (row["run"], row["variant"]) == (run, v)] for v in VARIANTS}
        if not all(found.values()):
            continue  # a variant has failed
        without, idle, sampled = (statistics.median(found[variant]) for variant in VARIANTS)
        sample, other = every * (sampled - idle), idle - without
        percent = 100 * (other + sample / APART) / without
        lines.append(
            {
                "run": run,
                "without_ms": without,
                "idle_ms": idle,
                "sample_ms": sample,
                "unsampled_percent": 100 * other / without,
                "sample_steps": sample / without,
                "percent": percent,
                "spread_percent": max(100 * (max(times) / min(times) - 1) for times in found.values()),
                "met": percent < TARGET,
            }
        )
    return lines


def show(result: dict) -> None:
    """Print the table."""
    settings = result["settings"]
    print(
        f"\nCost of sampled numerics, Llama {settings['size']}, {settings['ranks']} rank(s) in {link_of(settings)}, "
        f"{settings['rounds']} rounds; below {TARGET:g} % with a sample in {APART} steps"
    )
    heads = (
        f"{'step, ms':>10}{'unsampled':>11}{'a sample, ms':>14}{'in steps':>10}{'amortized':>11}{'rounds apart':>14}"
    )
    print(f"{'':<14}{heads}")
    for line in result["comparison"]:
        without = f"{line['without_ms']:>10.1f}{line['unsampled_percent']:>+9.2f} %"
        sample = f"{line['sample_ms']:>14.1f}{line['sample_steps']:>10.2f}{line['percent']:>+9.2f} %"
        apart = f"{line['spread_percent']:>12.1f} %"
        print(f"{line['run']:<14}{without}{sample}{apart}  {'met' if line['met'] else 'MISSED'}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = command(__doc__, "numerics_cost", SECTIONS, SIZES, "1.3b" if on_gpu else "tiny")
    add_link(parser)
    add_batch(parser, sequence=1024 if on_gpu else 32)
    parser.add_argument("--every", type=whole(1), default=4, help="steps to a sample (default %(default)s)")
    parser.add_argument("--parts", type=whole(1), default=8 if on_gpu else 2, help="of the section (%(default)s)")
    parser.add_argument("--turns", type=whole(1), default=2, help="samples of each part that are timed (%(default)s)")
    parser.add_argument("--rounds", type=whole(1), default=3 if on_gpu else 1, help="odd ones backwards (%(default)s)")
    args = parser.parse_args(argv)
    cut_into_nodes(args, parser)
    choose_runs(args, parser, SECTIONS)
    return args


QUESTION = Question(
    name="numerics_cost",
    parse=parse,
    settings=("size", "ranks", "nodes", "gbit", "micro_batch", "sequence", "every", "parts", "turns", "rounds"),
    jobs=turns,
    work=measure,
    line=lambda row: f"{row['run']}, {row['variant']}, round {row['round']}: {row['step_ms']:.1f} ms a step",
    compared=lambda result: {"comparison": compare(result["rows"], result["settings"]["every"])},
    show=show,
)

if __name__ == "__main__":
    QUESTION.answer()
