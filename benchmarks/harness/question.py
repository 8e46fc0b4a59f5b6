"""The way of a benchmark whose runs are done by groups of ranks: command line, jobs, ranks, result file, table."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness.environment import describe, forget_memory, join
from benchmarks.harness.jobs import Job, announce, choose_gpus, run_jobs
from benchmarks.harness.measuring import limit_memory
from benchmarks.harness.nodes import two_nodes
from benchmarks.harness.results import append_to, begin_result, end_result
from benchmarks.harness.sizes import EVERY_SIZE


@dataclass(frozen=True)
class Question:
    """A question that a benchmark asks.

    Attributes:
        name: its module in benchmarks/, and the folder of its results.
        parse: its command line; at least runs, ranks, nodes, gbit, timeout and out.
        settings: names of arguments that the result keeps.
        work: on every rank, measures one run and gives its row (rank 0's is kept), or None where it writes by itself.
        line: what is printed of a row at once.
        compared: what is added to a result with all its rows.
        show: prints a result's table.
        jobs: those of the arguments; default: each round in one group of ranks, odd rounds backwards.
        folders: in the repository, from which ranks import besides.
        links: what is there while the jobs are done; default: two emulated nodes where there is a --gbit.
        worker: a module that ranks run instead of `work` and `line`, and that writes its rows itself.
    """

    name: str
    parse: Callable[[], argparse.Namespace]
    settings: Sequence[str]
    compared: Callable[[dict], dict]
    show: Callable[[dict], None]
    work: Callable[[str, argparse.Namespace, torch.device], dict | None] | None = None
    line: Callable[[dict], str] | None = None
    jobs: Callable[[argparse.Namespace], list[Job]] | None = None
    folders: Sequence[str] = ()
    links: Callable[[argparse.Namespace], contextlib.AbstractContextManager] | None = None
    worker: str | None = None

    def answer(self) -> None:
        """Measure, print the table, and end with status 1 if a run failed; in a rank: do the runs of its job."""
        if sys.argv[1:2] == ["--worker"]:
            self._work(argparse.Namespace(**json.loads(sys.argv[2])))
            return
        args = self.parse()
        settings = {name: getattr(args, name) for name in self.settings} | {"model": vars(EVERY_SIZE[args.size])}
        args.out = str(Path(args.out).resolve())  # ranks may run elsewhere
        begin_result(args.out, describe(self.name) | {"settings": settings})
        deadline, module = time.monotonic() + args.timeout, self.worker or f"benchmarks.{self.name}"
        jobs = (self.jobs or rounds_together)(args)
        link = args.gbit is not None
        options = {"side_by_side": getattr(args, "side_by_side", 1), "namespaces": link, "folders": self.folders}
        with (self.links or _between_nodes)(args):
            run_jobs(module, jobs, args, deadline, **options)
        result = end_result(args.out)
        if result["rows"]:
            result = end_result(args.out, **self.compared(result))
            self.show(result)
        else:
            print("\nnothing was measured")
        for failure in result["failed"]:
            print(f"failed: {failure['run']}: {failure['error']}")
        sys.exit(1 if result["failed"] else 0)

    def _work(self, args) -> None:
        choose_gpus(args)
        device = join()
        limit_memory(getattr(args, "gib", None), device)
        for run in args.runs:
            announce(args, run)
            row = self.work(run, args, device)
            forget_memory(device)
            if row is not None and torch.distributed.get_rank() == 0:
                append_to(args.out, "rows", row)
                print(self.line(row), flush=True)
        torch.distributed.destroy_process_group()


def _between_nodes(args) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if args.gbit is None else two_nodes()


def rounds_together(args) -> list[Job]:
    """A job a round, of all runs in one group of ranks; odd rounds backwards, so that a drift of the machine shows."""
    return [Job(f"round {n}", args.runs[:: -1 if n % 2 else 1], {"round": n}) for n in range(args.rounds)]


def runs_apart(args) -> list[Job]:
    """A job each run of each round, in ranks of its own; odd rounds backwards."""
    order = [(n, run) for n in range(args.rounds) for run in args.runs[:: -1 if n % 2 else 1]]
    return [Job(f"{run}, round {n}", [run], {"round": n}) for n, run in order]


def rounds(args) -> list[Job]:
    """On one GPU each run in a process of its own, which costs little; else rounds together."""
    return runs_apart(args) if args.ranks == 1 else rounds_together(args)
