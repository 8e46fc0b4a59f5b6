"""A trainer of several ranks in one process, whose updates are of tensors that a test gives it."""

import torch

from zeropp_fp8.zero.handover.source import OwnPart, Parts
from zeropp_fp8.zero.handover.updates import Updates


class _Source:
    gives_adapters = False

    class session:
        device = torch.device("cpu")


def integers_of(tensor):
    """Flat, as integers of as many bits."""
    return (
        tensor.contiguous()
        .view(-1)
        .view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    )


class Trainer:
    """Ranks that have every `world`-th piece of `piece` elements of each tensor; one of more ranks may have nothing."""

    def __init__(self, world=3, piece=7):
        self.world, self.piece = world, piece
        self.ranks = [Updates(_Source()) for _ in range(world)]

    def updates(self, groups):
        """The updates of [{name: tensor}], and the version goes on."""
        made = []
        for number, tensors in enumerate(groups):
            parts = [
                Parts([self._part(*each, rank) for each in tensors.items()], number, len(groups))
                for rank in range(self.world)
            ]
            told, came = zip(*(updates._found(of_rank) for updates, of_rank in zip(self.ranks, parts)))
            made.append(self.ranks[0]._made(parts[0], list(told), [each.clone() for each in came]))
        self.ranks[0].version += 1
        return made

    def forget(self):
        for rank in self.ranks:
            rank.forget()

    def _part(self, name, tensor, rank):
        flat, size = tensor.reshape(-1), self.piece
        starts = range(rank * size, len(flat), self.world * size)
        ranges = [(first, min(size, len(flat) - first)) for first in starts]
        values = torch.cat([flat[first : first + numel] for first, numel in ranges] or [flat[:0]])
        return OwnPart(name, tensor.shape, ranges, values)
