"""Which rows a step of a rank sees: a pure function of (seed, step), so a resumed run goes on with the next batch."""

from __future__ import annotations

import torch


class Order:
    """`count` rows in endless epochs, each in another shuffled order; nothing but the step has to be saved.

    All ranks together take the positions one after another, so an epoch that does not end with a step ends within it,
    and every epoch holds every row exactly once. The rows of one epoch that a step takes are different on all ranks.
    """

    def __init__(self, count: int, seed: int = 0) -> None:
        if count < 1:
            raise ValueError("an order of no rows; give at least one")
        self.count, self.seed = count, seed
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.long)

    def epoch(self, number: int) -> torch.Tensor:
        """int64 [count]: the rows of epoch `number` in their order. The same rule as examples/pretrain/data.py."""
        if number != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            self._epoch, self._permutation = number, torch.randperm(self.count, generator=generator)
        return self._permutation

    def batch(self, step: int, rank: int, world: int, size: int) -> list[int]:
        """The `size` rows that rank `rank` of `world` takes in step `step` (from 0)."""
        if not (0 <= rank < world and step >= 0 and size >= 1):
            raise ValueError(f"no batch of {size} rows for rank {rank} of {world} in step {step}")
        first = (step * world + rank) * size
        places = (divmod(position, self.count) for position in range(first, first + size))
        return [int(self.epoch(epoch)[index]) for epoch, index in places]
