"""Loads of ranks, memory and arithmetic: where matrices are not cut, exchanges even out what largest first leaves.

Matrices of which each has one owner are few and large. Of Llama-7B there are 3.5 for each of 64 ranks: largest first
by memory ends at 1.34 x the mean, exchanges at 1.04.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# An exchange must leave the busiest rank with no more than this part of what it had. It is with one of so many ranks of
# a kind, and the busiest may give two of so many parts. A plan of Llama-3-70B takes up to 3 s (512 ranks).
GAIN, PARTNERS, PAIRS_OF = (127, 128), 4, 8


class Piece(NamedTuple):
    """A tensor, or rows of it, on one rank."""

    owner: int
    memory: int  # bytes
    operations: int
    block: int | None  # see Exchanges
    wire: int  # bytes


class Exchanges:
    """Pieces that ranks exchange until no exchange leaves the busiest with less to do.

    No rank gets more bytes of a block than the busiest one had.
    """

    def __init__(self, pieces: Sequence[Piece], ranks: int) -> None:
        self._pieces = pieces
        self._totals = sum(piece.memory for piece in pieces), sum(piece.operations for piece in pieces) or 1
        self._loads = [(0, 0)] * ranks  # memory and arithmetic
        self._heights = [0] * ranks
        self._of_rank: list[set[int]] = [set() for _ in range(ranks)]
        self._wire = {piece.block: [0] * ranks for piece in pieces if piece.block is not None}
        for index, piece in enumerate(pieces):
            self._give(piece.owner, [index], 1)
        self._most = {block: max(of_ranks) for block, of_ranks in self._wire.items()}

    def _height(self, rank: int, memory: int, operations: int) -> int:
        """The rank's height with so much more: the higher of its parts of both totals, in units that are the same."""
        memory, operations = self._loads[rank][0] + memory, self._loads[rank][1] + operations
        return max(memory * self._totals[1], operations * self._totals[0])

    def _give(self, rank: int, indices: Sequence[int], sign: int) -> None:
        for index in indices:
            piece, (memory, operations) = self._pieces[index], self._loads[rank]
            self._loads[rank] = memory + sign * piece.memory, operations + sign * piece.operations
            self._heights[rank] = self._height(rank, 0, 0)
            if piece.block is not None:
                self._wire[piece.block][rank] += sign * piece.wire
            (self._of_rank[rank].add if sign > 0 else self._of_rank[rank].remove)(index)

    def _below(self, limit: int) -> Iterator[int]:
        """Ranks that are lower, a few of those that have about the same."""
        kinds: dict[tuple[int, ...], int] = {}
        for rank, (load, height) in enumerate(zip(self._loads, self._heights)):
            if height < limit:
                kind = tuple(64 * len(self._heights) * part // (whole or 1) for part, whole in zip(load, self._totals))
                kinds[kind] = kinds.get(kind, 0) + 1
                if kinds[kind] <= PARTNERS:
                    yield rank

    def _after(self, rank: int, gone: Sequence[int], come: Sequence[int]) -> int | None:
        """The rank's height after an exchange; None: it would have too much of a block."""
        memory, operations, wire = 0, 0, {}
        for indices, sign in ((gone, -1), (come, 1)):
            for piece in map(self._pieces.__getitem__, indices):
                memory, operations = memory + sign * piece.memory, operations + sign * piece.operations
                if piece.block is not None:
                    wire[piece.block] = wire.get(piece.block, 0) + sign * piece.wire
        if any(more > 0 and self._wire[block][rank] + more > self._most[block] for block, more in wire.items()):
            return None
        return self._height(rank, memory, operations)

    def _best(self, busiest: int, limit: int) -> tuple | None:
        """The best exchange that leaves both lower than `limit`: (what it gives, the rank, what comes back)."""
        own = sorted(self._of_rank[busiest])
        large = [index for index in own if self._pieces[index].operations]
        gifts = [(index,) for index in own] + (list(itertools.combinations(large, 2)) if len(large) <= PAIRS_OF else [])
        lowest, best = limit, None
        for rank in self._below(limit):
            for back in ((), *((index,) for index in sorted(self._of_rank[rank]))):
                for gift in gifts:
                    both = self._after(busiest, gift, back), self._after(rank, back, gift)
                    if None not in both and max(both) < lowest:
                        lowest, best = max(both), (gift, rank, back)
        return best

    def owners(self) -> list[int]:
        """The rank of each piece."""
        while True:
            busiest = self._heights.index(max(self._heights))
            best = self._best(busiest, self._heights[busiest] * GAIN[0] // GAIN[1])
            if best is None:
                break
            gift, rank, back = best
            for indices, source, target in ((gift, busiest, rank), (back, rank, busiest)):
                self._give(source, indices, -1)
                self._give(target, indices, 1)
        owner = {index: rank for rank, indices in enumerate(self._of_rank) for index in indices}
        return [owner[index] for index in range(len(self._pieces))]
