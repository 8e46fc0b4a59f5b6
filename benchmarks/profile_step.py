"""Where a training step's host and device time goes, for this project and its peers.

    python benchmarks/profile_step.py --runs stock,stock-leaf,zeropp,fsdp2 --gbit nvlink --out profile.json

For each run: the step time without a profiler; device time of one step by kind of kernel, and how long the compute
stream was busy; host time of one step by Python function (cProfile, of the main thread: on a GPU autograd runs
backward's hooks in a thread of its own, which cProfile does not see) and by call into CUDA. Ranks, model and runs are
those of two_nodes.py. On a CPU there is no device part.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the package, where it is not installed
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import two_nodes as bench
from emulated_nodes import launch, two_nodes
from environment import describe, forget_memory, join
from options import finite, new_file, whole

# (kind, parts of a kernel's name), the first that fits
KINDS = (
    ("nccl", ("nccl",)),
    ("quantize kernels", ("quantize_kernel", "reduce_to_payload", "reduce_to_tensors")),
    ("attention", ("flash", "fmha", "softmax")),
    ("matrix products", ("gemm", "cutlass", "cublas", "nvjet", "xmma")),
    ("optimizer", ("Adam", "adam")),
    ("copies", ("memcpy", "Memcpy", "memset", "Memset", "CatArray", "copy")),
)


def kind_of(kernel: str) -> str:
    """What a kernel is for, by its name."""
    return next((kind for kind, parts in KINDS if any(part in kernel for part in parts)), "elementwise and other")


def busy_ms(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of intervals in microseconds, as milliseconds."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e3


def device_profile(step, path: str) -> dict:
    """One step under torch.profiler, from its Chrome trace: device time by kind, host calls into CUDA."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(path)
    events = json.loads(Path(path).read_text())["traceEvents"]
    Path(path).unlink()
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    by_kind, by_stream, names = defaultdict(float), defaultdict(list), defaultdict(lambda: [0, 0.0])
    for event in kernels:
        by_kind[kind_of(event["name"])] += event["dur"] / 1e3
        if "nccl" not in event["name"]:
            by_stream[event["args"]["stream"]].append((event["ts"], event["ts"] + event["dur"]))
        entry = names[event["name"][:70]]
        entry[0] += 1
        entry[1] += event["dur"] / 1e3
    calls = defaultdict(lambda: [0, 0.0])
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            calls[event["name"]][0] += 1
            calls[event["name"]][1] += event["dur"] / 1e3
    first = min(e["ts"] for e in kernels)
    last = max(e["ts"] + e["dur"] for e in kernels)
    return {
        "span_ms": (last - first) / 1e3,
        "compute_stream_busy_ms": max((busy_ms(stream) for stream in by_stream.values()), default=0.0),
        "by_kind_ms": dict(sorted(by_kind.items(), key=lambda item: -item[1])),
        "kernels": top(names, 12),
        "cuda_calls": top(calls, 10),
    }


def top(table: dict, count: int) -> list:
    """[name, calls, ms] of the entries with most time."""
    ranked = sorted(table.items(), key=lambda item: -item[1][1])[:count]
    return [[name, calls, round(ms, 3)] for name, (calls, ms) in ranked]


def host_profile(step, count: int) -> dict:
    """One step under cProfile: the functions with most time of their own. It makes Python about twice as slow."""
    profiler = cProfile.Profile()
    profiler.enable()
    step()
    profiler.disable()
    stats = pstats.Stats(profiler)
    own = {}
    for (file, line, name), (_, calls, own_seconds, _, _) in stats.stats.items():
        place = f"{'/'.join(Path(file).parts[-2:])}:{line} {name}" if line else name
        own[place[:100]] = (calls, 1e3 * own_seconds)
    return {"total_ms": 1e3 * stats.total_tt, "calls": stats.total_calls, "functions": top(own, count)}


def worker(args) -> None:
    import torch
    import torch.distributed as dist

    bench.STOCK_LINEAR = torch.nn.functional.linear
    device = join()
    results = []
    for run in args.runs:
        found = forget_memory(device)
        trainer = (bench.FsdpRun if run in ("fsdp2", "hsdp") else bench.DeepSpeedRun)(run, args, device)
        batches = bench._batches(args, device)
        times = []
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
        tokens = next(batches)
        rank0 = dist.get_rank() == 0
        if device.type == "cuda":
            if rank0:
                row["device"] = device_profile(lambda: trainer.step(tokens), args.out + ".trace")  # noqa: B023
            else:
                trainer.step(tokens)
                torch.cuda.synchronize()
        if rank0:
            row["host"] = host_profile(lambda: trainer.step(tokens), 25)  # noqa: B023
            results.append(row)
            Path(args.out).write_text(json.dumps(results))
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
        device = row["device"]
        print(
            f"  device (one profiled step of {device['span_ms']:.1f} ms): compute stream busy "
            f"{device['compute_stream_busy_ms']:.1f} ms; "
            + ", ".join(f"{kind} {ms:.1f}" for kind, ms in device["by_kind_ms"].items())
        )
        for title in ("kernels", "cuda_calls"):
            print(f"  {title}")
            for name, calls, ms in device[title]:
                print(f"    {ms:9.2f} ms {calls:6d} x {name}")
    host = row["host"]
    print(f"  host (one step under cProfile): {host['total_ms']:.0f} ms, {host['calls']} calls")
    for name, calls, ms in host["functions"]:
        print(f"    {ms:9.2f} ms {calls:6d} x {name}")
    sys.stdout.flush()


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(argparse.Namespace(**json.loads(sys.argv[2])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="stock,zeropp,fsdp2")
    parser.add_argument("--gbit", default=bench.ONE_NODE, help=f'"{bench.ONE_NODE}": one node; else Gbit/s between two')
    parser.add_argument("--model", choices=bench.MODELS)
    parser.add_argument("--micro-batch", type=whole(1), default=1)
    parser.add_argument("--tokens", type=whole(1))
    parser.add_argument("--steps", type=whole(1), default=6)
    parser.add_argument("--warmup", type=whole(0), default=4)
    parser.add_argument("--fsdp-reduce-dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--timeout", type=finite(above=0), default=600)
    parser.add_argument("--out", type=new_file, default="profile.json")
    args = parser.parse_args()
    args.quantized_gbit = None
    bench._complete(args, parser)
    (rate,) = args.gbit
    one_node = rate == bench.ONE_NODE
    link = contextlib.nullcontext() if one_node else two_nodes(rate or None)
    with link, tempfile.TemporaryDirectory() as folder:
        job = ["--worker", json.dumps(vars(args))]
        store = Path(folder, "store")
        nodes = 1 if one_node else 2
        launch(__file__, job, bench.RANKS, store, args.timeout, nodes=nodes, namespaces=not one_node)
    result = describe("benchmarks/profile_step.py", sys.argv[1:])
    result["gbit"] = rate
    result["rows"] = json.loads(Path(args.out).read_text())
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
