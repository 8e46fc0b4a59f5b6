"""The scales of all tensors, and the selections of them that reductions ask for, for one step at a time.

Kernels read a selection on a lane when the network has delivered, long after the host has gone on. A copy made for each
reduction could be overwritten until then: the allocator knows the stream that made it, and no other. So selections stay
where they are from step to step, and all copies are made at once, in two operations a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

OF_GRADIENTS, OF_PARTIAL_SUMS, OF_RESULTS = range(3)  # rows of `counts`


@dataclass
class SharedScales:
    """The scales of the tensors of one reduction, in its order; all on the tensors' device.

    Attributes:
        encode: fp32 [tensors], the same on every rank: code = FP8(gradient * encode).
        decode: fp32 [tensors]: mean gradient over ranks = sum of the ranks' codes * decode.
        amax: fp32 [tensors], becomes the larger of itself and the largest finite magnitude that this rank encodes.
        counts: int64 [3, 2], of FP8 numbers that are written: a row for those of gradients, of partial sums (between
            the hops) and of results; how many lie at the format's largest magnitude, and how many became zero though
            the number was not. Stages are kept apart because a result is written once, and its ranks' gradients W
            times: together, a per cent of cut off sums would go unnoticed among 1,000 ranks.
        table, places: the ScaleTable that they are of, and where; None of scales by themselves.
    """

    encode: Tensor
    decode: Tensor
    amax: Tensor
    counts: Tensor
    table: ScaleTable | None = None
    places: tuple[int, ...] = ()

    def of_sums_in_node(self, nodes: int, rows: int) -> SharedScales:
        """For `rows` times the tensors: the mean over the ranks of a node = sum of their codes * decode."""
        decode = (self.decode * nodes).repeat(rows)
        return SharedScales(decode, decode, decode, self.counts)  # nothing is encoded with them

    def to_spread(self, nodes: int, headroom: float) -> SharedScales:
        """To encode means over nodes' ranks that are up to `headroom` times as large as a gradient.

        They are partial sums to the counts, and no gradients to the amax.
        """
        encode = 1.0 / (self.decode * (nodes * headroom))
        return SharedScales(encode, encode, torch.zeros_like(self.amax), self.counts[OF_PARTIAL_SUMS:])

    def of_spread(self, headroom: float) -> SharedScales:
        """To decode the sum over nodes of what `to_spread` has encoded."""
        return SharedScales(self.encode, self.decode * headroom, self.amax, self.counts)

    def of(self, members: Sequence[int], index: Tensor) -> SharedScales:
        """The scales of some tensors. Those of neighbours, and of a table, stay in place; others are copies, whose
        amax `recorded` takes over.

        `index`: int64, the members on the tensors' device.
        """
        if self.table is not None:
            return self.table.at(tuple([self.places[i] for i in members]))
        first = members[0] if members else 0
        end = first + len(members)
        if tuple(members) == tuple(range(first, end)):
            return SharedScales(self.encode[first:end], self.decode[first:end], self.amax[first:end], self.counts)
        return SharedScales(self.encode[index], self.decode[index], torch.zeros_like(self.amax[index]), self.counts)

    def recorded(self, scales: SharedScales, index: Tensor) -> None:
        """Take over the amax that the scales given by `of(index)` have recorded."""
        if self.table is None and scales.amax.untyped_storage().data_ptr() != self.amax.untyped_storage().data_ptr():
            self.amax.scatter_reduce_(0, index, scales.amax, "amax")


class ScaleTable:
    """Scales of tensors by their places in a table.

    Args:
        amax: fp32 [tensors], zeros: what the step has shown; complete after `collect`.
        counts: see SharedScales.

    Attributes:
        encode, decode: fp32 [tensors], see SharedScales. Ones at first; `update` replaces them.
    """

    def __init__(self, amax: Tensor, counts: Tensor) -> None:
        self.encode, self.decode, self.amax = torch.ones_like(amax), torch.ones_like(amax), amax
        self._counts = counts
        self._selections: dict[tuple[int, ...], SharedScales] = {}
        self._copies: list[tuple[Tensor, SharedScales]] = []  # int64 places on the device, and what lies there
        self._joined: Tensor | None = None  # the places of all copies, once these lie in one piece
        self._pieces: tuple[Tensor, ...] = ()  # encode, decode and amax of all copies

    def at(self, places: tuple[int, ...]) -> SharedScales:
        """The scales of tensors, in any order and as often as asked for; neighbours share memory with the table."""
        found = self._selections.get(places)
        if found is None:
            first = places[0] if places else 0  # a rank may own nothing
            end = first + len(places)
            if places == tuple(range(first, end)):
                rows = (table[first:end] for table in (self.encode, self.decode, self.amax))
                found = SharedScales(*rows, self._counts, self, places)
            else:
                # Joined, all begin at multiples of 16 bytes, by which kernels are compiled; what is added is not used.
                padded = *places, *places[-1:] * (-len(places) % 4)
                index = torch.tensor(padded, device=self.encode.device)
                rows = self.encode[index], self.decode[index], torch.zeros_like(self.encode[index])
                found = SharedScales(*(row[: len(places)] for row in rows), self._counts, self, places)
                self._copies.append((index, found))
                self._joined = None
            self._selections[places] = found
        return found

    def collect(self) -> None:
        """Let `amax` have what the copies have recorded. No lane may be at work on them."""
        if self._copies:
            self._join()
            self.amax.scatter_reduce_(0, self._joined, self._pieces[2], "amax")

    def update(self, encode: Tensor, decode: Tensor) -> None:
        """Other scales from now on; what copies have recorded is forgotten. No lane may be at work on the old ones."""
        self.encode.copy_(encode)
        self.decode.copy_(decode)
        if self._copies:
            self._join()
            torch.index_select(self.encode, 0, self._joined, out=self._pieces[0])
            torch.index_select(self.decode, 0, self._joined, out=self._pieces[1])
            self._pieces[2].zero_()

    def changed(self, index: Tensor, encode: Tensor, decode: Tensor) -> ScaleTable:
        """A table that has other scales at `index`, for what begins now; what is on its way keeps this one."""
        new = ScaleTable(self.amax, self._counts)
        new.encode, new.decode = self.encode.index_copy(0, index, encode), self.decode.index_copy(0, index, decode)
        return new

    def _join(self) -> None:
        if self._joined is not None:
            return
        self._joined = torch.cat([index for index, _ in self._copies])
        copies = [scales for _, scales in self._copies]
        sizes = [index.numel() for index, _ in self._copies]
        amax = torch.zeros(sum(sizes), dtype=torch.float32, device=self.amax.device)
        self._pieces = self.encode[self._joined], self.decode[self._joined], amax
        for scales, *rows in zip(copies, *(piece.split(sizes) for piece in self._pieces)):
            encode, decode, amax = (row[: len(scales.places)] for row in rows)
            amax.copy_(scales.amax)
            scales.encode, scales.decode, scales.amax = encode, decode, amax
