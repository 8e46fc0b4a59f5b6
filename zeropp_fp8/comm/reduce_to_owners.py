"""Two-hop quantized reduction after which every rank has the tensors, or rows of tensors, that it owns.

The two hops are those of reduce_scatter.py: inside the node to the rank with the owner's local index, then between
nodes to the owner. A rank sends one row with all parts; the parts of one owner are neighbours. So each hop is one
all-to-all with one piece per rank, which has as many bytes as that rank owns:

    parts of all owners, ordered by (local index, node)  --encode, all-to-all in the node-->  those with my local index
    mean over the node in fp32  --encode, all-to-all between nodes-->  mine  --mean over nodes in fp32
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder
from zeropp_fp8.comm.reduce_scatter import ReducePlan, formats_of_hops
from zeropp_fp8.comm.topology import Topology
from zeropp_fp8.formats import WireFormat
from zeropp_fp8.formats.scale_table import SharedScales


@dataclass(frozen=True)
class OwnedPart:
    """Contiguous elements of a tensor that one rank owns."""

    tensor: int  # index among the tensors that are sent together
    owner: int
    start: int
    numel: int


def views_of_parts(tensors: Sequence[Tensor], parts: Iterable[OwnedPart]) -> list[Tensor]:
    """Return the elements of each part; a tensor holds those of its own parts only, one after the other."""
    taken, views = [0] * len(tensors), []
    for part in parts:
        start = taken[part.tensor]
        taken[part.tensor] = start + part.numel
        views.append(tensors[part.tensor].view(-1)[start : start + part.numel])
    return views


class OwnerReducePlan(ReducePlan):
    """A plan that reduces a fixed list of tensors to the owners of their parts.

    There is one result per tensor: a flat tensor of this rank's parts of it, one after the other in the order of
    elements; empty if the rank owns nothing of it.

    Args:
        parts: of all tensors, the same on every rank; the parts of one tensor in ascending order.
        shapes, dtypes, intra_format, inter_format, use_kernels: see ReduceScatterPlan.
    """

    def __init__(
        self,
        parts: Sequence[OwnedPart],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        topology: Topology,
        intra_format: WireFormat | None,
        inter_format: WireFormat | None,
        device: torch.device,
    ) -> None:
        self.topology = topology
        self.device = device
        nodes, per_node = topology.nodes, topology.ranks_per_node
        intra, inter = formats_of_hops(shapes, dtypes, intra_format, inter_format)

        def layout(some: list[OwnedPart], formats: list[WireFormat], partners: list[WireFormat]) -> PayloadLayout:
            members = [part.tensor for part in some]
            made = PayloadLayout(
                [part.numel for part in some],
                [formats[i] for i in members],
                [dtypes[i] for i in members],
                device,
                [partners[i] for i in members],
            )
            self._members[id(made)] = members, torch.tensor(members, dtype=torch.int64, device=device)
            return made

        self._members: dict[int, tuple[list[int], Tensor]] = {}
        by_place = sorted(parts, key=lambda p: (p.owner % per_node, p.owner // per_node, p.tensor, p.start))
        column = [p for p in by_place if p.owner % per_node == topology.local_rank]
        own = [p for p in column if p.owner == topology.rank]
        first_formats = (inter, intra) if per_node == 1 and nodes > 1 else (intra, inter)
        self.first = layout(by_place, *first_formats)
        self.first_order = SliceOrder([0], device)
        self.column, self.column_rows = layout(column, intra, inter), 1
        self.second = layout(column, inter, intra)
        self.last = layout(own, *((inter, intra) if nodes > 1 else (intra, inter)))
        self._all_parts, self._own_parts = by_place, own
        to_local = [0] * per_node
        for part, size in zip(by_place, self.first.sizes):
            to_local[part.owner % per_node] += size
        to_node = [0] * nodes
        for part, size in zip(column, self.second.sizes):
            to_node[part.owner // per_node] += size
        self.sizes = {
            "within": (to_local, [self.column.row_bytes] * per_node),
            "between": (to_node, [self.last.row_bytes] * nodes),
        }
        # In a hop, each part comes to its owner's column, or to its owner, from all other ranks of the level.
        columns = sum(inter[part.tensor].payload_bytes(part.numel) for part in parts)
        self.sent_by_all = {"within": nodes * (per_node - 1) * self.first.row_bytes, "between": (nodes - 1) * columns}

    def sources(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensors[p.tensor].view(-1)[p.start : p.start + p.numel] for p in self._all_parts]

    def destinations(self, results: Sequence[Tensor]) -> Sequence[Tensor]:
        return views_of_parts(results, self._own_parts)

    def scales_of(self, layout: PayloadLayout, shared: SharedScales | None) -> SharedScales | None:
        return None if shared is None else shared.of(*self._members[id(layout)])

    def amax_recorded(self, scales: SharedScales | None, shared: SharedScales | None) -> None:
        if shared is not None:
            shared.recorded(scales, self._members[id(self.first)][1])
