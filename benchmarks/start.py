"""The seconds to the end of a job's first step, beside stock ZeRO-3: what the plugin adds, part by part.

    python -m benchmarks.start --ranks 2 --out runs/start.json

Each start is one of fresh processes, as a launcher makes them, that train two steps (harness/starting.py) with the
plugin's section as a user writes it. Every run starts in every round, forwards in even rounds and backwards in odd; a
start of stock before them all is not counted, which reads from disk what all later ones find in memory. On GPUs a
recipe starts twice in a round: with an empty cache of Triton ("cold", as after an installation), and with what that
start has left there ("warm"). Stock compiles no kernel, and there are none on a CPU. Compiled runs
start where --runs names them: torch.compile takes a minute.

A row is that of the rank that was last; of a run's rounds the fastest counts, since nothing but the machine makes a
start slower than it need be. "Kernels" are those in the cache after the first step and after the second: each that was
not there before was compiled, and waited for. The target: at most 3 s more than stock.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.harness.command import add_batch, choose_runs, command, cut_into_nodes
from benchmarks.harness.jobs import Job
from benchmarks.harness.question import Question
from benchmarks.harness.sizes import SIZES
from benchmarks.harness.starting import COMPILED, PARTS, SECTIONS, STOCK
from benchmarks.harness.tables import cell, link_of, verdict
from examples.options import whole

TARGET = 3.0  # seconds more than stock
NONE, COLD, WARM = "none", "cold", "warm"


def jobs(args) -> list[Job]:
    """A job of each start; stock's first is not counted."""
    order = [(n, run) for n in range(args.rounds) for run in args.runs[:: -1 if n % 2 else 1]]
    starts = [(-1, STOCK, NONE)]
    for n, run in order:
        starts += [(n, run, cache) for cache in ((COLD, WARM) if args.on_gpu and run != STOCK else (NONE,))]
    made = []
    for n, run, cache in starts:
        folder = str(Path(args.caches, f"{run}-{n}"))
        where = {"TRITON_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
        label = f"{run}, round {n}, cache {cache}"
        made.append(Job(label, [run], {"round": n, "cache": cache}, environment=where))
    return made


@contextlib.contextmanager
def caches(args) -> Iterator[None]:
    """The folder of the caches, removed at the end."""
    try:
        yield
    finally:
        shutil.rmtree(args.caches)


def compare(rows: list[dict]) -> list[dict]:
    """A line per run and cache, of its fastest round; how much later than stock its first step ends."""
    fastest = {}
    for row in sorted(rows, key=lambda row: row["total_s"]):
        fastest.setdefault((row["run"], row["cache"]), row)
    stock = fastest.get((STOCK, NONE))
    lines = []
    for run, cache in dict.fromkeys((row["run"], row["cache"]) for row in sorted(rows, key=_place)):
        row = fastest[run, cache]
        line = {key: row[key] for key in ("run", "cache", "total_s", "kernels", "seconds")}
        line["total_s_by_round"] = [each["total_s"] for each in rows if (each["run"], each["cache"]) == (run, cache)]
        if stock is not None and run != STOCK:
            line["more_s"] = row["total_s"] - stock["total_s"]
            line["met"] = line["more_s"] <= TARGET
        lines.append(line)
    return lines


def _place(row: dict) -> tuple:
    return list(SECTIONS).index(row["run"]), row["cache"]


def show(result: dict) -> None:
    """Print the table."""
    settings = result["settings"]
    print(
        f"\nSeconds of a start, Llama {settings['size']}, {settings['ranks']} rank(s) in {link_of(settings)}, "
        f"{settings['micro_batch']} x {settings['sequence']} tokens per rank, the fastest of {settings['rounds']} "
        f"round(s); at most {TARGET:g} s more than stock"
    )
    names = "".join(f"{part.replace('_', ' '):>12}" for part in PARTS)
    print(f"{'':<18}{'cache':>6}{names}{'to 1st step':>13}{'more':>8}{'kernels':>10}")
    for line in result["comparison"]:
        parts = "".join(cell(line["seconds"].get(part), 2, width=12) for part in PARTS)
        more = cell(line.get("more_s"), 2, width=8)
        total = cell(line["total_s"], 2, width=13)
        kernels = ", ".join(map(str, line["kernels"]))
        print(f"{line['run']:<18}{line['cache']:>6}{parts}{total}{more}{kernels:>10}  {verdict(line)}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = command(__doc__, "start", SECTIONS, SIZES, "1.3b" if on_gpu else "tiny")
    add_batch(parser, sequence=1024 if on_gpu else 64)
    parser.add_argument("--rounds", type=whole(1), default=2, help="odd ones backwards (default %(default)s)")
    args = parser.parse_args(argv)
    args.gbit = None
    cut_into_nodes(args, parser)
    choose_runs(args, parser, SECTIONS if args.runs else [run for run in SECTIONS if not run.endswith(COMPILED)])
    args.on_gpu, args.caches = on_gpu, tempfile.mkdtemp()
    return args


QUESTION = Question(
    name="start",
    parse=parse,
    settings=("size", "ranks", "nodes", "gbit", "micro_batch", "sequence", "rounds"),
    jobs=jobs,
    worker="benchmarks.harness.starting",
    compared=lambda result: {"comparison": compare(result["rows"])},
    show=show,
    links=caches,
)

if __name__ == "__main__":
    QUESTION.answer()
