"""Exchanges of owned rows, whose size differs between ranks: one row per rank, one after the other without gaps.

Hops are those of the equal exchanges (all_gather.py): every hop puts its own level in front, so a buffer holds the rows
of the ranks that it has reached, last hop outermost.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp_fp8.comm.issue import issue
from zeropp_fp8.comm.ledger import WireLedger
from zeropp_fp8.comm.topology import Level


class OwnedGather:
    """A hop under way. It keeps the payload that is being sent.

    The allocator could otherwise give its memory to the next payload on the stream that made it. That stream waits for
    nothing, so the backend would send wrong bytes. The payload is therefore freed only on a stream that has waited.
    """

    def __init__(self, work: dist.Work, outgoing: Tensor) -> None:
        self._work = work
        self._outgoing: Tensor | None = outgoing

    def wait(self) -> None:
        """Make the current stream (on a CPU: the host) wait for the hop."""
        self._work.wait()
        if self._outgoing is not None and self._outgoing.is_cuda:
            self._outgoing.record_stream(torch.cuda.current_stream())
        self._outgoing = None


def start_owned_gather(
    gathered: Tensor, payload: Tensor, sizes: list[int], level: Level, ledger: WireLedger | None, held_by_all: int
) -> OwnedGather | None:
    """Start one hop: flat uint8 `gathered` becomes the payloads of the level's ranks; None if the level is one rank.

    It is an all-to-all with the same part for every rank: no backend has an all-gather of unequal sizes that takes zero
    bytes. NCCL sends the payload itself; gloo has no all-to-all of lists, and gets one copy per receiver.

    Args:
        sizes: bytes of each of the level's ranks; gathered has their sum.
        payload: this rank's payload; it may be this rank's part of `gathered` (in place).
        held_by_all: bytes of the payloads of all ranks, for the ledger.
    """
    if level.size == 1:
        return None
    others = level.size - 1
    counted = {"level": level, "ledger": ledger, "sent": others * payload.numel(), "by_all": others * held_by_all}
    if payload.is_cuda:
        work = issue(dist.all_to_all, list(gathered.split(sizes)), [payload] * level.size, **counted)
        return OwnedGather(work, payload)
    outgoing, splits = payload.repeat(level.size), [payload.numel()] * level.size
    return OwnedGather(issue(dist.all_to_all_single, gathered, outgoing, sizes, splits, **counted), outgoing)
