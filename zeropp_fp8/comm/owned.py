"""Exchanges of what ranks own in unequal amounts: rows of unequal size, one a rank, one after the other without gaps.

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
    """A hop under way. It keeps what is being sent.

    The allocator would give its memory to the next payload on the stream that made it, and that stream waits for
    nothing: the backend would send what it has not been given. So it is let go of only on a stream that has waited.
    """

    def __init__(self, work: dist.Work, outgoing: Tensor) -> None:
        self._work = work
        self._outgoing: Tensor | None = outgoing

    def wait(self) -> None:
        """The current stream (on a CPU: the host) waits for the hop."""
        self._work.wait()
        if self._outgoing is not None and self._outgoing.is_cuda:
            self._outgoing.record_stream(torch.cuda.current_stream())
        self._outgoing = None


def start_owned_gather(
    gathered: Tensor, payload: Tensor, sizes: list[int], level: Level, ledger: WireLedger | None, held_by_all: int
) -> OwnedGather | None:
    """Start one hop: flat uint8 `gathered` becomes the payloads of the level's ranks; None where it is one rank.

    An all-to-all that gives every rank the same: backends have no all-gather of unequal sizes that takes zero bytes.
    NCCL sends the payload itself; gloo knows no all-to-all of lists, and gets a copy for each receiver.

    Args:
        sizes: bytes of each of the level's ranks; gathered has their sum.
        payload: this rank's; may be its part of `gathered` (in place).
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
