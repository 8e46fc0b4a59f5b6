"""Which elements of the weights have changed since they were handed over last, brought to rank 0.

Every rank keeps its own part of each tensor as it went last (1 / ranks of what is handed over, on its device), compares
it bit for bit with what it has now, and sends rank 0 the places and the values of what differs. A weight that goes as
it lies on the ranks is compared there, without a gather. What is made of several (merged adapters, FP8 codes) is made
of gathered ones, on every rank, which then compares its slice of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp_fp8.comm import gather_objects
from zeropp_fp8.comm.ledger import OUTSIDE
from zeropp_fp8.comm.topology import INTER, INTRA
from zeropp_fp8.zero.export.lockstep import Lockstep
from zeropp_fp8.zero.gather.storage import BITS
from zeropp_fp8.zero.handover.source import OwnPart, WeightSource

RECEIVER = 0  # the rank that gets them
_MOST = 2**31  # elements of a tensor whose places are 32 bits


class Patch(NamedTuple):
    """The elements of a tensor to be replaced: int32 `indices` [changes] in the flat tensor, its `values` there."""

    name: str
    shape: tuple[int, ...]
    indices: Tensor
    values: Tensor


class Changes:
    """The elements that differ from what went last; all at first. Made on every rank.

    Attributes:
        version: how many times it has gone as a whole.

    Raises:
        ValueError: the source gives adapters, whose tensors are others after another one was made active.
    """

    def __init__(self, source: WeightSource) -> None:
        if source.gives_adapters:
            raise ValueError("Changes: adapters are small; iterate over their WeightSource, which has all of them")
        self._source, self._held = source, {}
        self.version = 0

    def forget(self) -> None:
        """Take nothing for handed over; one rank is enough."""
        self._held.clear()

    def __iter__(self) -> Iterator[list[Patch]]:
        """A group of tensors at a time: on rank 0 the patches of those that have changed, on others none.

        Collective, between steps. What is yielded counts as handed over: a user that fails to do so calls `forget`. Who
        stops before the end goes on for the others when the iterator is closed, and they raise; then all goes next.

        Raises:
            RuntimeError: a rank has failed, or stopped early; on every rank, after all is compared.
        """
        if not all(gather_objects(bool(self._held), self._source.session.topology.group)):
            self.forget()
        lockstep = Lockstep("comparing weights with what was handed over")
        groups = self._source.own_parts(lockstep)
        try:
            for parts in groups:
                yield self._collected(parts, lockstep.call(lambda parts=parts: self._changed(parts)) or self._nothing)
            lockstep.raise_everywhere()
        except GeneratorExit:
            lockstep.error = lockstep.error or RuntimeError("the iteration was ended before the last tensor")
            for parts in groups:
                self._collected(parts, self._nothing)
            self.forget()
            lockstep.failures()
            raise
        except RuntimeError:
            self.forget()
            raise
        self.version += 1

    @property
    def _nothing(self) -> tuple[list[int], Tensor]:
        return [], torch.empty(0, dtype=torch.uint8, device=self._source.session.device)

    def _changed(self, parts: list[OwnPart]) -> tuple[list[int], Tensor]:
        """How much has changed in each part, and uint8: all places, then all values. From now on it is handed over."""
        found = [self._compared(part) for part in parts]
        columns = [piece.contiguous().view(torch.uint8) for column in zip(*found) for piece in column]
        return [len(places) for places, _ in found], torch.cat([self._nothing[1], *columns])

    def _compared(self, part: OwnPart) -> tuple[Tensor, Tensor]:
        """int32 places in the full tensor of what has changed, and the values there."""
        if part.shape.numel() >= _MOST:
            raise ValueError(f"{part.name} has {part.shape.numel()} elements; places of changes are below {_MOST}")
        bits = part.values.contiguous().view(BITS[part.values.element_size()])
        held = self._held.get(part.name)
        if held is None:
            self._held[part.name] = bits.clone()
            local = torch.arange(bits.numel(), device=bits.device)
        else:
            local = (bits != held).nonzero().view(-1)
            held.copy_(bits)
        places, end = local.clone(), 0
        for first, numel in part.ranges:
            places += torch.where((local >= end) & (local < end + numel), first - end, 0)
            end += numel
        return places.int(), part.values[local]

    def _collected(self, parts: list[OwnPart], own: tuple[list[int], Tensor]) -> list[Patch]:
        """The patches of a group, on rank 0, of what `_changed` has found on each rank. Collective."""
        session = self._source.session
        found = gather_objects((own[0], len(own[1])), session.topology.group)
        sizes = [size for _, size in found]
        if not sum(sizes):
            return []
        with session.ledger.counting(OUTSIDE):
            came = self._brought(own[1], sizes)
        if session.topology.rank != RECEIVER or not own[0]:  # nothing but after a failure
            return []
        places, values = [], []  # by rank, then by tensor
        for (counts, _), of_rank in zip(found, came.split(sizes)):
            cuts = [4 * n for n in counts] + [n * part.values.element_size() for n, part in zip(counts, parts)]
            pieces = of_rank.split(cuts) if counts else ()
            places.append(pieces[: len(parts)])
            values.append(pieces[len(parts) :])
        patches = []
        for number, part in enumerate(parts):
            indices, new = (torch.cat([row[number] for row in rows if row]) for rows in (places, values))
            if len(indices):
                patches.append(Patch(part.name, part.shape, indices.view(torch.int32), new.view(part.values.dtype)))
        return patches

    def _brought(self, own: Tensor, sizes: list[int]) -> Tensor:
        """The bytes of all ranks, one after the other, on rank 0; nothing elsewhere. Collective."""
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
        return came
