"""Where the device time of a training step goes: one step under torch.profiler, its kernels by what they are for."""

from __future__ import annotations

import cProfile
import json
import pstats
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

# (kind, parts of a kernel's name in small letters), the first that fits
KINDS = (
    ("all-gather", ("nccldevkernel_allgather",)),
    ("reduce-scatter", ("nccldevkernel_reducescatter",)),
    ("all-to-all", ("nccldevkernel_sendrecv", "nccldevkernel_alltoall")),
    ("all-reduce", ("nccldevkernel_allreduce",)),
    ("other communication", ("nccl",)),
    ("attention", ("flash", "fmha", "cudnn_generated")),
    ("loss", ("softmax", "nll_loss")),
    ("GEMM", ("gemm", "cutlass", "cublas", "nvjet", "xmma", "cudnn")),
    (
        "casts to FP8",
        ("cast_tensor", "cast_rows", "cast_whole", "cast_blocks", "cast_tiles", "amax", "scales_kernel", "fused_cast")
        + ("row_statistics", "transpose_kernel", "round_trip", "swiglu_backward"),
    ),
    ("wire formats", ("quantize_kernel", "reduce_to_payload", "reduce_to_tensors")),
    ("optimizer", ("adam", "squares_kernel", "lpnorm", "l2norm")),
    ("copies", ("memcpy", "memset", "catarray", "copy")),
)
STREAM_OPERATIONS = "cudaEventRecord", "cudaStreamWaitEvent"  # what orders streams
PHASES = FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"  # what a trainer's step marks by record_function
COMMUNICATION = tuple(kind for kind, parts in KINDS if parts[0].startswith("nccl"))


def kind_of(kernel: str) -> str:
    """Return what a kernel is for, by its name."""
    name = kernel.lower()
    return next((kind for kind, parts in KINDS if any(part in name for part in parts)), "elementwise and other")


def busy_ms(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of intervals in microseconds, as milliseconds."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e3


def top(table: dict, count: int) -> list:
    """[name, calls, ms] of the entries with most time."""
    ranked = sorted(table.items(), key=lambda item: -item[1][1])[:count]
    return [[name, calls, round(ms, 3)] for name, (calls, ms) in ranked]


def summary(events: list[dict], count: int) -> dict:
    """Of the events of a Chrome trace (times in microseconds): device time by kind and by kernel, in milliseconds, and
    the host's calls into CUDA.

    "communication_ms" is the time in which a collective was on the device, waiting for other ranks included, and
    "exposed_ms" the part of it in which nothing else ran. "from_to_ms" of a kind of kernel: when the first begins and
    the last ends, and of a phase of the step: when the host does; from the first phase on, or the first kernel.
    """
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    by_kind, by_name = defaultdict(float), defaultdict(lambda: [0, 0.0])
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in kernels:
        kind, ms = kind_of(event["name"]), event["dur"] / 1e3
        by_kind[kind] += ms
        by_name[event["name"][:100]][0] += 1
        by_name[event["name"][:100]][1] += ms
        spans[kind in COMMUNICATION].append((event["ts"], event["ts"] + event["dur"]))
    calls = defaultdict(lambda: [0, 0.0])
    phases = [event for event in events if event.get("cat") == "user_annotation" and event["name"] in PHASES]
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            calls[event["name"]][0] += 1
            calls[event["name"]][1] += event["dur"] / 1e3
    computing = busy_ms(spans[False])
    everything = spans[True] + spans[False]
    return {
        "span_ms": (max(end for _, end in everything) - min(start for start, _ in everything)) / 1e3,
        "computing_ms": computing,
        "communication_ms": busy_ms(spans[True]),
        "exposed_ms": busy_ms(everything) - computing,
        "launches": len(kernels),
        "stream_operations": sum(n for name, (n, _) in calls.items() if name.startswith(STREAM_OPERATIONS)),
        "by_kind_ms": dict(sorted(by_kind.items(), key=lambda item: -item[1])),
        "from_to_ms": _from_to([(e["name"], e) for e in phases] + [(kind_of(e["name"]), e) for e in kernels]),
        "kernels": top(by_name, count),
        "cuda_calls": top(calls, min(count, 10)),
    }


def _from_to(named: list[tuple[str, dict]]) -> dict[str, list[float]]:
    """[first begin, last end] of the events of a name, in milliseconds after the first of all."""
    begin = named[0][1]["ts"] if named else 0
    found: dict[str, list[float]] = {}
    for name, event in named:
        start, end = (event["ts"] - begin) / 1e3, (event["ts"] + event["dur"] - begin) / 1e3
        first, last = found.get(name, (start, end))
        found[name] = [round(min(first, start), 3), round(max(last, end), 3)]
    return found


def device_profile(step: Callable[[], object], count: int) -> dict:
    """`summary` of one step on a GPU, with the `count` kernels that take most time."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        return summary(json.loads(trace.read_text())["traceEvents"], count)


def operators(step: Callable[[], object], count: int) -> dict:
    """The operators of one step with most host time of their own, as [name, calls, ms]: for runs on a CPU."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    table = {event.key: [event.count, event.self_cpu_time_total / 1e3] for event in profiler.key_averages()}
    return {"operators": top(table, count)}


def host_profile(step: Callable[[], object], count: int) -> dict:
    """One step under cProfile: the functions with most time of their own. It makes Python about twice as slow."""
    profiler = cProfile.Profile()
    profiler.enable()
    step()
    profiler.disable()
    return host_summary(profiler, count)


def host_summary(profiler: cProfile.Profile, count: int, package: str = "") -> dict:
    """Of what was profiled the `count` functions with most time of their own, and calls and time of all of them.

    With a package, its functions alone, and beside the totals its own calls and milliseconds.
    """
    stats = pstats.Stats(profiler)
    own = {}
    for (file, line, name), (_, calls, own_seconds, _, _) in stats.stats.items():
        if package in Path(file).parts or not package:
            place = f"{'/'.join(Path(file).parts[-2:])}:{line} {name}" if line else name
            own[place[:100]] = (calls, 1e3 * own_seconds)
    found = {"total_ms": 1e3 * stats.total_tt, "calls": stats.total_calls, "functions": top(own, count)}
    if package:
        found |= {"package_ms": sum(ms for _, ms in own.values()), "package_calls": sum(n for n, _ in own.values())}
    return found


def show(label: str, found: dict) -> None:
    """Print a profile."""
    if "operators" in found:
        print(f"\n{label}: operators of one step, their own host time")
        show_top(found["operators"])
        return
    print(
        f"\n{label}: one step of {found['span_ms']:.1f} ms, {found['launches']} launches; computing "
        f"{found['computing_ms']:.1f} ms, communication {found['communication_ms']:.1f} ms, of which exposed "
        f"{found['exposed_ms']:.1f} ms"
    )
    print("  " + ", ".join(f"{kind} {ms:.1f}" for kind, ms in found["by_kind_ms"].items()))
    spans = found.get("from_to_ms", {}).items()  # not in results of earlier commits
    print("  from - to: " + ", ".join(f"{name} {first:.0f} - {last:.0f}" for name, (first, last) in spans))
    for title in ("kernels", "cuda_calls"):
        print(f"  {title}")
        show_top(found[title])


def show_top(entries: list) -> None:
    """Print what `top` gave."""
    for name, calls, ms in entries:
        print(f"  {ms:9.3f} ms {calls:6d} x {name}")
