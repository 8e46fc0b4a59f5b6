"""Slices of numbers: DeepSpeed's equal shards, encoded for the wire, with rows of equal size on all ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm.all_gather import gather_through, rows_by_rank, start_regions
from zeropp_fp8.comm.ledger import OUTSIDE
from zeropp_fp8.comm.payload import PayloadLayout
from zeropp_fp8.compute.operand import Float8Operand
from zeropp_fp8.formats import UnquantizedFormat, WireFormat
from zeropp_fp8.zero.gather.buffers import Places, Regions
from zeropp_fp8.zero.gather.difference import Difference, Rows
from zeropp_fp8.zero.gather.gemm_weights import DTYPE as OPERAND_DTYPE
from zeropp_fp8.zero.gather.route import Route
from zeropp_fp8.zero.gather.storage import Storage
from zeropp_fp8.zero.gather.units import Arrived, Unit

if TYPE_CHECKING:
    from zeropp_fp8.kernels.linear.quantized_weight import QuantizedWeight


def gather_rows(route: Route, payloads: Sequence[Tensor]) -> list[Tensor]:
    """uint8 [ranks, size] in rank order, for each of this rank's payloads. Collective: one message per hop."""
    session = route.session
    levels = list(itertools.chain(*session.topology.gather_levels()))
    with session.ledger.counting(OUTSIDE):
        gathered = gather_through(torch.cat(list(payloads)), levels, session.ledger)
    rows = rows_by_rank(gathered, [level.size for level in levels])
    return [part.contiguous() for part in rows.split([payload.numel() for payload in payloads], dim=1)]


class SlicedUnit(Unit):
    """A unit in which all ranks send equally many bytes: one payload for most parameters, and codes of operands.

    Attributes:
        packed: parameters in the payload; `operands`: the others.
        payload: uint8 [row bytes], kept on a CPU without a secondary shard, so that it is made once per step.
    """

    may_differ = True

    def __init__(self, params: list[Parameter], storage: Storage, persistent: bool = False) -> None:
        super().__init__(params, storage, persistent)
        self.packed: list[Parameter] = []
        self.operands: list[Parameter] = []
        self._made_for: list[tuple[torch.dtype, int]] = []

    def bytes_in(self, wire_format: WireFormat, param: Parameter) -> int:
        return wire_format.payload_bytes(sharded.shard_numel(param))

    # -- layout ------------------------------------------------------------------------------------------------------

    def lay_out(self) -> None:
        made_for = [(sharded.shard_dtype(p), sharded.shard_numel(p)) for p in self.params]
        if self.layout is not None and self._made_for == made_for:
            return
        route, self._made_for = self.route, made_for
        self.operands = [p for p in self.params if self.sent_as_operand(p)]
        self.packed = [p for p in self.params if not self.sent_as_operand(p)]
        numels, dtypes = [sharded.shard_numel(p) for p in self.packed], [self.dtype_of(p) for p in self.packed]
        left_out = self._not_decoded()
        formats: list[WireFormat] = [self.format_of(p) for p in self.packed]
        self.layout = PayloadLayout(numels, formats, dtypes, route.device, left_out=left_out)
        operand_bytes = [route.gemm_weights.slice_bytes(p) for p in self.operands]
        self._regions = Regions([self.layout.row_bytes, *operand_bytes])
        self._places = Places(self.packed, dtypes, left_out)
        self._encoded_numels = self._unpadded_numels()
        self._exact = [self.is_exact(p) for p in self.packed]
        self.payload = None  # it was made for the old layout
        self.difference = Difference(self)

    def _not_decoded(self) -> list[int]:
        """Indices of `packed` whose codes go to an operand directly."""
        return []

    def _unpadded_numels(self) -> list[int]:
        """The number of elements to encode of each packed shard.

        DeepSpeed never writes the padding beyond the end of a parameter in the last shards, and padding would enter the
        scale of a block. (If a shard is all padding, every block of it is dropped.)
        """
        return [self.route.session.own_numel(p) or sharded.shard_numel(p) for p in self.packed]

    @property
    def held_bytes(self) -> int:
        return self.route.reached * self._regions.rank_bytes

    @property
    def gathered_bytes(self) -> int:
        return self.held_bytes * self.route.last.size

    # -- hops --------------------------------------------------------------------------------------------------------

    def first_hops(self, held: Tensor) -> list[dist.Work]:
        regions, own_row = self._regions.all_of(held, self.route.reached), self.route.own_row
        self._encode([rows[own_row : own_row + 1] for rows in regions])
        self.difference.begin()
        return self._exchange(regions)

    def _exchange(self, regions: list[Tensor]) -> list[dist.Work]:
        """Start the first hops. They fill uint8 [reached, size] of each region; this rank's row is there already."""
        # Every hop gathers in place, into this rank's part of the next hop's result.
        route, own_row, works, have = self.route, self.route.own_row, [], 1
        for level in route.before:
            start = own_row // have * have
            mine = [rows[start : start + have].view(-1) for rows in regions]
            have *= level.size
            start = own_row // have * have
            if works:
                self.wait_for(works)
            results = [rows[start : start + have].view(-1) for rows in regions]
            works = start_regions(results, mine, level, route.session.ledger)
        return works

    # -- differences (difference.py) -----------------------------------------------------------------------------------

    def difference_rows(self) -> tuple[Rows, list[Rows]]:
        rows = Rows(self.layout.formats, self.layout.slice_numels, self.route.device)
        return rows, [rows]

    def agreed(self, sizes: list[int]) -> list[int]:
        return [max(sizes)] * len(sizes)

    def own_row_of_differences(self, brought: Tensor, sizes: Sequence[int]) -> Tensor:
        return brought.view(self.route.reached, -1)[self.route.own_row : self.route.own_row + 1]

    def bring_differences(self, brought: Tensor, sizes: Sequence[int]) -> list[dist.Work]:
        return self._exchange(self.rows_of_differences(brought, sizes))

    def rows_of_differences(self, brought: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        return [brought.view(self.route.reached, -1)]

    def held_rows(self, held: Tensor) -> list[Tensor]:
        return [self._regions.of(held, 0, self.route.reached)]

    def own_held_row(self, held: Tensor) -> Tensor:
        return self.held_rows(held)[0][self.route.own_row : self.route.own_row + 1]

    def own_payload(self, into: Tensor | None = None) -> Tensor:
        device, slices = self.route.device, []
        for param, numel in zip(self.packed, self._encoded_numels):
            own = sharded.stored(param)
            own = own if own.numel() == numel else own.narrow(0, 0, numel)
            slices.append(own if own.device == device else own.to(device, non_blocking=True))
        row = torch.empty(1, self.layout.row_bytes, dtype=torch.uint8, device=device) if into is None else into
        self.layout.encode(slices, self.route.one_row, row)
        return row

    def _encode(self, own: list[Tensor]) -> None:
        """Encode into uint8 [1, size] of each region; without a secondary shard keep the bytes for the next gather.

        Only the payload's bytes are kept: scales of weights that are sent as operands are kept anyway.
        """
        route = self.route
        if self.operands:
            route.gemm_weights.refresh_scales(self.names)
        for param, out in zip(self.operands, own[1:]):
            route.gemm_weights.encode(param, out.view(-1))
        row = own[0]
        if self.payload is not None:
            if row.data_ptr() != self.payload.data_ptr():  # frozen codes may be stored there
                row.copy_(self.payload, non_blocking=True)
            return
        self.own_payload(row)
        # A secondary shard has the payload anyway, and a GPU makes it again as fast as it reads it.
        if not self.keeps_secondary and route.device.type == "cpu":
            self.payload = row.clone() if route.session.formats.weights is not None else None

    def last_hop(self, held: Tensor, gathered: Tensor) -> list[dist.Work]:
        route = self.route
        regions = range(len(self._regions))
        sent = [self._regions.flat(held, index, route.reached) for index in regions]
        results = [self._regions.flat(gathered, index, route.world_size) for index in regions]
        return start_regions(results, sent, route.last, route.session.ledger)

    def decode(self, gathered: Tensor) -> Arrived:
        values = self.values_in(self.codes_in(gathered))
        values = [one for one in zip(self.packed, values, self._exact) if one[1] is not None]
        return Arrived(values, self._operands_in(gathered))

    def values_in(self, codes: Tensor) -> list[Tensor | None]:
        """Values of packed parameters, out of `codes_in`; None for those that are not decoded."""
        values = self._places.empty(self.route.device)
        self.layout.decode(codes, self.route.rank_order, values, self._places)
        return values

    def _operands_in(self, gathered: Tensor) -> list[tuple[Parameter, Float8Operand]]:
        route, operands = self.route, []
        for index, param in enumerate(self.operands, start=1):
            codes = self._regions.of(gathered, index, route.world_size)
            if not route.in_rank_order:
                codes = codes[route.rows_in_rank_order]  # the copy that sorts slices
            operands.append((param, route.gemm_weights.operand(param, codes.view(-1).view(OPERAND_DTYPE))))
        return operands

    # -- codes -------------------------------------------------------------------------------------------------------

    def params_in_codes(self) -> list[Parameter]:
        """All rounded parameters; none in a unit with GEMM operands."""
        self.lay_out()
        if self.shards_are_values or self.operands or self._not_decoded():
            return []
        return [param for param in self.packed if not isinstance(self.format_of(param), UnquantizedFormat)]

    def codes_in(self, gathered: Tensor) -> Tensor:
        """uint8 [ranks, row bytes]: the payloads of all ranks."""
        return self._regions.of(gathered, 0, self.route.world_size)

    def weight_in(self, index: int, codes: Tensor) -> QuantizedWeight:
        """Packed parameter `index` in its form in all ranks' payloads [ranks, row bytes]."""
        from zeropp_fp8.kernels.linear.quantized_weight import QuantizedWeight

        param, layout = self.packed[index], self.layout
        *rows, columns = sharded.shape(param)
        return QuantizedWeight(
            codes,
            layout.offsets[index],
            layout.formats[index],
            layout.slice_numels[index],
            (math.prod(rows), columns),
            self.dtype_of(param),
            row_of_slice=None if self.route.in_rank_order else self.route.row_of_slice,
        )


class Sliced(Storage):
    """Parameters in DeepSpeed's slices."""

    unit_class = SlicedUnit

    def takes(self, param: Parameter) -> bool:
        return True

    def attach(self, params: Sequence[Parameter]) -> None:
        super().attach(params)
        for param in params:
            # DeepSpeed leaves padding uninitialized. Its copy has zeros.
            sharded.shard(param).view(-1)[self.route.session.own_numel(param) :].zero_()

    def gather_exactly(self, params: Sequence[Parameter]) -> None:
        shards = [sharded.shard(param).to(self.route.device) for param in params]
        formats = [UnquantizedFormat(shard.dtype) for shard in shards]
        rows = gather_rows(self.route, [f.encode(shard) for f, shard in zip(formats, shards)])
        for param, wire_format, payloads in zip(params, formats, rows):
            flat = wire_format.decode_rows(payloads, sharded.shard_numel(param), sharded.shard_dtype(param)).view(-1)
            sharded.set_full(param, flat[: sharded.numel(param)].view(sharded.shape(param)))


class SlicedExperts(Sliced):
    """Parameters of experts in slices of the ranks that have the same experts."""

    def takes(self, param: Parameter) -> bool:
        return sharded.experts_group(param) is not None
