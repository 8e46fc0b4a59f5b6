"""Gathers of parameters that have owners: each rank sends what it owns of a unit, codes and scales together.

The gather of slices with rows of unequal size: a unit's payload is one row with all parts, those of one owner after the
other, and each hop is one exchange. A weight that is the GEMM's operand and lies on one owner is in one piece in
what arrives: no copy sorts it, on any topology.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm.ledger import OUTSIDE
from zeropp_fp8.comm.owned import OwnedGather
from zeropp_fp8.comm.payload import PayloadLayout
from zeropp_fp8.comm.reduce_scatter import slice_of_rank
from zeropp_fp8.comm.reduce_to_owners import OwnedPart, views_of_parts
from zeropp_fp8.formats import SharedScaleFormat, UnquantizedFormat, WireFormat
from zeropp_fp8.formats.scale_table import SharedScales
from zeropp_fp8.optim import StateFormats
from zeropp_fp8.zero.gather.buffers import Places
from zeropp_fp8.zero.gather.difference import Difference, Rows
from zeropp_fp8.zero.gather.gemm_weights import DTYPE as OPERAND_DTYPE
from zeropp_fp8.zero.gather.gemm_weights import WIRE_FORMAT
from zeropp_fp8.zero.gather.route import Route
from zeropp_fp8.zero.gather.storage import Storage
from zeropp_fp8.zero.gather.units import Arrived, Unit
from zeropp_fp8.zero.owners.slices import part_of_slices, slice_of_parts


@dataclass
class OwnedLayout:
    """Where the parts of a unit lie in what ranks send.

    Attributes:
        own, full: the payload of this rank, and those of all ranks in the order in which the last hop brings them.
        own_pieces, full_pieces: what they hold; `tensor` is a parameter's index in the unit.
        rank_bytes: of each rank's payload, by rank.
        operand_places: of each parameter whose codes are an operand, by its index in the unit: (offset in `full`,
            elements) of its parts, in ascending order of elements.
        scale_places: where the scales of `own`'s pieces lie; None without operands.
    """

    own: PayloadLayout
    own_pieces: list[OwnedPart]
    full: PayloadLayout
    full_pieces: list[OwnedPart]
    rank_bytes: list[int]
    operand_places: dict[int, list[tuple[int, int]]]
    scale_places: Tensor | None


class OwnedUnit(Unit):
    """A unit of parameters that have owners. Its payload is kept as for slices."""

    storage: Owned
    may_differ = True

    def __init__(self, params: list[Parameter], storage: Owned, persistent: bool = False) -> None:
        super().__init__(params, storage, persistent)
        self._made_for: list[tuple[torch.dtype, int]] = []

    def bytes_in(self, wire_format: WireFormat, param: Parameter) -> float:
        sizes = (wire_format.payload_bytes(part.numel) for part in self.route.session.placement.parts(param))
        return sum(sizes) / self.route.world_size

    def lay_out(self) -> None:
        made_for = [(sharded.shard_dtype(p), sharded.shard_numel(p)) for p in self.params]
        if self.layout is not None and self._made_for == made_for:
            return
        self._made_for = made_for
        operands = [p for p in self.params if self.sent_as_operand(p)]
        formats = [self.format_of(p) for p in self.params]
        self.layout = self.storage.layout_of(self.params, formats, operands)
        self._packed = [p for i, p in enumerate(self.params) if i not in self.layout.operand_places]
        self._places = Places(self._packed, [self.dtype_of(p) for p in self._packed])
        self._exact = [self.is_exact(p) for p in self._packed]
        self.payload = None  # it was made for the old one
        self.difference = Difference(self)

    def _rows_of(self, rank: int) -> Rows:
        layout = self.layout
        pieces = [(form, p.numel) for form, p in zip(layout.full.formats, layout.full_pieces) if p.owner == rank]
        return Rows([form for form, _ in pieces], [numel for _, numel in pieces], self.route.device)

    @property
    def held_bytes(self) -> int:
        return sum(self.route.unequal.sizes_after(self.layout.rank_bytes, len(self.route.before) - 1))

    @property
    def gathered_bytes(self) -> int:
        return sum(self.route.unequal.sizes_after(self.layout.rank_bytes, len(self.route.before)))

    def first_hops(self, held: Tensor) -> list[OwnedGather]:
        have = self._own_payload(None if self.route.unequal.before else held)
        self.difference.begin()
        return self.route.unequal.start_before(self.layout.rank_bytes, held, have, self.wait_for)

    def _own_payload(self, into: Tensor | None) -> Tensor:
        """Encode what this rank owns, flat; without a secondary shard the bytes are kept, as for slices."""
        route, layout, weights = self.route, self.layout, self.route.gemm_weights
        if layout.operand_places:
            weights.refresh_scales(self.names)
        if self.payload is not None:
            return self.payload if into is None else into.copy_(self.payload)
        row = into
        if row is None:
            row = torch.empty(layout.own.row_bytes, dtype=torch.uint8, device=route.device)
        shards = self.storage.shard_views(self.params, layout.own_pieces)
        one_scale = layout.operand_places and weights.granularity == "tensor"
        scales = self.storage.operand_scales(layout) if one_scale else None
        layout.own.encode(shards, route.one_row, row.view(1, -1), scales)
        if layout.operand_places and scales is None:
            for i, (piece, shard) in enumerate(zip(layout.own_pieces, shards)):
                if piece.tensor in layout.operand_places:
                    out = row[layout.own.offsets[i] :][: piece.numel]
                    weights.encode_range(self.params[piece.tensor], piece.start, shard, out)
        if not self.keeps_secondary and route.device.type == "cpu":
            # Its scales may be found anew, so a payload with operands' codes is made again.
            self.payload = None if layout.operand_places else row.clone()
        return row

    def last_hop(self, held: Tensor, gathered: Tensor) -> list[dist.Work]:
        return [self.route.unequal.start(self.layout.rank_bytes, len(self.route.before), gathered, held)]

    def decode(self, gathered: Tensor) -> Arrived:
        values = dict(zip(self._packed, self._places.empty(self.route.device)))
        self.storage.decode_row(self.layout, gathered, self.params, values)
        operands, all_codes = [], gathered.view(OPERAND_DTYPE)
        for index, places in self.layout.operand_places.items():
            codes, start, param = all_codes, places[0][0], self.params[index]
            if len(places) > 1:
                codes, start = torch.cat([gathered[o : o + numel] for o, numel in places]).view(OPERAND_DTYPE), 0
            operands.append((param, self.route.gemm_weights.operand(param, codes, start)))
        return Arrived(list(zip(values, values.values(), self._exact)), operands)

    # -- differences (difference.py) -----------------------------------------------------------------------------------

    def own_payload(self) -> Tensor:
        return self._own_payload(None).unsqueeze(0)

    def difference_rows(self) -> tuple[Rows, list[Rows]]:
        brought = [self._rows_of(rank) for rank in self.route.held_ranks]
        return self._rows_of(self.route.session.topology.rank), brought

    def agreed(self, sizes: list[int]) -> list[int]:
        return sizes

    def own_row_of_differences(self, brought: Tensor, sizes: Sequence[int]) -> Tensor:
        return self.route.unequal.own_row(sizes, brought)

    def bring_differences(self, brought: Tensor, sizes: Sequence[int]) -> list[OwnedGather]:
        own = self.own_row_of_differences(brought, sizes).view(-1)
        return self.route.unequal.start_before(sizes, brought, own, self.wait_for)

    def rows_of_differences(self, brought: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        return list(brought.unsqueeze(0).split([sizes[rank] for rank in self.route.held_ranks], dim=1))

    def held_rows(self, held: Tensor) -> list[Tensor]:
        return self.rows_of_differences(held, self.layout.rank_bytes)

    def own_held_row(self, held: Tensor) -> Tensor:
        return self.route.unequal.own_row(self.layout.rank_bytes, held)


class Owned(Storage):
    """Parameters that owners have, whole or cut by rows."""

    unit_class = OwnedUnit

    def __init__(self, route: Route) -> None:
        super().__init__(route)
        self._unused_scales: dict[int, SharedScales] = {}

    def takes(self, param: Parameter) -> bool:
        return True

    def report_rows(self, params: Sequence[Parameter]) -> list[tuple]:
        return [("partition", "whole tensors", 0, self.route.session.placement.balance)]

    def to_slice(self, param: Parameter, own: Tensor) -> Tensor:
        return slice_of_parts(self.route.session, param, own)

    def from_slice(self, param: Parameter, one_slice: Tensor) -> Tensor:
        return part_of_slices(self.route.session, param, one_slice)

    # -- giving parameters to owners, and taking them back -----------------------------------------------------------

    def prepare(self, units: Sequence[Sequence[Parameter]]) -> None:
        """Plan who owns what, if it is not planned."""
        if self.route.session.placement.balance is None:
            _plan_owners(self.route, units)

    @torch.no_grad()
    def place(self, params: Sequence[Parameter]) -> None:
        placement = self.route.session.placement
        try:
            params[0].all_gather(params)
            parts = [placement.own_part(p, p.data).to(sharded.shard_dtype(p), copy=True) for p in params]
        finally:
            params[0].partition(params)
        for param, own in zip(params, parts):
            sharded.Shard.made_of(own, padding=0).put(param)

    @torch.no_grad()
    def leave(self, params: Sequence[Parameter], gather_exactly: Callable[[Sequence[Parameter]], None]) -> None:
        rank, world = self.route.session.topology.rank, self.route.session.topology.world_size
        slices = []
        for param in params:
            try:
                gather_exactly([param])
                slices.append(slice_of_rank(param.data.reshape(-1), rank, world))
            finally:
                param.partition([param])
        for param, own in zip(params, slices):
            sharded.Shard.made_of(own, padding=own.numel() * world - sharded.numel(param)).put(param)

    # -- layouts -----------------------------------------------------------------------------------------------------

    def layout_of(
        self, params: Sequence[Parameter], formats: Sequence[WireFormat], operands: Iterable[Parameter] = ()
    ) -> OwnedLayout:
        """The layout of parameters that are sent in `formats`; `operands` of them as codes with a scale elsewhere."""
        route, operands = self.route, set(operands)
        codes = SharedScaleFormat(WIRE_FORMAT)

        def layout(pieces: Sequence[OwnedPart]) -> PayloadLayout:
            chosen = [codes if params[piece.tensor] in operands else formats[piece.tensor] for piece in pieces]
            dtypes = [sharded.shard_dtype(params[piece.tensor]) for piece in pieces]
            return PayloadLayout([p.numel for p in pieces], chosen, dtypes, route.device)

        full_pieces = self.pieces_of(params, route.rank_order.slices)
        own_pieces = self.pieces_of(params, [route.session.topology.rank])
        full, own = layout(full_pieces), layout(own_pieces)
        rank_bytes = [0] * route.world_size
        for piece, size in zip(full_pieces, full.sizes):
            rank_bytes[piece.owner] += size
        operand_places = {}
        for index in (i for i, param in enumerate(params) if param in operands):
            found = [(p.start, offset, p.numel) for p, offset in zip(full_pieces, full.offsets) if p.tensor == index]
            operand_places[index] = [(offset, numel) for _, offset, numel in sorted(found)]
        scales = route.gemm_weights.places(params[piece.tensor] for piece in own_pieces) if operands else None
        return OwnedLayout(own, own_pieces, full, full_pieces, rank_bytes, operand_places, scales)

    def pieces_of(self, params: Sequence[Parameter], ranks: Iterable[int]) -> list[OwnedPart]:
        """The pieces in the payloads of some ranks, one after the other."""
        parts = [self.route.session.placement.parts(param) for param in params]
        return [
            OwnedPart(index, rank, part.start, part.numel)
            for rank in ranks
            for index, some in enumerate(parts)
            for part in some
            if part.owner == rank and part.numel
        ]

    def shard_views(self, params: Sequence[Parameter], pieces: Sequence[OwnedPart]) -> list[Tensor]:
        """The elements of each of this rank's pieces."""
        return views_of_parts([sharded.shard(param) for param in params], pieces)

    def decode_row(
        self, layout: OwnedLayout, row: Tensor, params: Sequence[Parameter], values: dict[Parameter, Tensor]
    ) -> None:
        """Decode all ranks' payloads into the tensors of `values`; parameters that are not in it are left out."""
        parts = []
        for piece in layout.full_pieces:
            value = values.get(params[piece.tensor])
            parts.append(None if value is None else value.view(-1)[piece.start : piece.start + piece.numel])
        layout.full.decode(row.view(1, -1), self.route.one_row, parts)

    def operand_scales(self, layout: OwnedLayout) -> SharedScales:
        """The scales of this rank's pieces; those that are no operands have a number that is not used."""
        encode = self.route.gemm_weights.multipliers(layout.scale_places)
        unused = self._unused_scales.get(encode.numel())
        if unused is None:
            zeros = torch.zeros_like(encode)
            counts = torch.zeros(3, 2, dtype=torch.int64, device=self.route.device)
            unused = self._unused_scales[encode.numel()] = SharedScales(zeros, zeros, zeros, counts)
        return SharedScales(encode, unused.decode, unused.amax, unused.counts)

    def gather_exactly(self, params: Sequence[Parameter]) -> None:
        device = self.route.device
        layout = self.layout_of(params, [UnquantizedFormat(sharded.shard_dtype(p)) for p in params])
        row = torch.empty(layout.own.row_bytes, dtype=torch.uint8, device=device)
        layout.own.encode(self.shard_views(params, layout.own_pieces), self.route.one_row, row.view(1, -1))
        with self.route.session.ledger.counting(OUTSIDE):
            row = self.route.unequal.complete(layout.rank_bytes, row)
        values = {p: torch.empty(sharded.shape(p), dtype=sharded.shard_dtype(p), device=device) for p in params}
        self.decode_row(layout, row, params, values)
        for param, value in values.items():
            sharded.set_full(param, value)


def _plan_owners(route: Route, units: Sequence[Sequence[Parameter]]) -> None:
    """Choose the owner of each part, with all model states and the bytes of each exchange counted."""
    session = route.session
    config, topology = session.config, session.topology
    gradient_bytes = 1.0 if config.gradients.store_format != "none" else 4.0
    session.placement.plan(
        units,
        topology.ranks_per_node,
        gradient_bytes,
        session.state_formats or StateFormats("fp32", "fp32", "fp32"),
        wire_bytes=[[route.format_of(p).bits_per_element / 8 for p in params] for params in units],
        split=config.partition_split,
    )
