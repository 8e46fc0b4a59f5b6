"""Rates of the links, measured with the collectives that the plugin uses, on the same process groups."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from zeropp_fp8.comm import Level, Topology
from zeropp_fp8.comm.all_gather import start_level

# What a rank sends to each other one; LARGEST_BYTES of a buffer for all of them.
SMALL_BYTES, FIRST_BYTES, LARGEST_BYTES = 4096, 1 << 18, 1 << 29
GROWTH = 4
POLLED_S = 1.0
COLLECTIVES = ("all_gather", "all_to_all")
GIGA, MICRO = 1e9, 1e-6


def measure(topology: Topology, device: torch.device, seconds: float) -> dict[str, Any]:
    """{"within" | "between": {"ranks", "all_gather_gbs", "all_to_all_gbs", "latency_us", "bytes"}} of a rank's groups.

    GB/s that a rank sends to the others of its group while all groups of the level send, `bytes` to each; the slowest
    rank of the group counts. Collective over the topology. A level of one rank is left out.
    """
    levels = {name: getattr(topology, name) for name in ("within", "between")}
    levels = {name: level for name, level in levels.items() if level.size > 1}
    found = {}
    for name, level in levels.items():
        share = seconds / len(levels) / len(COLLECTIVES)
        one: dict[str, Any] = {"ranks": level.size}
        for collective in COLLECTIVES:
            one[f"{collective}_gbs"], one["bytes"] = _rate(collective, level, topology, device, share)
        one["latency_us"] = _seconds("all_gather", level, topology, device, SMALL_BYTES, 20) / MICRO
        found[name] = one
    return found


def _rate(collective: str, level: Level, topology: Topology, device: torch.device, seconds: float) -> tuple[float, int]:
    """(GB/s, bytes to each): messages grow until one takes a twentieth of the time, or are as large as they get."""
    size = FIRST_BYTES
    while True:
        took = _agreed(_seconds(collective, level, topology, device, size, 1), topology.group, device)
        if GROWTH * size * level.size > LARGEST_BYTES or took > seconds / 20:
            break
        size *= GROWTH
    repeats = max(3, min(200, round(seconds / 2 / took)))
    sent = (level.size - 1) * size
    return sent / _seconds(collective, level, topology, device, size, repeats) / GIGA, size


def _seconds(collective: str, level: Level, topology: Topology, device: torch.device, size: int, repeats: int) -> float:
    """The median time of a call on the slowest rank of this rank's group."""
    received = torch.empty(size * level.size, dtype=torch.uint8, device=device)
    payload = torch.zeros(size if collective == "all_gather" else len(received), dtype=torch.uint8, device=device)
    _agreed(0.0, topology.group, device)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        if collective == "all_gather":
            work = start_level(received, payload, level, None)
        else:
            work = dist.all_to_all_single(received, payload, group=level.group, async_op=True)
        _wait(work, device)
        times.append(time.perf_counter() - start)
    # The first makes connections, and lets the ranks of a group begin together.
    return _agreed(median(times[1:]), level.group, device)


def _wait(work: dist.Work, device: torch.device) -> None:
    """Until it has ended. On GPUs it is looked at all the time for a second: a wait of NCCL's process group that raises
    when time is up sleeps a millisecond between two looks, in which NVLink moves 200 MB. An all-gather of 64 MiB
    and an all-to-all of half of that both took 1.25 ms (benchmarks/results/doctor/h100-2-nvlink-before.json)."""
    until = time.perf_counter() + POLLED_S
    while device.type == "cuda" and not work.is_completed() and time.perf_counter() < until:
        pass
    work.wait()


def _agreed(seconds: float, group: Any, device: torch.device) -> float:
    """The largest on any rank of a group."""
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return value.item()
