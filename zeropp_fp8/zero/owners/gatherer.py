"""Gathering parameters that have owners: each rank sends what it owns of a unit, codes and scales together.

The gather of slices with rows of unequal size: a unit's payload is one row with all parts, those of one owner after the
other, and each hop is one exchange. A weight that is the GEMM's operand and lies on one owner is in one piece in
what arrives: no copy sorts it, on any topology.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8.comm.lanes import after
from zeropp_fp8.comm.ledger import OUTSIDE
from zeropp_fp8.comm.owned import ranks_held, start_owned_gather
from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder
from zeropp_fp8.comm.reduce_scatter import slice_numel
from zeropp_fp8.formats import SharedScaleFormat, UnquantizedFormat
from zeropp_fp8.formats.shared_scale import SharedScales
from zeropp_fp8.zero.frozen.store import stored_weight
from zeropp_fp8.zero.gather.adopted import STATE
from zeropp_fp8.zero.gather.gatherer import WeightGatherer
from zeropp_fp8.zero.gather.gemm_weights import WIRE_FORMAT
from zeropp_fp8.zero.gather.units import GatherUnit
from zeropp_fp8.zero.owners.placement import WholeTensors
from zeropp_fp8.zero.session import Session


@dataclass(frozen=True)
class _Piece:
    """A part of a parameter in a payload."""

    index: int  # of the parameter in the unit
    start: int  # first element in the full tensor
    numel: int


@dataclass
class OwnedLayout:
    """Where the parts of a unit lie in what ranks send.

    Attributes:
        own, full: the payload of this rank, and those of all ranks in the order in which the last hop brings them.
        own_pieces, full_pieces: what they hold.
        rank_bytes: of each rank's payload, by rank.
        operand_places: of each parameter whose codes are an operand, by its index in the unit: (offset in `full`,
            elements) of its parts, in ascending order of elements.
        scale_places: where the scales of `own`'s pieces lie; None without operands.
    """

    own: PayloadLayout
    own_pieces: list[_Piece]
    full: PayloadLayout
    full_pieces: list[_Piece]
    rank_bytes: list[int]
    operand_places: dict[int, list[tuple[int, int]]]
    scale_places: Tensor | None

    @property
    def row_bytes(self) -> int:
        """Bytes that this rank sends."""
        return self.own.row_bytes


class WholeTensorGatherer(WeightGatherer):
    """Gathers parameters that `session.placement` has given to owners."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        before, after_ = session.gather_levels
        self._levels = [*before, *after_]
        sizes = [level.size for level in self._levels]
        rank = session.topology.rank
        # For each hop and rank of its level: whose rows that rank brings.
        self._brought: list[list[list[int]]] = []
        for hop, size in enumerate(sizes):
            stride = 1
            for inner in sizes[hop + 1 :]:
                stride *= inner
            digit = rank // stride % size
            self._brought.append([ranks_held(sizes, hop, rank + (i - digit) * stride) for i in range(size)])
        self._whole_row = SliceOrder([0], self.device)
        self._scratch: dict[int, SharedScales] = {}

    # -- giving parameters to owners, and taking them back -----------------------------------------------------------

    @torch.no_grad()
    def give_to_owners(self, units: Sequence[GatherUnit], placement: WholeTensors) -> None:
        """Replace DeepSpeed's slices by whole parts, one unit at a time. Collective."""
        for unit in units:
            members = self._owned(unit.params)
            if members:
                members[0].all_gather(members)
            for param in members:
                own = placement.own_part(param, param.data).to(param.ds_tensor.dtype, copy=True)
                param.partition([param])
                _replace_shard(param, own, padding=0)

    @staticmethod
    def _owned(params: Iterable[Parameter]) -> list[Parameter]:
        """Those that have owners: codes at rest stay in equal parts, which any rank may cut anywhere."""
        return [p for p in params if stored_weight(p) is None]

    @torch.no_grad()
    def take_from_owners(self, params: Iterable[Parameter]) -> None:
        """Give parameters DeepSpeed's equal slices again. Collective."""
        topology = self.session.topology
        for param in self._owned(params):
            self.gather_exactly([param])
            size = slice_numel(param.ds_numel, topology.world_size)
            own = param.data.new_zeros(size)
            mine = param.data.reshape(-1)[topology.rank * size : (topology.rank + 1) * size]
            own[: mine.numel()] = mine
            param.partition([param])
            _replace_shard(param, own, padding=size * topology.world_size - param.ds_numel)

    def give_back(self) -> None:
        if self.session.collected:
            # The engine is collected, at a moment of this rank's own: nothing collective can be done. Parameters keep
            # this gatherer, whose gathers go on working; destroy() would have given them back.
            return
        mine = [p for p in self.adopted.values() if getattr(p, STATE, None) and getattr(p, STATE).owner is self]
        self.take_from_owners(mine)
        super().give_back()

    # -- layouts -----------------------------------------------------------------------------------------------------

    def bytes_of(self, param: Parameter) -> float:
        """Bytes that a rank sends of a parameter, on average."""
        if stored_weight(param) is not None:
            return super().bytes_of(param)
        wire_format = SharedScaleFormat(WIRE_FORMAT) if self.travels_as_operand(param) else self.format_of(param)
        sizes = (wire_format.payload_bytes(part.numel) for part in self.session.placement.parts(param))
        return sum(sizes) / self.session.topology.world_size

    def params_in_codes(self, unit: GatherUnit) -> list[Parameter]:
        """Of stored parameters only: others lie in their owners' rows of different lengths."""
        return super().params_in_codes(unit) if unit.is_stored else []

    def _layout_of(self, unit: GatherUnit) -> OwnedLayout | PayloadLayout:
        if unit.is_stored:
            return super()._layout_of(unit)
        signature = tuple((p.ds_tensor.dtype, p.ds_tensor.ds_numel) for p in unit.params)
        if unit.layout is None or unit.signature != signature:
            operands = {p: p.ds_numel for p in unit.params if self.travels_as_operand(p)}
            unit.lay_out(self._owned_layout(unit.params, operands), self._packed(unit, operands), operands, signature)
            unit.payload = None  # it was made for the old one
        return unit.layout

    @staticmethod
    def _packed(unit: GatherUnit, operands: dict[Parameter, int]) -> list[Parameter]:
        return [p for p in unit.params if p not in operands]

    def _owned_layout(
        self, params: Sequence[Parameter], operands: Iterable[Parameter] = (), exact: bool = False
    ) -> OwnedLayout:
        placement, codes = self.session.placement, SharedScaleFormat(WIRE_FORMAT)

        def layout(ranks: Sequence[int]) -> tuple[PayloadLayout, list[_Piece], list[int]]:
            pieces, formats, owners = [], [], []
            for rank in ranks:
                for index, param in enumerate(params):
                    wire_format = UnquantizedFormat(param.ds_tensor.dtype) if exact else self.format_of(param)
                    for part in placement.parts(param):
                        if part.owner == rank and part.numel:
                            pieces.append(_Piece(index, part.start, part.numel))
                            formats.append(codes if param in operands else wire_format)
                            owners.append(rank)
            dtypes = [params[piece.index].ds_tensor.dtype for piece in pieces]
            return PayloadLayout([p.numel for p in pieces], formats, dtypes, self.device), pieces, owners

        operands = set(operands)
        full, full_pieces, owners = layout(self._rank_order.slices)
        own, own_pieces, _ = layout([self.session.topology.rank])
        rank_bytes = [0] * self.session.topology.world_size
        for owner, size in zip(owners, full.sizes):
            rank_bytes[owner] += size
        operand_places = {}
        for index in (i for i, param in enumerate(params) if param in operands):
            found = [(p.start, offset, p.numel) for p, offset in zip(full_pieces, full.offsets) if p.index == index]
            operand_places[index] = [(offset, numel) for _, offset, numel in sorted(found)]
        scales = self.gemm_weights.places(params[piece.index] for piece in own_pieces) if operands else None
        return OwnedLayout(own, own_pieces, full, full_pieces, rank_bytes, operand_places, scales)

    # -- a unit's gather ---------------------------------------------------------------------------------------------

    def _bytes_after(self, layout: OwnedLayout, hop: int) -> list[int]:
        """Bytes that each rank of a hop's level brings."""
        return [sum(layout.rank_bytes[r] for r in ranks) for ranks in self._brought[hop]]

    def _held_by_all(self, layout: OwnedLayout, hop: int) -> int:
        """Bytes that all ranks hold when a hop begins: after the hops before it so many have each rank's."""
        return sum(layout.rank_bytes) * math.prod(level.size for level in self._levels[:hop])

    def start_first_hops(self, unit: GatherUnit) -> None:
        if unit.is_stored:
            super().start_first_hops(unit)
            return
        if unit.held_is_current:
            return
        layout, before = self._layout_of(unit), self.session.gather_levels[0]
        self._provide_held(unit, sum(self._bytes_after(layout, len(before) - 1)))
        with self._network:
            after(self._weights_ready)
            if unit.operands:
                self.gemm_weights.refresh_scales()
            have = self._own_payload(unit, unit.held if all(level.size == 1 for level in before) else None)
            hops = [hop for hop, level in enumerate(before) if level.size > 1]
            for hop in hops:
                for work in unit.first_work:
                    work.wait()
                sizes = self._bytes_after(layout, hop)
                result = unit.held
                if hop != hops[-1]:
                    result = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
                held_by_all = self._held_by_all(layout, hop)
                work = start_owned_gather(result, have, sizes, before[hop], self.session.ledger, held_by_all)
                unit.first_work = [work]
                have = result
        unit.held_is_current = True

    def _own_payload(self, unit: GatherUnit, into: Tensor | None) -> Tensor:
        """Encode what this rank owns of a unit, flat; without a secondary shard the bytes are kept, as for slices."""
        layout = unit.layout
        if unit.payload is not None:
            return unit.payload if into is None else into.copy_(unit.payload)
        row = into
        if row is None:
            row = torch.empty(layout.own.row_bytes, dtype=torch.uint8, device=self.device)
        shards = self._shard_views(unit.params, layout.own_pieces)
        seed = layout.own.draw_seed(self.session.generators["weights"])
        scales = self._operand_scales(layout) if unit.operands and self.gemm_weights.granularity == "tensor" else None
        layout.own.encode(shards, self._whole_row, row.view(1, -1), seed, scales)
        if unit.operands and scales is None:
            for i, (piece, shard) in enumerate(zip(layout.own_pieces, shards)):
                if piece.index in layout.operand_places:
                    out = row[layout.own.offsets[i] :][: piece.numel]
                    self.gemm_weights.encode_range(unit.params[piece.index], piece.start, shard, out)
        if self.session.secondary_ranks is None and (layout.own.needs_seed or self.device.type == "cpu"):
            # Its scales may be found anew, so a payload with operands' codes is made again.
            unit.payload = None if unit.operands else row.clone()
        return row

    def _shard_views(self, params: Sequence[Parameter], pieces: Sequence[_Piece]) -> list[Tensor]:
        """The elements of each of this rank's pieces: a shard holds those of a parameter one after the other."""
        taken: dict[int, int] = {}
        views = []
        for piece in pieces:
            start = taken.get(piece.index, 0)
            taken[piece.index] = start + piece.numel
            views.append(params[piece.index].ds_tensor.data.view(-1)[start : start + piece.numel])
        return views

    def _operand_scales(self, layout: OwnedLayout) -> SharedScales:
        """The scales of this rank's pieces; those that are no operands have a number that is not used."""
        encode = self.gemm_weights.multipliers(layout.scale_places)
        unused = self._scratch.get(encode.numel())
        if unused is None:
            zeros = torch.zeros_like(encode)
            counts = torch.zeros(3, 2, dtype=torch.int64, device=self.device)
            unused = self._scratch[encode.numel()] = SharedScales(zeros, zeros, zeros, counts)
        return SharedScales(encode, unused.decode, unused.amax, unused.counts)

    def _start_last_hop(self, unit: GatherUnit) -> None:
        if unit.is_stored:
            super()._start_last_hop(unit)
            return
        last, hop = self._levels[-1], len(self._levels) - 1
        sizes, held_by_all = self._bytes_after(unit.layout, hop), self._held_by_all(unit.layout, hop)
        unit.gathered = unit.held
        if last.size > 1:
            unit.gathered = self._take(unit, self._node, self._gathered_ring, sum(sizes))
        with self._node:
            self._node_after_first_hops(unit)
            if last.size == 1:
                return
            work = start_owned_gather(unit.gathered, unit.held, sizes, last, self.session.ledger, held_by_all)
            unit.last_work = [work]

    def _decode(self, unit: GatherUnit):
        if unit.is_stored:
            return super()._decode(unit)
        values = dict(zip(unit.packed, unit.empty_parameters(self.device)))
        self._decode_row(unit.layout, unit.gathered, unit.params, values)
        exact = {p: isinstance(self.format_of(p), UnquantizedFormat) for p in unit.packed}
        operands, in_place = [], False
        for index, places in unit.layout.operand_places.items():
            codes = [unit.gathered[offset : offset + numel] for offset, numel in places]
            in_place = in_place or len(codes) == 1
            param, all_codes = unit.params[index], codes[0] if len(codes) == 1 else torch.cat(codes)
            operands.append((param, self.gemm_weights.operand(param, all_codes)))
        return [(p, value, exact[p]) for p, value in values.items()], operands, in_place

    def _decode_row(
        self, layout: OwnedLayout, row: Tensor, params: Sequence[Parameter], values: dict[Parameter, Tensor]
    ) -> None:
        """Decode all ranks' payloads into the tensors of `values`; parameters that are not in it are left out."""
        parts = []
        for piece in layout.full_pieces:
            value = values.get(params[piece.index])
            parts.append(None if value is None else value.view(-1)[piece.start : piece.start + piece.numel])
        layout.full.decode(row.view(1, -1), self._whole_row, parts)

    # -- exactly -----------------------------------------------------------------------------------------------------

    def _gather_missing(self, missing: list[Parameter]) -> None:
        stored, missing = [p for p in missing if stored_weight(p) is not None], self._owned(missing)
        if stored:
            super()._gather_missing(stored)
        if not missing:
            return
        layout = self._owned_layout(missing, exact=True)
        row = torch.empty(layout.own.row_bytes, dtype=torch.uint8, device=self.device)
        shards = self._shard_views(missing, layout.own_pieces)
        layout.own.encode(shards, self._whole_row, row.view(1, -1))
        with self.session.ledger.counting(OUTSIDE):
            for hop, level in enumerate(self._levels):
                if level.size > 1:
                    sizes = self._bytes_after(layout, hop)
                    result = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
                    held_by_all = self._held_by_all(layout, hop)
                    start_owned_gather(result, row, sizes, level, self.session.ledger, held_by_all).wait()
                    row = result
        dtypes = {p: p.ds_tensor.dtype for p in missing}
        values = {p: torch.empty(p.ds_shape, dtype=dtypes[p], device=self.device) for p in missing}
        self._decode_row(layout, row, missing, values)
        for param, value in values.items():
            param.data = value
            param.ds_status = ZeroParamStatus.AVAILABLE

    # -- numbers that lie as parameters do ---------------------------------------------------------------------------

    def gather_owned(self, param: Parameter, own: Tensor) -> Tensor:
        """Flat full tensor, on the session's device, of what each rank has for its part of a parameter. Collective."""
        parts = self.session.placement.parts(param)
        world = self.session.topology.world_size
        sizes = [sum(part.numel for part in parts if part.owner == rank) for rank in range(world)]
        own = own.to(self.device).contiguous().view(-1)
        gathered = own.new_empty(sum(sizes))
        dist.all_to_all_single(
            gathered, own.repeat(world), sizes, [own.numel()] * world, group=self.session.topology.group
        )
        full = torch.empty_like(gathered)
        taken = [sum(sizes[:rank]) for rank in range(world)]
        for part in parts:
            full[part.start : part.start + part.numel] = gathered[taken[part.owner] :][: part.numel]
            taken[part.owner] += part.numel
        return full


def plan_owners(session: Session, gatherer: WeightGatherer, units: Sequence[GatherUnit]) -> WholeTensors:
    """Who owns what, with all model states and the bytes of each exchange counted."""
    config, topology = session.config, session.topology
    owned = [unit for unit in units if not unit.is_stored]
    gradient_bytes = 1.0 if config.gradients.store_format != "none" else 4.0
    return WholeTensors.plan(
        [unit.params for unit in owned],
        topology.rank,
        topology.world_size,
        topology.ranks_per_node,
        state_bytes=gradient_bytes + (session.state_formats.bytes_per_parameter() if session.state_formats else 12.0),
        wire_bytes=[[gatherer.format_of(p).bits_per_element / 8 for p in unit.params] for unit in owned],
        split=config.partition_split,
    )


def take_from_earlier_owners(units: Iterable[GatherUnit]) -> None:
    """Give parameters that an engine before this one has left with owners equal slices again. Collective."""
    for unit in units:
        for param in unit.params:
            state = getattr(param, STATE, None)
            if state is not None and isinstance(state.owner, WholeTensorGatherer):
                state.owner.take_from_owners([param])
                param.all_gather, param.partition = state.stock_all_gather, state.stock_partition
                param.all_gather_coalesced = state.stock_all_gather_coalesced


def _replace_shard(param: Parameter, own: Tensor, padding: int) -> None:
    """Let a parameter's shard be `own`, with DeepSpeed's notes about its size."""
    param.ds_tensor.data = own
    param.ds_tensor.ds_numel = own.numel()
    param.padding_size = lambda: padding
