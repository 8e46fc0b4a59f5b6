"""Measures once, early in a run, what limits the time of a step, and reports it where quantizing does not help.

A share is the fraction of a step in which a collective runs on a kind of link, whether or not something is computed
meanwhile: without it a step could be at most 1 / (1 - share) times as fast. A rank's share includes its wait for other
ranks; the minimum over ranks is the link's own (DeepSpeed's comms logger finds stragglers in the same way).

The measurement takes 4 steps after the first 3. It records two events per collective on a GPU, and the host waits for
the device after each backward: the remaining time shows whether the device was behind the host all the time, or has
waited for it. One small all-reduce ends the measurement; steps before and after it are not affected.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zeropp_fp8.comm.issue import all_reduce
from zeropp_fp8.comm.topology import INTER, INTRA
from zeropp_fp8.zero.session import Session
from zeropp_fp8.zero.stage_part import StagePart

FIRST, STEPS = 3, 4  # the first ones compile kernels, and fill buffers and the allocator
BOUND = 0.5  # the links limit a step above this share
LITTLE = 0.05  # nothing is left to win below this share
BEHIND = 0.05  # less than this share left to do after backward means that the device has waited for the host
SMALL = 256 * 1024  # bytes: a message of this size takes as long for its latency as for its bytes (50 us, 5 GB/s)


@dataclass(frozen=True)
class StepShares:
    """A step of `seconds`: the shares in which links between and within nodes are busy; the share that is left to do
    when the host has issued everything (None without a GPU); the collectives that a rank starts, and the bytes of each.
    Gradients that DeepSpeed reduces around a ring over all ranks count as links between nodes, if there are nodes.
    """

    seconds: float
    between: float
    within: float
    behind: float | None
    messages: float
    message_bytes: float


def busy_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one interval lasts."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


class StepWatch(StagePart):
    """Measures the shares of one engine, and stores them in `shares`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.shares: StepShares | None = None
        self._on_gpu = session.device.type == "cuda"
        self._start = self._left = 0.0
        self._origin: torch.cuda.Event | None = None

    def backward_issued(self) -> None:
        if self._session.ledger.times is not None and self._on_gpu:
            before = time.perf_counter()
            torch.cuda.synchronize(self._session.device)
            self._left += time.perf_counter() - before

    def metrics(self) -> dict[str, float]:
        where = ("between", "within") if self.shares is not None else ()
        return {f"step_share_{link}_nodes": getattr(self.shares, link) for link in where}

    def step_counted(self) -> None:
        """The step that ends the measurement is collective."""
        steps = self._session.ledger.steps
        if steps == FIRST:
            self._begin()
        elif steps == FIRST + STEPS:
            self._finish()

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize(self._session.device)
        return time.perf_counter()

    def _begin(self) -> None:
        self._start, self._session.ledger.times = self._now(), []
        if self._on_gpu:
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()

    def _finish(self) -> None:
        session, ledger = self._session, self._session.ledger
        seconds, times = self._now() - self._start, ledger.times
        ledger.times = None
        shares = [busy_seconds(work.interval(self._origin) for on, work in times if on == link) / seconds
                  for link in (INTER, INTRA)]  # fmt: skip
        measured = torch.tensor([*shares, self._left / seconds, seconds], dtype=torch.float64, device=session.device)
        all_reduce(measured, dist.ReduceOp.MIN, session.topology.group, ledger)
        between, within, behind, seconds = measured.tolist()
        sent = sum(sum(links.values()) for links in ledger.report()["per_step"].values())
        behind, messages = behind if self._on_gpu else None, len(times) / STEPS
        self.shares = StepShares(seconds / STEPS, between, within, behind, messages, sent / max(1.0, messages))
        if session.topology.rank == 0 and (text := explained(self.shares, session)) is not None:
            print(text, flush=True)


def in_full(session: Session, link: str) -> list[str]:
    """Keys of the section that leave weights or gradients in 16 or 32 bits on a link."""
    config, formats = session.config, session.formats
    gradients = formats.between if link == INTER else formats.within
    found = []
    # Frozen weights that are stored as codes are sent as codes.
    if formats.weights is None and not formats.differs and config.frozen.format == "none":
        found.append('"weights.format"')
    if gradients is None:
        found.append(f'"gradients.{link}_format"')
    return found


def explained(shares: StepShares, session: Session) -> str | None:
    """Explains why a run's steps are little faster than stock's, and what can be done. None where links between nodes
    limit the step and their bytes are few already."""
    topology, config, small = session.topology, session.config, shares.message_bytes < SMALL
    messages = f"{shares.messages:.0f} messages a step of {shares.message_bytes / 1e3:.0f} kB"
    one_rank, between_bounds = topology.world_size == 1, shares.between >= BOUND
    within_bounds = shares.within >= BOUND and not between_bounds
    full = [] if one_rank else in_full(session, INTRA if within_bounds or topology.nodes == 1 else INTER)
    if between_bounds and not full and not (small and topology.nodes > 1):
        return None
    fewer_messages = "more tokens per micro-batch"
    fewer_messages += "" if config.gather_granularity == "block" else ', or "gather_granularity": "block"'
    if one_rank:
        why = "one rank: nothing is sent. What is left of the recipe is memory, and FP8 products"
    elif between_bounds:
        why = f"latency: {messages}; {fewer_messages}" if small else "these links"
    elif within_bounds:
        why = f"links within nodes, busy {100 * shares.within:.0f} %: "
        if small:
            why += f"latency, {messages}; {fewer_messages}"
        elif full:
            why += "they can carry fewer bits"
        else:
            why += "more tokens per step"
            why += "" if config.recipe == "zeropp-pcie" else ', or recipe "zeropp-pcie" without NVLink'
    elif shares.behind is not None and shares.behind < BEHIND:
        why = f"Python: the GPU has waited for it ({100 * shares.behind:.1f} % of a step left to do after backward, "
        why += f"{messages}), which runs ZeRO-3's hooks and launches kernels; {fewer_messages}"
        why += ', or "compile": "blocks"' if config.compile == "none" else ""
    else:
        on, says = "computing", "FP8 products, or a smaller batch per GPU, change that"
        if shares.behind is None:  # where FP8 is emulated
            on, says = "computing, on the CPU", "A smaller batch per rank changes that"
        elif config.computes_in_low_precision:
            says = "Products are in low precision already; a smaller batch per GPU changes what bounds"
        why = f"{on}: no kind of link is busy for half of a step. {says}"
    where = f"in steps {FIRST + 1} to {FIRST + STEPS} of {1e3 * shares.seconds:.1f} ms "
    busy = f"links between nodes are busy {100 * shares.between:.0f} %"
    where += "there is one node" if topology.nodes == 1 else busy
    gain = "" if one_rank else f" (without them at most {1 / (1 - min(shares.between, 0.99)):.2f} x as fast)"
    much = "little" if topology.nodes > 1 and LITTLE < shares.between < BOUND else "no"
    says = f"{much} speed-up to expect from fewer bytes between nodes"
    if between_bounds and not small:
        says = "no speed-up yet: bytes between nodes are not few"
    if full:
        are, them = ("are", "them") if len(full) > 1 else ("is", "it")
        bits = f'{" and ".join(full)} {are} "none", so 16 or 32 bits per number are sent'
        if (between_bounds or within_bounds) and not small:
            why += f'. {bits}: set {them}, or recipe "{"zeropp" if topology.nodes > 1 else "zeropp-pcie"}"'
        else:
            why += f". Besides, {bits}, as in stock"
    return f'zeropp_fp8: {says}: {where}{gain}. What bounds them: {why}. ("report.diagnose": false leaves this out)'
