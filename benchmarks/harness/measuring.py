"""Measurements: bytes of living tensors, the time of steps and of pieces of work, whether memory was out."""

from __future__ import annotations

import functools
import gc
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.harness.environment import forget_memory
from benchmarks.harness.nodes import GBIT, sent_bytes, tcp_timeouts

SLEEP_CYCLES_PER_S = 2.0e9  # at least the device's clock: it sleeps as long as asked for, or longer


def live_bytes(device: torch.device) -> int:
    """Bytes of living tensors: by the CUDA allocator; on a CPU the sum over all storages that Python can find."""
    if device.type == "cuda":
        return forget_memory(device)
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), Tensor) or thing.is_meta:
            continue
        for tensor in (thing, thing.grad if thing.is_leaf else None):
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Meter:
    """Bytes that a rank has above those it had when this was made, or those `found` before."""

    def __init__(self, device: torch.device, found: int | None = None) -> None:
        self._device, self.found = device, live_bytes(device) if found is None else found
        self.start_peak()

    def bytes(self) -> int:
        """Of living tensors, now."""
        return live_bytes(self._device) - self.found

    def start_peak(self) -> None:
        """`peak` counts from now on."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int | None:
        """The most since `start_peak`; None on a CPU."""
        return torch.cuda.max_memory_allocated() - self.found if self._device.type == "cuda" else None


def stored_bytes(optimizer) -> int:
    """Bytes of reduced gradients, master weights and moments in the plugin's own stores, 0 where it has none."""
    names = (("gradients", "store"), ("states", "compressed"))
    stores = (getattr(getattr(optimizer, part, None), name, None) for part, name in names)
    return sum(store.num_bytes() for store in stores if store is not None)


def random_tokens(vocabulary: int, micro_batch: int, length: int, device: torch.device) -> Iterator[Tensor]:
    """int64 [micro_batch, length], the same in every run; different ones on every rank."""
    generator = torch.Generator().manual_seed(7 + torch.distributed.get_rank())
    while True:
        yield torch.randint(vocabulary, (micro_batch, length), generator=generator).to(device)


class Steps:
    """A trainer whose step takes the micro-batches of a step as one."""

    def __init__(self, trainer) -> None:
        self._trainer = trainer

    def step(self, tokens: list[Tensor]) -> Tensor:
        return self._trainer.step(*tokens)


def micro_batches(tokens: Iterator[Tensor], count: int) -> Iterator[list[Tensor]]:
    """Lists of a step's micro-batches."""
    while True:
        yield [next(tokens) for _ in range(count)]


def timed_steps(
    trainer,
    batches: Iterator,
    warmup: int,
    steps: int,
    device: torch.device,
    counters: Mapping[str, Callable[[], float]] | None = None,
) -> dict:
    """Times, losses and what left a node, of `steps` steps after `warmup` others, as `trainer.step` does.

    A step ends when the stream that computes is done, as for a script that prints each loss: weights may still be on
    their way for the next one. Bytes are also those of the last warm-up step, which has such a start as the others.

    `counters`, by names of a row: what they count a step. `tcp_timeouts` of a row are those of each step, of all nodes:
    where there are some, long steps are the emulated link's.
    """
    counters = {"tx_bytes_per_node_step": sent_bytes, **(counters or {})}
    times, losses, timeouts, before = [], [], [], {}
    counted_from = max(warmup - 1, 0)
    for step in range(warmup + steps):
        tokens = next(batches)
        if step == counted_from:
            synchronize(device)
            torch.distributed.barrier()
            before = {name: count() for name, count in counters.items()}
        timeouts.append(tcp_timeouts())
        start = time.perf_counter()
        losses.append(trainer.step(tokens).item())
        times.append(1e3 * (time.perf_counter() - start))
    synchronize(device)
    torch.distributed.barrier()
    timeouts = [after - before for before, after in pairwise([*timeouts[warmup:], tcp_timeouts()])]
    gathered: list = [None] * torch.distributed.get_world_size()
    counted = {name: (count() - before[name]) / (warmup + steps - counted_from) for name, count in counters.items()}
    torch.distributed.all_gather_object(gathered, (counted, timeouts if os.environ["LOCAL_RANK"] == "0" else []))
    timed = times[warmup:]
    return {
        "step_ms": statistics.median(timed),
        "min_ms": min(timed),
        "max_ms": max(timed),
        "times_ms": timed,
        "losses": losses,
        "tcp_timeouts": [sum(nodes) for nodes in zip(*(each for _, each in gathered if each))],
        **{name: max(each[name] for each, _ in gathered) for name in counters},  # of the node that sent more
    }


def reached_gbit(device: torch.device) -> float:
    """Gbit/s that a rank, in two nodes a node, sends in an all-gather of 64 MB (on a CPU: 4 MB) of each; best of five.

    A ring: all that comes from others goes on to the next one. A host may move less than a link is shaped to.
    """
    part = torch.empty(64_000_000 if device.type == "cuda" else 4_000_000, dtype=torch.uint8, device=device)
    whole = torch.empty(part.numel() * torch.distributed.get_world_size(), dtype=torch.uint8, device=device)
    gather = functools.partial(torch.distributed.all_gather_into_tensor, whole, part)
    milliseconds = min(timed(gather, device)[0] for _ in range(6))
    return 1e3 * (whole.numel() - part.numel()) / milliseconds / GBIT


def timed(action: Callable[[], object], device: torch.device) -> tuple[float, object]:
    """(milliseconds, what `action` returned); all ranks begin together."""
    torch.distributed.barrier()
    synchronize(device)
    start = time.perf_counter()
    result = action()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start), result


def milliseconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of `work`, after warm-up; on a GPU by its own clock, without the host's time."""
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


def host_ms(work: Callable[[], None], device: torch.device, repeats: int = 5) -> float:
    """How long the host takes to issue `work`, median."""
    times = []
    for _ in range(repeats):
        synchronize(device)
        begin = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - begin))
    synchronize(device)
    return statistics.median(times)


def interleaved_ms(works: dict[str, Callable[[], None]], device: torch.device, rounds: int, repeats: int) -> dict:
    """Median device time of each of `works`, which take turns: every round runs each of them `repeats` times."""
    issue_s = {}
    for name, work in works.items():
        for _ in range(3):
            work()
        issue_s[name] = host_ms(work, device, 3) / 1e3
    times = defaultdict(list)
    for _ in range(rounds):
        for name, work in works.items():
            if device.type != "cuda":
                times[name] += [host_ms(work, device, 1) for _ in range(repeats)]
                continue
            events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
            torch.cuda._sleep(int(SLEEP_CYCLES_PER_S * min(0.2, 1.5 * repeats * issue_s[name])))
            work()  # not timed: it finds another run's data in the cache
            events[0].record()
            for event in events[1:]:
                work()
                event.record()
            torch.cuda.synchronize()
            times[name] += [start.elapsed_time(end) for start, end in pairwise(events)]
    return {name: statistics.median(found) for name, found in times.items()}


def limit_memory(gib: float | None, device: torch.device) -> None:
    """Let this process have so many GiB of its GPU (on a CPU: of data)."""
    if gib is None:
        return
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total), device)
    else:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (int(gib * 2**30),) * 2)


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, where there is one."""
    if device.type == "cuda":
        torch.cuda.synchronize()
