"""Costs of sampling numerics in a training: below 1 % of a step?

    python -m benchmarks.numerics_cost --ranks 1 --out runs/numerics_cost.json                  # a GPU
    python -m benchmarks.numerics_cost --ranks 2 --gbit 0                                       # two nodes; as root
    python -m benchmarks.numerics_cost --ranks 2 --nodes 2 --runs zeropp,zeropp-exact,fp8-lm --seconds 100 --timeout 150

A run is a recipe, trained by two engines that take turns in one process: one without the section `numerics`, one that
samples one step in 2 x --group. Each group of --group steps is timed together, with one wait for the device at its end:

    a cycle    without, idle (the section, and no sample), without, sampled (its second step)

Differences are taken inside a cycle, where what the machine does to steps is alike: in processes of their own steps of
1.3 B parameters on an H100 took 115 to 180 ms, and an idle section seemed to cost 7 %. A sample looks at one of --parts
of the gather units: as many cycles as there are parts warm up, then --turns times as many are measured; fewer where
the run's share of --seconds, its start included, is used up before.

    an idle section costs       idle - the mean of both groups beside it
    a sample costs              sampled - idle
    amortized                   both, with one sample in 100 steps, in percent of a step without the section

Of each the median over cycles, and the interval that holds it with 95 %. The target is met where all of the amortized
interval is below it, missed where all is above, else not resolved: more --turns make intervals smaller.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence

import torch

from benchmarks.harness.command import add_batch, add_link, choose_runs, command, cut_into_nodes
from benchmarks.harness.engines import EngineRun
from benchmarks.harness.jobs import dealt_jobs
from benchmarks.harness.measuring import random_tokens, timed
from benchmarks.harness.nodes import set_rate_everywhere
from benchmarks.harness.question import Question
from benchmarks.harness.sizes import SIZES
from benchmarks.harness.tables import link_of
from examples.options import finite, whole

TARGET = 1.0  # percent of a step, by one sample in APART steps
APART = 100
LEAST = 6  # cycles: the median of fewer has no interval of 95 %
SECTIONS = {
    "zeropp": {"recipe": "zeropp"},
    "zeropp-exact": {"recipe": "zeropp-exact"},
    "zeropp-fp8": {"recipe": "zeropp", "compute": {"format": "fp8"}},
    "fp8-lm": {"recipe": "fp8-lm"},
}


def measure(run: str, args, device: torch.device) -> dict:
    """The row of one recipe: milliseconds of each group, cycle by cycle."""
    from zeropp_fp8.numerics.sample import Sampler

    size, section, start = SIZES[args.size], SECTIONS[run], time.perf_counter()
    share = args.seconds / args.of_runs if args.seconds is not None else math.inf
    if args.gbit is None and args.nodes > 1:  # on one host
        section = section | {"topology": {"ranks_per_node": args.ranks // args.nodes}}
    if args.gbit is not None:
        set_rate_everywhere(None)
    with tempfile.TemporaryDirectory() as folder:
        numerics = {"every": 2 * args.group, "parts": args.parts, "file": os.path.join(folder, "numerics.jsonl")}
        sections = section, section | {"numerics": numerics}
        engines = [EngineRun(one, size, device, micro_batch=args.micro_batch) for one in sections]
        if args.gbit:
            set_rate_everywhere(args.gbit)
        batches = random_tokens(size.vocabulary, args.micro_batch, args.sequence, device)
        (sampler,) = (p for p in engines[1].engine.zeropp_fp8_session.parts if isinstance(p, Sampler))

        def group(engine: EngineRun, steps: int = args.group) -> float:
            made = [next(batches) for _ in range(steps)]  # before: a batch that is copied waits for the device
            return timed(lambda: [engine.step(tokens) for tokens in made], device)[0]

        # So that a sample is the second step of its group: the waits before and after it are in its time then.
        group(engines[1], args.group - 2)
        cycles = []
        for turn in range(args.turns + 1):
            began = time.perf_counter()
            for _ in range(args.parts):
                times, samples = [], []
                for engine in engines * 2:
                    times.append(group(engine))
                    samples.append(sampler.found)
                if not (samples[0] is samples[1] is samples[2] is not samples[3]):
                    raise RuntimeError("a sample was not made in the group that is to have it")
                cycles.append(times)
            if torch.distributed.get_rank() == 0:
                done = f"{run}: turn {turn} of {args.turns}{'' if turn else ' (warm-up)'}"
                print(f"{done}, {time.perf_counter() - start:.0f} s since its start", flush=True)
            now = time.perf_counter()
            if len(cycles) >= args.parts + LEAST and _on_any_rank(now - start + now - began > share, device):
                break
        sampled_last = sampler.found
        for engine in engines:
            engine.close()
    return {"run": run, "cycles_ms": cycles[args.parts :], "sampled_last": sampled_last}


def _on_any_rank(what: bool, device: torch.device) -> bool:
    """Whether something is so on some rank. Collective."""
    told = torch.tensor([int(what)], device=device)
    torch.distributed.all_reduce(told, op=torch.distributed.ReduceOp.MAX)
    return bool(told.item())


def median_of(values: Sequence[float]) -> list[float]:
    """[median, low, high] of LEAST values or more; with 95 % the true median is between low and high.

    By the test of signs, which asks nothing of how values are spread: of n, those below the true median are as many as
    heads of n coins.
    """
    ordered, n, cut, heads = sorted(values), len(values), 0, 1
    while heads + math.comb(n, cut + 1) <= 0.025 * 2**n:
        cut += 1
        heads += math.comb(n, cut)
    return [statistics.median(ordered), ordered[cut], ordered[-1 - cut]]


def compare(rows: list[dict], group: int) -> list[dict]:
    """A line a recipe: what the section and a sample cost, each as [median, low, high]."""
    lines = []
    for row in rows:
        cycles = row["cycles_ms"]
        without = statistics.median((a + b) / 2 / group for a, _, b, _ in cycles)
        idle = [100 * (idle - (a + b) / 2) / group / without for a, idle, b, _ in cycles]
        sample = [sampled - idle for _, idle, _, sampled in cycles]
        percent = [100 * ms / APART / without for ms in sample]
        amortized = median_of([sum(both) for both in zip(idle, percent)])
        _, low, high = amortized
        lines.append(
            {
                "run": row["run"],
                "cycles": len(cycles),
                "without_ms": without,
                "idle_percent": median_of(idle),
                "sample_ms": median_of(sample),
                "sample_percent": median_of(percent),
                "percent": amortized,
                "verdict": "met" if high < TARGET else "missed" if low >= TARGET else "not resolved",
            }
        )
    return lines


def show(result: dict) -> None:
    """Say it, a recipe at a time."""

    def between(found: Sequence[float], unit: str, digits: int) -> str:
        median, low, high = (f"{value:+.{digits}f}" for value in found)
        return f"{median} {unit} [{low}, {high}]"

    settings = result["settings"]
    print(
        f"\nCost of sampled numerics, Llama {settings['size']}, {settings['ranks']} rank(s) in {link_of(settings)}; "
        f"below {TARGET:g} % with a sample in {APART} steps"
    )
    for line in result["comparison"]:
        print(
            f"{line['run']}, {line['without_ms']:.1f} ms per step, {line['cycles']} cycles: "
            f"idle costs {between(line['idle_percent'], '%', 2)}, "
            f"a sample costs {between(line['sample_ms'], 'ms', 1)} "
            f"or {between(line['sample_percent'], '%', 2)} by one in {APART}, "
            f"amortized {between(line['percent'], '%', 2)}: {line['verdict']}"
        )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = command(__doc__, "numerics_cost", SECTIONS, SIZES, "1.3b" if on_gpu else "tiny")
    add_link(parser)
    add_batch(parser, sequence=1024 if on_gpu else 32)
    parser.add_argument("--group", type=whole(3), default=3, help="steps that are timed together (default %(default)s)")
    parser.add_argument("--parts", type=whole(1), default=8 if on_gpu else 2, help="of the section (%(default)s)")
    parser.add_argument("--turns", type=whole(1), default=4, help="samples of each part that are timed (%(default)s)")
    parser.add_argument("--nodes", type=whole(1), default=1, help="that the ranks count as, on one host without --gbit")
    parser.add_argument("--seconds", type=finite(above=0), help="of all runs together, for fewer turns (default: all)")
    args = parser.parse_args(argv)
    asked = args.nodes
    if args.parts * args.turns < LEAST:
        parser.error(f"--parts x --turns is {args.parts * args.turns}; an interval takes {LEAST} cycles")
    cut_into_nodes(args, parser)
    if args.gbit is None and asked > 1:
        args.nodes = asked
        if args.ranks % asked:
            parser.error(f"{args.ranks} ranks cannot be cut into {asked} nodes")
    choose_runs(args, parser, SECTIONS)
    args.of_runs = len(args.runs)
    return args


QUESTION = Question(
    name="numerics_cost",
    parse=parse,
    settings=("size", "ranks", "nodes", "gbit", "micro_batch", "sequence", "group", "parts", "turns", "seconds"),
    jobs=lambda args: dealt_jobs(args.runs, 1),
    work=measure,
    line=lambda row: f"{row['run']}: {len(row['cycles_ms'])} cycles",
    compared=lambda result: {"comparison": compare(result["rows"], result["settings"]["group"])},
    show=show,
)

if __name__ == "__main__":
    QUESTION.answer()
