"""Hops of a gather in which ranks send rows of different sizes, one after the other without gaps (comm/owned.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zeropp_fp8.comm.all_gather import ranks_held
from zeropp_fp8.comm.ledger import WireLedger
from zeropp_fp8.comm.owned import OwnedGather, start_owned_gather
from zeropp_fp8.comm.topology import Level


class UnequalHops:
    """Hops through levels; `sizes` are always bytes of the rows of all ranks, in the order of ranks.

    Args:
        levels: all of them; `before`: how many come before the last hop.

    Attributes:
        before: the hops up to the last one that have more than one rank.
    """

    def __init__(self, levels: Sequence[Level], before: int, rank: int, ledger: WireLedger) -> None:
        self._levels, self._rank, self._ledger = levels, rank, ledger
        counts = [level.size for level in levels]
        # For each hop and rank of its level: whose rows that rank brings.
        self._brought: list[list[list[int]]] = []
        for hop, count in enumerate(counts):
            stride = math.prod(counts[hop + 1 :])
            digit = rank // stride % count
            self._brought.append([ranks_held(counts, hop, rank + (i - digit) * stride) for i in range(count)])
        self.before = [hop for hop, count in enumerate(counts[:before]) if count > 1]
        held = ranks_held(counts, before, rank)
        self._ranks_before = held[: held.index(rank)]  # whose rows are before this rank's

    def sizes_after(self, sizes: Sequence[int], hop: int) -> list[int]:
        """Bytes that each rank of a hop's level brings, in the order of ranks."""
        return [sum(sizes[r] for r in ranks) for ranks in self._brought[hop]]

    def start(self, sizes: Sequence[int], hop: int, result: Tensor, have: Tensor) -> OwnedGather | None:
        """Start one hop, from `have` to `result`, flat uint8."""
        # Bytes that all ranks hold when it begins: after the hops before it so many have each rank's.
        held_by_all = sum(sizes) * math.prod(level.size for level in self._levels[:hop])
        of_level = self.sizes_after(sizes, hop)
        return start_owned_gather(result, have, of_level, self._levels[hop], self._ledger, held_by_all)

    def start_before(
        self, sizes: Sequence[int], result: Tensor, have: Tensor, wait_for: Callable[[list[OwnedGather]], None]
    ) -> list[OwnedGather]:
        """Start the hops before the last one, from this rank's row to `result`; `wait_for` waits for hops."""
        works = []
        for hop in self.before:
            wait_for(works)
            into = result
            if hop != self.before[-1]:
                into = torch.empty(sum(self.sizes_after(sizes, hop)), dtype=torch.uint8, device=result.device)
            works = [self.start(sizes, hop, into, have)]
            have = into
        return works

    def complete(self, sizes: Sequence[int], row: Tensor) -> Tensor:
        """All ranks' rows, flat, complete on the current stream."""
        for hop, level in enumerate(self._levels):
            if level.size > 1:
                result = torch.empty(sum(self.sizes_after(sizes, hop)), dtype=torch.uint8, device=row.device)
                self.start(sizes, hop, result, row).wait()
                row = result
        return row

    def own_row(self, sizes: Sequence[int], held: Tensor) -> Tensor:
        """uint8 [1, bytes]: this rank's row, in what the hops before the last one bring."""
        start = sum(sizes[rank] for rank in self._ranks_before)
        return held[start : start + sizes[self._rank]].unsqueeze(0)
