"""Where a training step's host and device time goes, for this project and its peers.

    python -m benchmarks.step_profile --runs stock,stock-leaf,zeropp,fsdp2 --out runs/step_profile.json

For each run: the step time without a profiler; device time of one step by kind of kernel, and how long the compute
stream was busy; host time of one step by Python function (cProfile, of the main thread: on a GPU autograd runs
backward's hooks in a thread of its own, which cProfile does not see) and by call into CUDA; the peak of memory in each
phase, and by owner at the highest. Ranks, model and runs are those of harness/peers.py. On a CPU there is no device
part, and of memory only what is there between steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.harness import memory, profiling
from benchmarks.harness.command import cut_into_nodes
from benchmarks.harness.environment import describe, forget_memory, join
from benchmarks.harness.measuring import Meter, random_tokens
from benchmarks.harness.nodes import launch, two_nodes
from benchmarks.harness.peers import MODELS, RUNS, made
from benchmarks.harness.profiling import device_profile, host_profile
from benchmarks.harness.results import append_to, begin_result, end_result
from benchmarks.harness.sizes import EVERY_SIZE
from examples.options import finite, new_file, whole


def worker(args) -> None:
    import torch
    import torch.distributed as dist

    device = join()
    for run in args.runs:
        found = forget_memory(device)
        trainer = made(run, args, device)
        batches = random_tokens(EVERY_SIZE[args.model].vocabulary, args.micro_batch, args.tokens, device)
        times, peak = [], Meter(device, found)
        for _ in range(args.warmup + args.steps):
            tokens = next(batches)
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            trainer.step(tokens)
            issued = time.perf_counter()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append((1e3 * (time.perf_counter() - start), 1e3 * (issued - start)))
        timed = times[args.warmup :]
        row = {
            "run": run,
            "step_ms": statistics.median(t for t, _ in timed),
            "host_returns_after_ms": statistics.median(t for _, t in timed),
            "found_gib": found / 2**30,
        }
        if device.type == "cuda":
            row["highest_gib"] = peak.peak() / 2**30  # of all steps until now, the first among them
        tokens = next(batches)
        row["memory"] = memory.memory_profile(trainer, lambda: trainer.step(tokens), device, found)  # noqa: B023
        rank0 = dist.get_rank() == 0
        if device.type == "cuda":
            if rank0:
                row["device"] = device_profile(lambda: trainer.step(tokens), 12)  # noqa: B023
            else:
                trainer.step(tokens)
                torch.cuda.synchronize()
        if rank0:
            row["host"] = host_profile(lambda: trainer.step(tokens), 40)  # noqa: B023
            append_to(args.out, "rows", row)
            show(row)
        else:
            trainer.step(tokens)
        dist.barrier()
        trainer.close()
    dist.destroy_process_group()


def show(row: dict) -> None:
    """Print one run's profile."""
    print(f"\n{row['run']}: step {row['step_ms']:.1f} ms, the host returns after {row['host_returns_after_ms']:.1f} ms")
    if "device" in row:
        profiling.show(row["run"], row["device"])
    memory.show(row["memory"])
    host = row["host"]
    print(f"  host (one step under cProfile): {host['total_ms']:.0f} ms, {host['calls']} calls")
    profiling.show_top(host["functions"])
    sys.stdout.flush()


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(argparse.Namespace(**json.loads(sys.argv[2])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--runs", type=lambda text: text.split(","), default=["stock", "zeropp", "fsdp2"])
    parser.add_argument("--gbit", type=finite(least=0), help="two nodes with so much between them; else one node")
    parser.add_argument("--ranks", type=whole(1), default=4)
    parser.add_argument("--model", choices=MODELS, default="1.3b" if on_gpu else "small")
    parser.add_argument("--micro-batch", type=whole(1), default=1)
    parser.set_defaults(accumulation=1)
    parser.add_argument("--tokens", type=whole(1), default=1024 if on_gpu else 128)
    parser.add_argument("--steps", type=whole(1), default=6)
    parser.add_argument("--warmup", type=whole(0), default=4)
    parser.add_argument("--fsdp-reduce-dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--timeout", type=finite(above=0), default=600)
    parser.add_argument("--out", type=new_file, default="runs/step_profile.json")
    args = parser.parse_args()
    cut_into_nodes(args, parser)
    unknown = [run for run in args.runs if run not in RUNS]
    if unknown:
        parser.error(f"--runs: {unknown[0]} is none of {', '.join(RUNS)}")
    settings = {name: getattr(args, name) for name in ("ranks", "nodes", "gbit", "model", "micro_batch", "tokens")}
    begin_result(args.out, {**describe("step_profile"), **settings})
    one_node = args.gbit is None
    link = contextlib.nullcontext() if one_node else two_nodes(args.gbit or None)
    with link, tempfile.TemporaryDirectory() as folder:
        job, store = ["--worker", json.dumps(vars(args))], Path(folder, "store")
        names = {"nodes": args.nodes, "namespaces": not one_node}
        launch("benchmarks.step_profile", job, args.ranks, store, args.timeout, **names)
    end_result(args.out)


if __name__ == "__main__":
    main()
