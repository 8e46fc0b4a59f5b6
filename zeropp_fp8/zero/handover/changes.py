"""Which elements of the weights have changed since the last hand-over: their places, and their values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zeropp_fp8.zero.gather.storage import BITS
from zeropp_fp8.zero.handover.handed import Handed
from zeropp_fp8.zero.handover.source import OwnPart, Parts, WeightSource

_MOST = 2**31  # elements of a tensor whose places are 32 bits


class Patch(NamedTuple):
    """The elements of a tensor to be replaced: int32 `indices` [changes] in the flat tensor, its `values` there."""

    name: str
    shape: tuple[int, ...]
    indices: Tensor
    values: Tensor


class Changes(Handed):
    """The elements that have changed since the last hand-over; all at first. Made on every rank.

    Iterating gives the patches of a group of tensors, on rank 0 those of tensors that have changed, on others none.

    Raises:
        ValueError: the source gives adapters, whose tensors are others after another one was made active.
    """

    _nothing = ()

    def __init__(self, source: WeightSource) -> None:
        if source.gives_adapters:
            raise ValueError("Changes: adapters are small; iterate over their WeightSource, which has all of them")
        super().__init__(source)

    def _found(self, parts: Parts) -> tuple[list[int], Tensor]:
        """How much has changed in each part; all places, then all values."""
        found = [self._compared(part) for part in parts.of_tensors]
        columns = [piece.contiguous().view(torch.uint8) for column in zip(*found) for piece in column]
        nothing = torch.empty(0, dtype=torch.uint8, device=self._source.session.device)
        return [len(places) for places, _ in found], torch.cat([nothing, *columns])

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

    def _made(self, parts: Parts, told: list[list[int]], came: list[Tensor]) -> list[Patch]:
        pieces, patches = [], []  # by rank: places by tensor, then values
        for counts, of_rank in zip(told, came):
            sizes = [n * part.values.element_size() for n, part in zip(counts, parts.of_tensors)]
            pieces.append(of_rank.split([4 * n for n in counts] + sizes))
        for number, part in enumerate(parts.of_tensors):
            at = number, number + len(parts.of_tensors)
            indices, new = (torch.cat([of_rank[i] for of_rank in pieces]) for i in at)
            if len(indices):
                patches.append(Patch(part.name, part.shape, indices.view(torch.int32), new.view(part.values.dtype)))
        return patches
