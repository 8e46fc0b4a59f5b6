"""Whole tensors on one owner each, instead of a slice of every tensor on every rank: which rank owns what.

FP8-LM (arXiv 2310.18313, Algorithm 1) gives a tensor with its one scale to one rank: largest first, each to the rank
with most memory left. "balance" also cuts large tensors by rows:

Memory. Tensors above 1/4 of the mean load: Llama-3-8B's embedding is 2.09 x the mean load of one of 32 ranks.

Exchange. A block is gathered in the time that the rank with most of it needs: of Llama-7B's block, with whole tensors,
one of 8 ranks has at least 1.78 x its share. Cut at 5/4 of a share it has 1.33 x. A block's parts go into as many bins
as there are ranks, largest first to the emptiest, and bins, largest first, to the rank with most memory left.

Arithmetic. Muon takes a matrix whole (`operations`), 30 n^3 operations for one of n x n: it is not cut. Exchanges
(loads.py) even out memory and arithmetic then.

All comparisons are between integers and all ties end at the rank's number, so every rank computes the same plan.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zeropp_fp8.zero.owners.loads import Exchanges, Piece

# A tensor above this part of the mean load is cut by rows (numerator, denominator).
LARGE = (1, 4)
# The largest part of a block that is left on one owner, in mean shares of a rank. 5/4 cuts least and is enough for the
# Llama shapes (1.33 x on 8 ranks at most). Where it is not, the next is tried: largest first leaves the busiest bin at
# no more than 1 + the largest part, so 2/5 ends at 1.4 x unless rows or MIN_PART_NUMEL forbid the cut.
CUTS = ((5, 4), (3, 5), (2, 5))
# Good enough for the busiest rank's share of a block.
MAX_OVER_MEAN = (3, 2)
# No part has fewer elements (unless its tensor has): each part costs a scale and a piece of every exchange.
MIN_PART_NUMEL = 64 * 1024


@dataclass(frozen=True)
class TensorStates:
    """The facts about one parameter that the planner needs."""

    name: str
    shape: tuple[int, ...]
    bytes_per_element: float  # of all model states on the owner; of a frozen parameter: the weight alone
    block: int | None  # index of the transformer block (unit of a gather) it belongs to; None: gathered by itself
    wire_bytes_per_element: float = 1.0  # that the owner sends in an exchange
    operations: int = 0  # of an update that takes it whole, in a step; 0: the update takes any rows

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Rows it can be cut into: its first dimension (of a vector: elements); a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def memory_bytes(self) -> int:
        return round(self.numel * self.bytes_per_element)  # one multiplication: rounded alike on every machine

    @property
    def wire_bytes(self) -> int:
        return round(self.numel * self.wire_bytes_per_element)


@dataclass(frozen=True)
class Part:
    """Contiguous rows of a tensor, with a scale of their own, on one owner.

    A tensor without elements is one part too, so that it has an owner.
    """

    tensor: int  # index in the planned sequence
    owner: int  # rank
    first_row: int
    rows: int

    def element_range(self, tensor: TensorStates) -> tuple[int, int]:
        """(first, end) of its elements in the flat `tensor`."""
        row_numel = tensor.numel // tensor.rows if tensor.rows else 0
        return self.first_row * row_numel, (self.first_row + self.rows) * row_numel


def greedy_assignment(sizes: Sequence[int], ranks: int) -> list[int]:
    """Owner of each tensor: largest first, each to the rank with most memory left (lowest rank on ties).

    Equal sizes are placed in the order given. No rank exceeds the mean by more than the largest size.
    Source: FP8-LM, Algorithm 1.

    Raises:
        ValueError: no rank, or a negative size.
    """
    if ranks < 1 or any(size < 0 for size in sizes):
        raise ValueError(f"greedy_assignment: {ranks} ranks, smallest size {min(sizes, default=0)}: need >= 1 and >= 0")
    owners = [0] * len(sizes)
    heap = [(0, rank) for rank in range(ranks)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, rank = heap[0]
        owners[index] = rank
        heapq.heapreplace(heap, (load + sizes[index], rank))
    return owners


def plan_parts(
    tensors: Sequence[TensorStates], ranks: int, ranks_per_node: int, split: Literal["balance", "none"] = "balance"
) -> list[Part]:
    """Owners of all tensors, in order of tensor, then row.

    "none": `greedy_assignment` of the memory bytes; each tensor is one part.
    "balance": tensors above 1/4 of the mean load are cut by rows into the fewest equal parts that are not, and a
      block's tensors so that the busiest rank owns at most 1.5 x its share of the block (see the module). A tensor
      outside of blocks is gathered by itself: it is cut into a part for each rank.
    A cut is between rows (of a vector: elements), and no part has fewer than 64 Ki elements; where that forbids a cut,
    balance is worse: small models on many ranks. A tensor with operations is one part.

    Args:
        tensors: tied parameters once. The order matters for ties only.
        ranks_per_node: ranks are numbered node by node.

    Raises:
        ValueError: another `split`, a size that is negative or not finite, or ranks_per_node does not divide ranks.
    """
    if split not in ("balance", "none"):
        raise ValueError(f'plan_parts: split is "balance" or "none", not {split!r}')
    if ranks < 1 or ranks_per_node < 1 or ranks % ranks_per_node:
        raise ValueError(f"plan_parts: {ranks_per_node} ranks per node do not divide {ranks} ranks")
    for tensor in tensors:
        for value in (*tensor.shape, tensor.bytes_per_element, tensor.wire_bytes_per_element):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"plan_parts: {tensor.name}: sizes must be finite and not negative: {tensor}")
    sizes = [_Sizes.of(index, tensor) for index, tensor in enumerate(tensors)]
    if split == "none":
        owners = greedy_assignment([t.memory for t in sizes], ranks)
        placed = [Part(i, owner, 0, t.rows) for i, (t, owner) in enumerate(zip(sizes, owners))]
    else:
        placed = _place_units(sizes, ranks, ranks_per_node)
    if any(t.operations for t in sizes):
        placed = _evened(placed, sizes, ranks, split)
    return _merge_neighbours(sorted(placed, key=lambda part: (part.tensor, part.first_row)))


@dataclass(frozen=True)
class _Sizes:
    """A tensor's sizes as integers, worked out once."""

    index: int
    block: int | None
    rows: int
    memory: int
    wire: int
    operations: int
    max_parts: int  # by rows and MIN_PART_NUMEL

    @classmethod
    def of(cls, index: int, tensor: TensorStates) -> _Sizes:
        row_numel = tensor.numel // tensor.rows if tensor.rows else 0
        max_parts = tensor.rows // -(-MIN_PART_NUMEL // row_numel) if row_numel and not tensor.operations else 1
        wire = tensor.wire_bytes
        # What is never sent has no place in a block's exchange: only its memory counts.
        block = tensor.block if wire else None
        return cls(index, block, tensor.rows, tensor.memory_bytes, wire, tensor.operations, max(max_parts, 1))

    def parts_within(self, size: int, numerator: int, denominator: int) -> int:
        """The fewest equal parts of which none has more than numerator / denominator, of `size` bytes in all."""
        if size * denominator <= numerator:
            return 1
        rows = self.rows * numerator // (size * denominator)  # that such a part has at most
        return -(-self.rows // rows) if rows else self.rows

    def cut(self, parts: int, ranks: int) -> list[tuple[int, int]]:
        """(first row, rows) of `parts` equal parts or what is allowed: sizes differ by a row, the larger come first."""
        parts = min(parts, ranks, self.max_parts)
        rows, larger = divmod(self.rows, parts)
        return [(i * rows + min(i, larger), rows + (i < larger)) for i in range(parts)]


def _bytes_of(total: int, first_row: int, rows: int, all_rows: int) -> int:
    """Bytes of some rows of a tensor; over the parts of a cut they add up to `total` exactly."""
    if not all_rows:
        return total
    return total * (first_row + rows) // all_rows - total * first_row // all_rows


@dataclass
class _Bin:
    """The parts of a unit that one rank will own."""

    memory: int
    wire: int
    pieces: list[tuple[int, int, int]]  # tensor, first row, rows


def _place_units(sizes: Sequence[_Sizes], ranks: int, ranks_per_node: int) -> list[Part]:
    total = sum(t.memory for t in sizes)
    # Into how many parts each tensor is cut because it is large beside the mean load.
    for_memory = [t.parts_within(t.memory, LARGE[0] * total, LARGE[1] * ranks) for t in sizes]
    units: dict[tuple[str, int], list[_Sizes]] = {}
    for t in sizes:
        units.setdefault(("alone", t.index) if t.block is None else ("block", t.block), []).append(t)
    loads = [0] * ranks
    placed = []
    for unit in sorted(units.values(), key=lambda unit: (-sum(t.memory for t in unit), unit[0].index)):
        bins = _bins_of(unit, for_memory, ranks)
        bins.sort(key=lambda b: (-b.memory, -b.wire))
        for one, rank in zip(bins, _ranks_with_most_left(loads, len(bins), bins[0].memory, ranks_per_node)):
            loads[rank] += one.memory
            placed += [Part(index, rank, first, rows) for index, first, rows in one.pieces]
    return placed


def _bins_of(unit: Sequence[_Sizes], for_memory: Sequence[int], ranks: int) -> list[_Bin]:
    """The unit's parts in at most `ranks` bins, cut no finer than the exchange needs."""
    if len(unit) == 1:  # as even as can be
        return _lay_out(unit, [unit[0].cut(ranks, ranks)], ranks)
    wire = sum(t.wire for t in unit)
    best: list[_Bin] = []
    for numerator, denominator in CUTS:
        for_wire = [t.parts_within(t.wire, numerator * wire, denominator * ranks) for t in unit]
        cuts = [t.cut(max(for_memory[t.index], parts), ranks) for t, parts in zip(unit, for_wire)]
        bins = _lay_out(unit, cuts, ranks)
        if not best or max(b.wire for b in bins) < max(b.wire for b in best):
            best = bins
        if max(b.wire for b in best) * MAX_OVER_MEAN[1] * ranks <= MAX_OVER_MEAN[0] * wire:
            break
    return best


def _lay_out(unit: Sequence[_Sizes], cuts: Sequence[list[tuple[int, int]]], ranks: int) -> list[_Bin]:
    """Largest tensor parts first, each to the bin with fewest bytes on the wire, then in memory."""
    pieces = [
        (_bytes_of(t.wire, first, rows, t.rows), _bytes_of(t.memory, first, rows, t.rows), (t.index, first, rows))
        for t, cut in zip(unit, cuts)
        for first, rows in cut
    ]
    pieces.sort(key=lambda piece: (-piece[0], -piece[1], piece[2]))
    bins = [_Bin(0, 0, []) for _ in range(min(ranks, len(pieces)))]
    heap = [(0, 0, index) for index in range(len(bins))]
    for wire, memory, piece in pieces:
        one = bins[heap[0][2]]
        one.wire += wire
        one.memory += memory
        one.pieces.append(piece)
        heapq.heapreplace(heap, (one.wire, one.memory, heap[0][2]))
    return bins


def _ranks_with_most_left(loads: Sequence[int], count: int, largest: int, ranks_per_node: int) -> list[int]:
    """`count` ranks with the least load, least first; among near ties (half of `largest`) spread over the nodes."""
    if count == 1:
        return [loads.index(min(loads))]
    order = sorted(range(len(loads)), key=loads.__getitem__)
    if count == len(order):
        return order
    edge = loads[order[count - 1]]
    chosen, near = [], []
    on_node = [0] * (len(loads) // ranks_per_node)
    for rank in order:
        if 2 * loads[rank] < 2 * edge - largest:
            chosen.append(rank)
        elif 2 * loads[rank] <= 2 * edge + largest:
            near.append((on_node[rank // ranks_per_node], rank))
        else:
            break
        on_node[rank // ranks_per_node] += 1
    near.sort(key=lambda pair: pair[0])  # stable: within a round over the nodes by load, then rank
    chosen += [rank for _, rank in near[: count - len(chosen)]]
    return sorted(chosen, key=lambda rank: (loads[rank], rank))


def _evened(parts: Sequence[Part], sizes: Sequence[_Sizes], ranks: int, split: str) -> list[Part]:
    """The same parts on owners of which the busiest has less to do."""
    pieces = []
    for part in parts:
        t = sizes[part.tensor]
        memory, wire = (_bytes_of(size, part.first_row, part.rows, t.rows) for size in (t.memory, t.wire))
        pieces.append(Piece(part.owner, memory, t.operations, None if split == "none" else t.block, wire))
    return [replace(part, owner=owner) for part, owner in zip(parts, Exchanges(pieces, ranks).owners())]


def _merge_neighbours(parts: Sequence[Part]) -> list[Part]:
    """Parts of one tensor that follow each other on one owner become one part with one scale."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if last and (last.tensor, last.owner) == (part.tensor, part.owner):
            merged[-1] = Part(part.tensor, part.owner, last.first_row, last.rows + part.rows)
        else:
            merged.append(part)
    return merged


def balance_of(tensors: Sequence[TensorStates], parts: Sequence[Part], ranks: int) -> tuple[float, float, float, float]:
    """How even a plan is, by the busiest rank's part over the mean of all: in memory, in the exchange of the worst
    block, in that of all blocks in the mean, and in arithmetic. 1.0 is perfect, or nothing is there."""
    memory, operations = [0.0] * ranks, [0.0] * ranks
    sent: dict[int, list[float]] = {}
    for part in parts:
        tensor = tensors[part.tensor]
        first, end = part.element_range(tensor)
        memory[part.owner] += (end - first) * tensor.bytes_per_element
        operations[part.owner] += tensor.operations
        if tensor.block is not None:
            of_rank = sent.setdefault(tensor.block, [0.0] * ranks)
            of_rank[part.owner] += (end - first) * tensor.wire_bytes_per_element
    evenness = (max(of) * ranks / sum(of) if any(of) else 1.0 for of in (memory, operations, *sent.values()))
    of_memory, of_operations, *of_blocks = evenness
    mean = sum(of_blocks) / len(of_blocks) if of_blocks else 1.0
    return of_memory, max(of_blocks, default=1.0), mean, of_operations
