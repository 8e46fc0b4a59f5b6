"""Rates of the links, measured with the collectives that the plugin uses, on the same process groups."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from zeropp_fp8.comm import Level, Topology
from zeropp_fp8.comm.all_gather import start_level

SMALL_BYTES, FIRST_BYTES, LARGEST_BYTES = 4096, 1 << 18, 1 << 26  # that a rank contributes
GROWTH = 4
COLLECTIVES = ("all_gather", "all_to_all")
GIGA, MICRO = 1e9, 1e-6


def measure(topology: Topology, device: torch.device, seconds: float) -> dict[str, Any]:
    """{"within" | "between": {"ranks", "all_gather_gbs", "all_to_all_gbs", "latency_us", "bytes"}} of a rank's groups.

    GB/s that a rank sends to the others of its group while all groups of the level send, in messages of `bytes`; the
    slowest rank of the group counts. Collective over the topology. A level of one rank is left out.
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
    """(GB/s, bytes a rank): messages grow until one takes a twentieth of the time, or are as large as they get."""
    size = FIRST_BYTES
    _seconds(collective, level, topology, device, size, 2)  # the first call makes connections
    while True:
        took = _agreed(_seconds(collective, level, topology, device, size, 1), topology.group, device)
        if size >= LARGEST_BYTES or took > seconds / 20:
            break
        size *= GROWTH
    repeats = max(2, min(200, round(seconds / 2 / took)))
    sent = (level.size - 1) * (size if collective == "all_gather" else size // level.size)
    return sent / _seconds(collective, level, topology, device, size, repeats) / GIGA, size


def _seconds(collective: str, level: Level, topology: Topology, device: torch.device, size: int, repeats: int) -> float:
    """Of one call, on the slowest rank of this rank's group."""
    size -= size % level.size
    payload = torch.zeros(size, dtype=torch.uint8, device=device)
    gathered = torch.empty(size * (level.size if collective == "all_gather" else 1), dtype=torch.uint8, device=device)
    _agreed(0.0, topology.group, device)  # all begin together
    start = time.perf_counter()
    for _ in range(repeats):
        if collective == "all_gather":
            work = start_level(gathered, payload, level, None)
        else:
            work = dist.all_to_all_single(gathered, payload, group=level.group, async_op=True)
        work.wait()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return _agreed((time.perf_counter() - start) / repeats, level.group, device)


def _agreed(seconds: float, group: Any, device: torch.device) -> float:
    """The largest on any rank of a group."""
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return value.item()
