"""Each rank's own part of the weights as they were sent last; rank 0 gets what differs now.

Every rank keeps its own part of each tensor (1 / ranks of what is handed over, on its device) and compares it bit for
bit with what it has now, without a gather if a weight is sent as it lies. Weights made of several (merged adapters, FP8
codes) are made of gathered ones on every rank, which then compares its slice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp_fp8.comm import gather_objects
from zeropp_fp8.comm.ledger import OUTSIDE
from zeropp_fp8.comm.topology import INTER, INTRA
from zeropp_fp8.zero.export.lockstep import Lockstep, consume
from zeropp_fp8.zero.handover.source import Parts, WeightSource

RECEIVER = 0  # the rank that gets what differs


class Handed(ABC):
    """Finds what has changed since the last hand-over, a group of tensors at a time; all at first. Made on every rank.

    Attributes:
        version: how many hand-overs were complete.
    """

    _nothing: Any = None  # the item on other ranks, and on rank 0 after a failure

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._held: dict[Any, Tensor] = {}
        self.version = 0

    def forget(self) -> None:
        """Take nothing for handed over; one rank is enough."""
        self._held.clear()

    def hand_over(self, action: Callable[[Iterator[Any]], object], here: bool = True) -> None:
        """Let `action` take what is yielded and send it, on the ranks that are `here`. Collective.

        Raises:
            RuntimeError: a rank has failed; on every rank. Then all is sent next time.
        """
        try:
            consume("send_weights", iter(self), action, here)
        except RuntimeError:
            self.forget()
            raise

    @abstractmethod
    def _found(self, parts: Parts) -> tuple[Any, Tensor]:
        """All that rank 0 has to know of this rank's parts, and uint8: what differs, which now is handed over."""

    @abstractmethod
    def _made(self, parts: Parts, told: list[Any], came: list[Tensor]) -> Any:
        """The item that is yielded on rank 0: of its own parts, and what `_found` gave on each rank."""

    def __iter__(self) -> Iterator[Any]:
        """Yield what differs, a group of tensors at a time, on rank 0.

        Collective, between steps. It counts as handed over: a user that fails to do so calls `forget`. If you stop
        early, closing the iterator finishes the others' work; then all ranks raise, and all is sent next time.

        Raises:
            RuntimeError: a rank has failed, or stopped early; on every rank, after all is compared.
        """
        if not all(gather_objects(bool(self._held), self._source.session.topology.group)):
            self.forget()
        lockstep = Lockstep("comparing weights with what was handed over")
        groups = self._source.own_parts(lockstep)
        try:
            for parts in groups:
                yield self._collected(parts, lockstep.call(self._found, parts))
            lockstep.raise_everywhere()
        except GeneratorExit:
            lockstep.error = lockstep.error or RuntimeError("the iteration was ended before the last tensor")
            for parts in groups:
                self._collected(parts, None)
            self.forget()
            lockstep.failures()
            raise
        except RuntimeError:
            self.forget()
            raise
        self.version += 1

    def _collected(self, parts: Parts, own: tuple[Any, Tensor] | None) -> Any:
        """The item of a group, of what `_found` gave on each rank; None: it has failed there. Collective."""
        session = self._source.session
        told, sent = own or (None, torch.empty(0, dtype=torch.uint8, device=session.device))
        found = gather_objects((own is not None, told, len(sent)), session.topology.group)
        sizes, came = [size for _, _, size in found], []
        if sum(sizes):
            with session.ledger.counting(OUTSIDE):
                came = self._brought(sent, sizes)
        if session.topology.rank != RECEIVER or not all(well for well, _, _ in found):
            return self._nothing
        return self._made(parts, [of_rank for _, of_rank, _ in found], came or [sent] * len(sizes))

    def _brought(self, own: Tensor, sizes: list[int]) -> list[Tensor]:
        """The bytes of each rank, on rank 0; nothing elsewhere. Collective."""
        session = self._source.session
        topology, ranks = session.topology, range(session.topology.world_size)
        receives = topology.rank == RECEIVER
        came = own.new_empty(sum(sizes) if receives else 0)
        to = [len(own) if rank == RECEIVER else 0 for rank in ranks]
        dist.all_to_all_single(came, own, sizes if receives else [0] * len(sizes), to, group=topology.group)
        near = [rank for rank in ranks if rank // topology.ranks_per_node == RECEIVER // topology.ranks_per_node]
        for link, others in ((INTRA, [r for r in near if r != RECEIVER]), (INTER, [r for r in ranks if r not in near])):
            sent = len(own) if topology.rank in others else 0
            session.ledger.sent(link, sent, sum(sizes[rank] for rank in others))
        return list(came.split(sizes)) if receives else []
