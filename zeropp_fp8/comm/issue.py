"""Hand buffers to the backend, in this one place: the ledger counts them, and they are timed on request.

DeepSpeed's comms logger, if the ds_config turns it on, requests times. A row of its summary is named such as
"zeropp_fp8 all_to_all_single of gradients between nodes (2 ranks)", and its message size is what this rank sends to
others, as the ledger counts it. Both rates of a row are these bytes over the time: DeepSpeed's busbw for these
collectives, whose own formula knows only the world's ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp_fp8.comm.ledger import WireLedger, exact
from zeropp_fp8.comm.topology import INTER, INTRA, Level

_LOGGED_AS = {"all_gather_single": "all_gather_into_tensor"}  # torch 2.13's name: DeepSpeed's name
_BYTES_BY_TIME = "send"  # an operation for which CommsLogger's rates are bytes divided by time


def issue(
    collective: Callable[..., dist.Work | None],
    *arguments: Any,
    level: Level,
    ledger: WireLedger | None,
    sent: int,
    by_all: int | None = None,
    async_op: bool = True,
) -> dist.Work | None:
    """Start a collective of torch.distributed over a level; None if it is not to be waited for.

    Args:
        arguments: arguments of the collective, buffers first.
        sent, by_all: bytes for other ranks, see WireLedger.sent.
    """
    if ledger is None:
        return collective(*arguments, group=level.group, async_op=async_op)
    where = f"of {ledger.kind} {'between' if level.link == INTER else 'within'} nodes ({level.size} ranks)"
    # DeepSpeed's analysis of stragglers needs equal messages on every rank: unequal ones are logged by their mean.
    size = sent if by_all is None else exact(by_all / ledger.world_size)
    work = timed(ledger, collective, arguments, level.group, async_op, level.link, where, size)
    ledger.sent(level.link, sent, by_all)
    return work


def all_reduce(tensor: Tensor, op: dist.ReduceOp, group: Any, ledger: WireLedger) -> None:
    """All-reduce a small tensor in place over all ranks of a group; the ring formula counts its bytes."""
    num_bytes, ranks = tensor.numel() * tensor.element_size(), ledger.world_size
    where = f"of {ledger.kind} ({ranks} ranks)"
    timed(ledger, dist.all_reduce, (tensor, op), group, False, None, where, exact(2 * num_bytes * (ranks - 1) / ranks))
    ledger.sent_around_ring(num_bytes, rounds=2)


def timed(
    ledger: WireLedger | None,
    collective: Callable[..., dist.Work | None],
    arguments: Sequence[Any],
    group: Any,
    async_op: bool,
    link: str | None,
    where: str,
    size: float,
) -> dist.Work | None:
    """Start a collective, timed for the ledger's comms logger if that is on, and for its `times` of links."""
    logger, times = (None, None) if ledger is None else (ledger.comms_logger, ledger.times)
    name = ""
    if logger is not None and logger.enabled:
        operation = _LOGGED_AS.get(collective.__name__, collective.__name__)
        name = f"zeropp_fp8 {operation} {where}"
        if not (logger.prof_all or operation in logger.prof_ops or name in logger.prof_ops):
            name = ""
    if not name and (times is None or link is None):
        return collective(*arguments, group=group, async_op=async_op)
    work = Timed(collective, arguments, group)
    if times is not None and link is not None:
        times.append((link, work))
    if name:
        work.at_end = lambda seconds: logger.append(_BYTES_BY_TIME, name, 1e3 * seconds, size)
    return work if async_op else work.wait()


class Span:
    """Time the work that a `with` issues: on a GPU on the current stream, on a CPU by the host's clock."""

    def __init__(self, on_gpu: bool) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else None
        self._start, self._end = 0.0, None

    def __enter__(self) -> None:
        if self._events is not None:
            self._events[0].record()
        self._start = time.perf_counter()

    def __exit__(self, *exc) -> None:
        if self._events is not None:
            self._events[1].record()
        else:
            self._end = time.perf_counter()

    def interval(self, origin: torch.cuda.Event | None = None) -> tuple[float, float]:
        """Return the seconds at which it began and ended: by the host's clock, or on a GPU since `origin` (its own
        start). The host waits for the end."""
        if self._events is None:
            return self._start, self._end or time.perf_counter()
        start, end = self._events
        end.synchronize()
        return tuple((origin or start).elapsed_time(event) / 1e3 for event in (start, end))


def timed_by_deepspeed(ledger: WireLedger, on_gpu: bool) -> AbstractContextManager[None]:
    """Time a collective over all ranks that DeepSpeed issues and waits for, while links are timed."""
    if ledger.times is None:
        return nullcontext()
    span = Span(on_gpu)
    ledger.times.append((INTER if ledger.nodes > 1 else INTRA, span))  # in a ring the slowest link decides the time
    return span


class Timed(Span):
    """A timed collective under way; it takes the place of the collective's handle.

    The first wait calls `at_end(seconds)`. DeepSpeed's logger stops the host right after it has started a collective.
    Here that could stop it forever: if some parameters are not used, the first gathers and reductions may differ
    between ranks.
    """

    at_end: Callable[[float], None] | None = None

    def __init__(self, collective: Callable[..., dist.Work], arguments: Sequence[Any], group: Any) -> None:
        filled: Tensor | list[Tensor] = arguments[0]
        super().__init__((filled[0] if isinstance(filled, list) else filled).is_cuda)
        self.__enter__()
        self._work = collective(*arguments, group=group, async_op=True)
        if self._events is not None:
            self._work.wait()  # the stream waits, not the host: its later work must not count
            self.__exit__()
        else:
            self._work.get_future().add_done_callback(self._ended)

    def _ended(self, future: Any) -> None:
        self.__exit__()

    def wait(self) -> None:
        """Make the current stream (on a CPU: the host) wait for it; on a GPU the host too, if `at_end` is set."""
        self._work.wait()
        at_end, self.at_end = self.at_end, None
        if at_end is not None:
            start, end = self.interval()
            at_end(end - start)
