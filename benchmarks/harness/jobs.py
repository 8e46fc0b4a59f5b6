"""Groups of ranks that measure: started, limited in time, and begun again without a run that failed."""

from __future__ import annotations

import json
import os
import queue
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.nodes import launch
from benchmarks.harness.results import append_to, read_result


@dataclass
class Job:
    """Work for a group of ranks.

    `runs` follow one another in the same processes; the worker announces each before it begins, so that the others can
    go on without one that fails. They run in the folder `cwd`, from which they import first of all, with `environment`
    besides, and each rank in a namespace of its own where they are `apart`.
    """

    label: str
    runs: list[str]
    arguments: dict[str, Any] = field(default_factory=dict)
    cwd: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    apart: bool = False


def dealt_jobs(runs: Sequence[str], groups: int) -> list[Job]:
    """Runs dealt to so many groups, a job each."""
    dealt = [list(runs[place::groups]) for place in range(groups)]
    return [Job(f"group {place}", some) for place, some in enumerate(dealt) if some]


def run_jobs(
    module: str,
    jobs: Sequence[Job],
    args,
    deadline: float,
    *,
    side_by_side: int = 1,
    namespaces: bool = False,
    folders: Sequence[str] = (),
) -> None:
    """Do all jobs on groups of args.ranks ranks in args.nodes nodes, `side_by_side` groups at a time.

    A worker is called as `python -m module --worker JSON` with {**vars(args), **job.arguments, "runs", "label",
    "first_gpu"}. What fails, or has no time left, is added to the list "failed" of the result file args.out.
    """
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)

    def work(place: int) -> None:
        while True:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                _run_job(module, job, args, deadline, place % places * args.ranks, namespaces, folders)
            except TimeoutError as error:
                append_to(args.out, "failed", {"run": job.label, "error": str(error)})
                print(f"{job.label}: {error}", flush=True)
                return

    places = max(1, torch.cuda.device_count() // args.ranks)  # further groups share the GPUs of these
    threads = [threading.Thread(target=work, args=(place,)) for place in range(side_by_side)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _run_job(
    module: str, job: Job, args, deadline: float, first_gpu: int, namespaces: bool, folders: Sequence[str]
) -> None:
    runs = list(job.runs)
    while runs:
        left = deadline - time.monotonic()
        if left < 1:
            raise TimeoutError(f"no time was left for {', '.join(runs)}")
        before = len(_started(args.out, job.label))
        chosen = {**vars(args), **job.arguments, "runs": runs, "label": job.label, "first_gpu": first_gpu}
        with tempfile.TemporaryDirectory() as folder:
            try:
                launch(
                    module,
                    ["--worker", json.dumps(chosen)],
                    args.ranks,
                    Path(folder, "store"),
                    left,
                    nodes=args.nodes,
                    namespaces=namespaces or job.apart,
                    apart=job.apart,
                    environment=job.environment,
                    folders=folders,
                    cwd=job.cwd,
                    gpus=torch.cuda.device_count(),
                )
                return
            except RuntimeError as error:
                started = _started(args.out, job.label)[before:]
                if not started:  # the ranks did not even find each other: no run's fault, and no use to try again
                    append_to(args.out, "failed", {"run": job.label, "error": str(error)})
                    return
                if not started[-1].get("ended"):
                    run = started[-1]["run"]
                    print(f"{job.label}, {run}: {error}; going on without it", flush=True)
                    append_to(args.out, "failed", {"run": run, "label": job.label, "error": str(error)})
                runs = runs[sum(not entry.get("ended") for entry in started) :]


def _started(path: str, label: str) -> list[dict]:
    return [entry for entry in read_result(path)["started"] if entry["label"] == label]


def announce(args, run: str, **more) -> None:
    """Rank 0 of a worker writes that a run begins, or (`ended=True`) that what ends the processes now is no failure."""
    if torch.distributed.get_rank() == 0:
        append_to(args.out, "started", {"label": args.label, "run": run, **more})


def choose_gpus(args) -> None:
    """Let this process see the GPUs of its job: before anything of CUDA, `launch` having given it the first ones."""
    visible = [number for number in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if number]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(int(number) + args.first_gpu) for number in visible)
