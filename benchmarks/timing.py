"""How long a piece of work takes: on a GPU by its own clock, without the host's time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def milliseconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of `work`, after warm-up."""
    for _ in range(3 if device.type == "cuda" else 1):
        work()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2_000_000)  # a millisecond in which the host gets ahead: its time is not the kernel's
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)
