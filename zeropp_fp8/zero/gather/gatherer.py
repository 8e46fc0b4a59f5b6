"""Gathering parameters: quantized once, two-level, with the node's copy kept as received codes.

DeepSpeed puts `all_gather`, `all_gather_coalesced` and `partition` on each ZeRO-3 parameter as closures; `adopt()`
replaces them. Two kinds of gather exist:

* for computing (fetches of the coordinator, `all_gather_coalesced`, and `all_gather()` while a module runs): the
  configured wire format, a unit at a time. The shards' payload is encoded once and kept until the weights change, so
  forward, backward, every micro-batch and evaluation see the same bits, also with stochastic rounding. With hpZ what
  the first hops brought is kept (the secondary shard): later gathers use the node's own links only. One node needs no
  such copy.
* for looking and changing (`GatheredParameters` and everything built on it): every bit, in two levels too.

Payloads and secondary shards are dropped by `weights_changed()`, which every writer of weights calls on every rank:
the optimizer step, checkpoint loads, `partition(has_been_updated=True)`. All ranks therefore agree on who holds what;
looking at a tensor's version counter instead would let them disagree (a padded shard is never written) and hang.

On a GPU the hops run on lanes (streams) of their own: encoding and the hop between nodes on one, the hop within nodes
on another, so that consecutive units use both kinds of link at the same time. Decoding runs on the compute stream just
before the values are needed: 40 microseconds for a block of 50M parameters, and its buffer never crosses streams.

What arrives lies in rings of buffers, which grow to the largest unit that they have seen. Units much larger than the
others get buffers out of the compute stream's memory, for one gather each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, free_param, get_allgather_dtype
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8.comm.all_gather import gather_through, rank_of_rows, start_gather, start_regions
from zeropp_fp8.comm.lanes import BufferRing, Lane, after, buffer_for, mark, used_last
from zeropp_fp8.comm.ledger import OUTSIDE
from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder
from zeropp_fp8.comm.reduce_scatter import slice_numel
from zeropp_fp8.compute.linear import GATHERED_OPERAND, READ_AS_NUMBERS
from zeropp_fp8.compute.operand import Float8Operand
from zeropp_fp8.formats import UnquantizedFormat, WireFormat
from zeropp_fp8.formats.base import align_up
from zeropp_fp8.zero.frozen.operands import FrozenOperands
from zeropp_fp8.zero.frozen.store import (
    check_untouched,
    check_usable,
    note_version,
    partition_stored,
    stored_weight,
    value_dtype,
)
from zeropp_fp8.zero.gather.adopted import STATE, ParameterWire, gather_by_engine, partition_by_engine
from zeropp_fp8.zero.gather.gemm_weights import GemmWeights
from zeropp_fp8.zero.gather.units import GatherUnit
from zeropp_fp8.zero.session import Session

if TYPE_CHECKING:
    from zeropp_fp8.kernels.linear.quantized_weight import (
        QuantizedWeight,  # kernels need Triton, which is loaded on first use
    )

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes an element


def outsized_units(units: Sequence[GatherUnit], bytes_of: Callable[[Parameter], float]) -> set[GatherUnit]:
    """Units of one matrix that send more than twice the bytes of the third largest unit.

    That is an embedding or a head: 0.54 GB of INT8 codes each at 8 B parameters, where a block has 0.11 GB of NF4
    codes. A model has two of them, so the third largest is a block; the median unit need not be, because adapters and
    norms are units of their own, more of them than blocks. Blocks, even if there are but two, are what rings are for:
    they are fetched while others compute. Up to twice the size, an embedding is worth its memory too.
    """
    sizes = {unit: sum(bytes_of(p) for p in unit.params) for unit in units}
    usual = sorted((size for unit, size in sizes.items() if not unit.persistent), reverse=True)[:3]
    single = [unit for unit in units if sum(len(p.ds_shape) > 1 for p in unit.params) == 1]
    return {unit for unit in single if usual and sizes[unit] > 2 * usual[-1]}


class UnitsHandle:
    """Units whose gather is under way; `wait` makes their parameters available."""

    def __init__(self, gatherer: WeightGatherer, units: Sequence[GatherUnit]) -> None:
        self._gatherer = gatherer
        self._units = units

    def wait(self, handle_dependency: bool = True) -> None:
        """`handle_dependency` is DeepSpeed's; buffers are always protected here."""
        for unit in self._units:
            self._gatherer.finish(unit)


class WeightGatherer:
    """Gathers the parameters of one engine."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.device = session.device
        self.adopted: dict[int, Parameter] = {}
        self.units: list[GatherUnit] = []
        self.module_depth = 0  # > 0 while a module of the model runs
        self.live_numel = 0  # elements of parameters that hold their values now
        self.resident = False  # weights stay, for generation: nobody else gathers or drops them
        before, after_ = session.gather_levels
        self._reached, self._own_row = 1, 0  # rows that the first hops bring, and which of them is this rank's
        for level in before:
            self._own_row += level.rank * self._reached
            self._reached *= level.size
        self._first_order = SliceOrder([0], self.device)
        self._rank_order = SliceOrder(rank_of_rows([level.size for level in (*before, *after_)]), self.device)
        self._network = Lane(self.device)
        self._node = Lane(self.device)
        # Without a secondary shard the first hops' results are as short-lived as the last hop's.
        self._held_ring = BufferRing(self.device, 3)
        self._gathered_ring = BufferRing(self.device, 2)
        self._outsized: set[GatherUnit] = set()  # units whose buffers do not come from the rings
        self._weights_ready = None  # device event: the last write to the weights
        self._nothing: dict[torch.dtype, Tensor] = {}
        self._nan: dict[torch.dtype, Tensor] = {}
        self.gemm_weights = GemmWeights(session)  # empty until parameters are adopted
        self.frozen_operands = FrozenOperands(session)  # likewise
        self._converted: set[int] = set()  # id of the weights of layers that compute in low precision
        rows = self._rank_order.slices
        self._rows_in_rank_order = torch.tensor(sorted(range(len(rows)), key=rows.__getitem__), device=self.device)
        self._row_of_slice = self._rows_in_rank_order.to(torch.int32)  # as kernels take it

    # -- adoption ------------------------------------------------------------------------------------------------

    def adopt(self, units: Sequence[GatherUnit]) -> None:
        """Put this gatherer's closures on the ZeRO-3 parameters of `units`."""
        self.units = list(units)
        self.gemm_weights.adopt(p for unit in units for p in unit.params if stored_weight(p) is None)
        self.frozen_operands.adopt(param for unit in units for param in unit.params)
        if self.session.conversion is not None:
            self._converted = {id(module.weight) for module in self.session.conversion.converted.values()}
        for unit in units:
            for param in unit.params:
                previous = getattr(param, STATE, None)  # another engine's, over the same parameter
                state = ParameterWire(
                    stock_all_gather=previous.stock_all_gather if previous else param.all_gather,
                    stock_all_gather_coalesced=(
                        previous.stock_all_gather_coalesced if previous else param.all_gather_coalesced
                    ),
                    stock_partition=previous.stock_partition if previous else param.partition,
                    unit=unit,
                    owner=self,
                )
                setattr(param, STATE, state)
                param.all_gather_coalesced = self.all_gather_coalesced
                param.all_gather = self._all_gather_closure(param)
                param.partition = self._partition_closure(param)
                self.adopted[param.ds_id] = param
        self._outsized = outsized_units(self.units, self.bytes_of)

    def give_back(self) -> None:
        """Give every parameter DeepSpeed's own closures back, and the buffers to the allocator."""
        for unit in self.units:
            self.cancel(unit)
            self._drop(unit)
            unit.held = None
        for ring in (self._held_ring, self._gathered_ring):
            ring.clear()
        for param in self.adopted.values():
            state: ParameterWire | None = getattr(param, STATE, None)
            if state is None or state.owner is not self:
                continue  # a later engine over the same model has taken it over
            param.__dict__.pop(READ_AS_NUMBERS, None)
            param.all_gather = state.stock_all_gather
            param.all_gather_coalesced = state.stock_all_gather_coalesced
            param.partition = state.stock_partition
            delattr(param, STATE)
        self.adopted.clear()
        self.units = []

    def _all_gather_closure(self, param: Parameter):
        def all_gather(param_list=None, async_op=False, hierarchy=0):
            if param_list is None and self.module_depth > 0:
                self._check_not_resident()
                return self.gather_now([param])
            gather_by_engine([param] if param_list is None else param_list)
            return [] if async_op else None  # handles of what is complete

        return all_gather

    @staticmethod
    def _partition_closure(param: Parameter):
        def partition(param_list=None, hierarchy=0, has_been_updated=False, free_data=True):
            partition_by_engine([param] if param_list is None else param_list, has_been_updated, free_data)

        return partition

    # -- formats -------------------------------------------------------------------------------------------------

    def format_of(self, param: Parameter) -> WireFormat:
        """The wire format of a parameter: stored ones as they rest, other matrices as configured, vectors in full."""
        stored = stored_weight(param)
        if stored is not None:
            return stored.wire_format
        if len(param.ds_shape) >= 2 and self.session.weight_format is not None:
            return self.session.weight_format
        return UnquantizedFormat(get_allgather_dtype(param, param.ds_tensor))

    @property
    def in_rank_order(self) -> bool:
        """Whether the last hop brings the slices in the order of the ranks."""
        return self._rank_order.is_natural

    def travels_as_operand(self, param: Parameter) -> bool:
        """Whether the gathered bytes of a parameter are a GEMM operand."""
        persistent = getattr(param, STATE).unit.persistent
        format_agrees = self.format_of(param) is self.session.weight_format
        return param in self.gemm_weights and format_agrees and not persistent

    def is_frozen(self, param: Parameter) -> bool:
        """Whether a parameter is gathered with frozen ones only, so that copies survive optimizer steps."""
        return not any(p.requires_grad for p in getattr(param, STATE).unit.params)

    def bytes_of(self, param: Parameter) -> int:
        """Bytes that each rank sends of a parameter."""
        if self.travels_as_operand(param):
            return align_up(self.gemm_weights.slice_bytes(param))
        return self.format_of(param).payload_bytes(param.ds_tensor.ds_numel)

    def _layout_of(self, unit: GatherUnit) -> PayloadLayout:
        """The unit's payload layout, made again when its parameters were cast."""
        signature = tuple((value_dtype(p), p.ds_tensor.ds_numel) for p in unit.params)
        if unit.layout is None or unit.signature != signature:
            operands = {p: self.gemm_weights.slice_bytes(p) for p in unit.params if self.travels_as_operand(p)}
            packed = [p for p in unit.params if p not in operands]
            # Of these the codes go to an operand directly.
            not_decoded = [index for index, p in enumerate(packed) if p in self.frozen_operands]
            layout = PayloadLayout(
                [p.ds_tensor.ds_numel for p in packed],
                [self.format_of(p) for p in packed],
                [value_dtype(p) for p in packed],
                self.device,
                left_out=not_decoded,
            )
            unit.lay_out(layout, packed, operands, signature, not_decoded)
            # DeepSpeed never writes what lies beyond the end of a parameter in the last shards, and it would enter the
            # scale of a block. (Of a shard that is all padding every block is dropped.)
            if not unit.is_stored:
                unit.encoded_numels = [self.session.own_numel(p) or p.ds_tensor.ds_numel for p in packed]
            unit.payload = None  # it was made for the old one
        return unit.layout

    # -- a unit's gather -----------------------------------------------------------------------------------------

    def start_first_hops(self, unit: GatherUnit) -> None:
        """Encode this rank's shards and start the hops up to the secondary shard, unless its result is there."""
        if unit.held_is_current or self._is_whole_here(unit):
            return
        before, _ = self.session.gather_levels
        self._layout_of(unit)
        reached, own_row = self._reached, self._own_row
        if unit.is_stored:
            self._rest_together(unit)
        sends_what_rests = reached == 1 and unit.is_stored and unit.payload.device == self.device
        if sends_what_rests:
            unit.held = unit.payload
        else:
            self._provide_held(unit, reached * unit.rank_bytes)
        with self._network:
            after(self._weights_ready)
            if unit.operands:
                self.gemm_weights.refresh_scales()
            if sends_what_rests:
                unit.held_is_current = True
                return
            regions = [unit.region(unit.held, index, reached) for index in range(len(unit.regions))]
            self._encode_shards(unit, [rows[own_row : own_row + 1] for rows in regions])
            # Every hop gathers in place, into the part of the next hop's result that is this rank's.
            have = 1
            for level in before:
                start = own_row // have * have
                mine = [rows[start : start + have].view(-1) for rows in regions]
                have *= level.size
                start = own_row // have * have
                for work in unit.first_work:
                    work.wait()
                results = [rows[start : start + have].view(-1) for rows in regions]
                unit.first_work = start_regions(results, mine, level, self.session.ledger)
        unit.held_is_current = True

    def _take(self, unit: GatherUnit, lane: Lane, ring: BufferRing, num_bytes: int) -> Tensor:
        """A buffer for one gather of a unit, which `lane` fills. To be called on the stream that decodes."""
        if unit in self._outsized:
            return buffer_for(lane, num_bytes, self.device)
        with lane:
            return ring.take(num_bytes)

    def _provide_held(self, unit: GatherUnit, num_bytes: int) -> None:
        """Let `unit.held` be a buffer for the first hops' result: the secondary shard's, or one for this gather."""
        if self.session.secondary_ranks is None:
            unit.held = self._take(unit, self._network, self._held_ring, num_bytes)
        elif unit.held is None or unit.held.numel() != num_bytes:
            with self._network:
                unit.held = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def _rest_together(self, unit: GatherUnit) -> None:
        """Let the codes of a unit of stored parameters rest in one buffer, `unit.payload`."""
        if unit.payload is not None:
            return
        shards = [param.ds_tensor.data for param in unit.packed]
        payload = torch.cat(shards)
        unit.payload = payload.pin_memory() if shards[0].is_pinned() else payload
        for param, part in zip(unit.packed, unit.payload.split(unit.layout.sizes)):
            param.ds_tensor.data = part
        self._weights_ready = mark(self.device)

    def _encode_shards(self, unit: GatherUnit, own: list[Tensor]) -> None:
        """Encode into uint8 [1, size] of each region; without a secondary shard the bytes are kept for the next gather.

        Those of the payload only: scales of weights that travel as operands are kept anyway.
        """
        for param, out in zip(unit.operands, own[1:]):
            self.gemm_weights.encode(param, out.view(-1))
        row = own[0]
        if unit.payload is not None:
            row.copy_(unit.payload, non_blocking=True)
            return
        shards = [
            p.ds_tensor.data.view(-1)[:numel].to(self.device, non_blocking=True)
            for p, numel in zip(unit.packed, unit.encoded_numels)
        ]
        layout = unit.layout
        layout.encode(shards, self._first_order, row, layout.draw_seed(self.session.generators["weights"]))
        # A secondary shard holds it anyway, and nearest rounding gives the same bytes again.
        if self.session.secondary_ranks is None and (layout.needs_seed or self.device.type == "cpu"):
            unit.payload = row.clone() if self.session.weight_format is not None else None

    def start(self, unit: GatherUnit, ahead: bool = False) -> None:
        """Start gathering a unit's parameters for computing; no-op when that is under way.

        `ahead`: the values are not needed yet. On a CPU the last hop is then left to `finish` unless it can start at
        once, because waiting for the first hops would block.
        """
        if unit.gathered is not None or self._is_whole_here(unit):
            return
        unit.asked_for = True
        self.start_first_hops(unit)
        if not (ahead and unit.first_work and self.device.type == "cpu"):
            self._start_last_hop(unit)

    def _start_last_hop(self, unit: GatherUnit) -> None:
        _, (last,) = self.session.gather_levels
        unit.gathered = unit.held
        if last.size > 1:
            unit.gathered = self._take(unit, self._node, self._gathered_ring, unit.held.numel() * last.size)
        with self._node:
            self._node_after_first_hops(unit)
            if last.size == 1:
                return
            held, gathered = (
                [unit.region(buffer, index, ranks).view(-1) for index in range(len(unit.regions))]
                for buffer, ranks in ((unit.held, self._reached), (unit.gathered, self._reached * last.size))
            )
            unit.last_work = start_regions(gathered, held, last, self.session.ledger)

    def _node_after_first_hops(self, unit: GatherUnit) -> None:
        if unit.first_work:
            for work in unit.first_work:
                work.wait()
            unit.first_work = []
        elif self._network.stream is not None:
            # One node: nothing is waited for but the encoding.
            self._node.stream.wait_stream(self._network.stream)

    @torch.compiler.disable  # torch.compile traces hooks, but not attributes that are put on Parameters and taken off
    def finish(self, unit: GatherUnit) -> None:
        """Make the parameters of a unit available on the current stream; those that are stay as they are."""
        missing = [p for p in unit.params if p.ds_status != ZeroParamStatus.AVAILABLE]
        if not missing:
            return
        if unit.is_stored:
            for param in missing:
                check_usable(param)
                check_untouched(param)
        elif self._is_whole_here(unit):
            self._lend_shards(unit, missing)
            return
        self.start(unit)
        world = self.session.topology.world_size
        self.session.ledger.stock_would_send(sum(slice_numel(p.ds_numel, world) for p in missing) * world)
        self._wait_for_last_hop(unit)
        values, operands, lent = self._decode(unit)
        for param, value, exact in values:
            if param.ds_status != ZeroParamStatus.AVAILABLE:
                param.data = value
                param.ds_status = ZeroParamStatus.AVAILABLE
                getattr(param, STATE).lossy = not exact
                note_version(param)
        for param, operand in operands:
            if param.ds_status != ZeroParamStatus.AVAILABLE:
                setattr(param, GATHERED_OPERAND, operand)
                dtype = value_dtype(param)
                if getattr(param, READ_AS_NUMBERS, False):
                    param.data = operand.dequantize(dtype)
                else:
                    # Whoever reads the values in a way that linear.py does not notice shall see it.
                    param.data = self._not_a_number(dtype).expand(param.ds_shape)
                param.ds_status = ZeroParamStatus.AVAILABLE
                getattr(param, STATE).lossy = True
                note_version(param)
        self._drop_gathered(unit, lent)
        if not unit.live:
            unit.live = True
            self.live_numel += unit.numel

    def _wait_for_last_hop(self, unit: GatherUnit) -> None:
        """The current stream (on a CPU: the host) waits until all has arrived."""
        for work in unit.last_work:
            work.wait()
        if not unit.last_work:
            self._node.before_current()

    def _is_whole_here(self, unit: GatherUnit) -> bool:
        """Whether the shards are the parameters: one rank, nothing rounded, nothing offloaded."""
        return (
            self.session.topology.world_size == 1
            and not unit.is_stored
            and not any(p.ds_tensor.device != self.device for p in unit.params)
        )

    def _lend_shards(self, unit: GatherUnit, missing: list[Parameter]) -> None:
        """Let parameters be their shards while modules use them: a copy of an embedding would be a gigabyte.

        GatheredParameters makes a copy all the same: what is written there without `modifier_rank` is to be dropped.
        """
        for param in missing:
            param.data = param.ds_tensor.data[: param.ds_numel].view(param.ds_shape)
            param.ds_status = ZeroParamStatus.AVAILABLE
            getattr(param, STATE).lossy = True
        if not unit.live:
            unit.live = True
            self.live_numel += unit.numel

    def _decode(
        self, unit: GatherUnit
    ) -> tuple[list[tuple[Parameter, Tensor, bool]], list[tuple[Parameter, Float8Operand]], bool]:
        """What the last hop brought: (parameter, its values, whether they are exact) of those that are decoded,
        (parameter, operand) of others, and whether operands lie in the buffer itself."""
        world = self.session.topology.world_size
        values, operands = unit.empty_parameters(self.device), []
        payloads = unit.region(unit.gathered, 0, world)
        unit.layout.decode(payloads, self._rank_order, values)
        decoded = []
        for index, (param, value) in enumerate(zip(unit.packed, values)):
            stored = stored_weight(param)
            if value is None:
                operands.append((param, self._frozen_operand(unit, index, payloads)))
            else:
                # What a stored parameter decodes to is all there is of it.
                decoded.append((param, value, stored is not None or self._travels_exactly(param)))
        for index, param in enumerate(unit.operands, start=1):
            codes = unit.region(unit.gathered, index, world)
            if not self.in_rank_order:
                codes = codes[self._rows_in_rank_order]  # the copy that sorts slices
            operands.append((param, self.gemm_weights.operand(param, codes.view(-1))))
        return decoded, operands, bool(unit.operands) and self.in_rank_order

    def _travels_exactly(self, param: Parameter) -> bool:
        return isinstance(self.format_of(param), UnquantizedFormat)

    def _frozen_operand(self, unit: GatherUnit, index: int, payloads: Tensor) -> Float8Operand:
        """The FP8 operand of a stored parameter, from all ranks' payloads [ranks, row bytes]."""
        param, layout = unit.packed[index], unit.layout
        if not self.frozen_operands.rests_as_operand(param):
            return self.frozen_operands.operand(param, self._weight_in(unit, index, payloads))
        rows = payloads[:, layout.offsets[index] : layout.offsets[index] + layout.sizes[index]]
        order = None if self.in_rank_order else self._rows_in_rank_order
        return self.frozen_operands.operand_at_rest(param, rows, layout.slice_numels[index], order)

    def _weight_in(self, unit: GatherUnit, index: int, payloads: Tensor) -> QuantizedWeight:
        """Packed parameter `index` of a unit as it lies in all ranks' payloads [ranks, row bytes]."""
        from zeropp_fp8.kernels.linear.quantized_weight import QuantizedWeight

        param, layout = unit.packed[index], unit.layout
        return QuantizedWeight(
            payloads,
            layout.offsets[index],
            layout.formats[index],
            layout.slice_numels[index],
            tuple(param.ds_shape),
            value_dtype(param),
            row_of_slice=None if self.in_rank_order else self._row_of_slice,
        )

    def _not_a_number(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._nan:
            self._nan[dtype] = torch.full((1,), torch.nan, dtype=dtype, device=self.device)
        return self._nan[dtype]

    def _drop_gathered(self, unit: GatherUnit, lent: bool = False) -> None:
        """The current stream has been given the last use of the last hop's result.

        `lent`: operands lie in it; it goes back when the unit is released.
        """
        done = []
        if unit.gathered is not None and unit.gathered is not unit.held:
            done.append((self._gathered_ring, unit.gathered, lent))
        if self.session.secondary_ranks is None and unit.held is not None:
            if unit.held is not unit.payload:  # the codes at rest are nobody's to overwrite
                done.append((self._held_ring, unit.held, lent and unit.gathered is unit.held))
            unit.held = None
            unit.held_is_current = False
        unit.gathered = None
        unit.last_work = []
        unit.asked_for = False
        for ring, buffer, in_use in done:
            if unit in self._outsized:
                used_last(buffer)  # operands in it keep it until the release, as tensors do
            elif in_use:
                unit.lent.append((ring, buffer))
            else:
                ring.give_back(buffer)

    def cancel(self, unit: GatherUnit) -> None:
        """End a gather that nothing will use: its buffers go back."""
        for work in unit.first_work:
            work.wait()
        unit.first_work = []
        unit.asked_for = False
        if unit.gathered is not None:
            self._wait_for_last_hop(unit)
            self._drop_gathered(unit)
        elif self.session.secondary_ranks is None and unit.held is not None:
            self._network.before_current()
            self._drop_gathered(unit)

    @torch.compiler.disable  # as finish
    def release(self, unit: GatherUnit) -> None:
        """Drop the values of a unit's parameters."""
        for param in unit.params:
            if param.ds_status == ZeroParamStatus.AVAILABLE and not param.ds_active_sub_modules:
                dtype = value_dtype(param)
                if stored_weight(param) is not None:
                    check_untouched(param)
                if dtype not in self._nothing:
                    self._nothing[dtype] = torch.empty(0, dtype=dtype, device=self.device)
                # The values were made and used on the compute stream only, so no stream has to be told.
                param.__dict__.pop(GATHERED_OPERAND, None)
                param.data = self._nothing[dtype]
                param.ds_status = ZeroParamStatus.NOT_AVAILABLE
                getattr(param, STATE).lossy = False
                note_version(param)
        if unit.live:
            unit.live = False
            self.live_numel -= unit.numel
        if unit.lent and not any(GATHERED_OPERAND in p.__dict__ for p in unit.operands):
            for ring, buffer in unit.lent:
                ring.give_back(buffer)
            unit.lent = []

    # -- codes, for who keeps them and multiplies with them (generation/resident.py) -------------------------------

    def _check_not_resident(self) -> None:
        if self.resident:
            raise RuntimeError(
                "inside zeropp_fp8.generation all weights are there: gather parameters before or after it (with TRL, "
                "set ds3_gather_for_generation to False)"
            )

    def lends_shards(self, unit: GatherUnit) -> bool:
        """Whether gathering a unit takes no memory: the shards are the parameters."""
        return self._is_whole_here(unit)

    def params_in_codes(self, unit: GatherUnit) -> list[Parameter]:
        """Those of a unit's parameters whose values all come out of codes that can be kept; none with GEMM operands."""
        self._layout_of(unit)
        if self._is_whole_here(unit) or unit.operands or any(p in self.frozen_operands for p in unit.packed):
            return []
        return [param for param in unit.packed if not self._travels_exactly(param)]

    def holds_all_codes(self, unit: GatherUnit) -> bool:
        """Whether this rank has the payloads of all ranks between gathers."""
        world = self.session.topology.world_size
        return world == 1 or (self.session.secondary_ranks == 1 and world == self._reached)

    def take_codes(self, unit: GatherUnit) -> Tensor:
        """uint8 [ranks, row bytes]: the payloads of all ranks, for `decode_codes`. Collective.

        They stay as they are until the weights change: memory of their own, unless this rank has them anyway.
        """
        self.start(unit)
        self._wait_for_last_hop(unit)
        codes = unit.region(unit.gathered, 0, self.session.topology.world_size)
        if not self.holds_all_codes(unit):
            codes = codes.clone()
        self._drop_gathered(unit)
        return codes

    def decode_codes(self, unit: GatherUnit, codes: Tensor) -> dict[int, Tensor]:
        """The values of a unit's parameters, by id(parameter), from what `take_codes` returned."""
        values = unit.empty_parameters(self.device)
        unit.layout.decode(codes, self._rank_order, values)
        return {id(param): value for param, value in zip(unit.packed, values)}

    def quantized_weight(self, unit: GatherUnit, param: Parameter, codes: Tensor) -> QuantizedWeight | None:
        """What `quantized_linear` multiplies with, of a parameter in `codes`; None where it cannot."""
        from zeropp_fp8.kernels.linear.quantized_weight import can_multiply

        index = next(i for i, packed in enumerate(unit.packed) if packed is param)
        wire_format, slice_numel = unit.layout.formats[index], unit.layout.slice_numels[index]
        if not can_multiply(wire_format) or slice_numel % wire_format.block_size:
            return None
        if param.ds_shape[1] % wire_format.block_size:  # a block of codes would reach into the next row
            return None
        return self._weight_in(unit, index, codes)

    def let_hold(self, unit: GatherUnit, param: Parameter, value: Tensor) -> None:
        """Make one parameter of a unit available with a value that was decoded elsewhere."""
        param.data = value
        param.ds_status = ZeroParamStatus.AVAILABLE
        getattr(param, STATE).lossy = not (stored_weight(param) is not None or self._travels_exactly(param))
        note_version(param)
        if not unit.live:
            unit.live = True
            self.live_numel += unit.numel

    # -- gathers of parameters -----------------------------------------------------------------------------------

    def units_of(self, params: Iterable[Parameter]) -> tuple[GatherUnit, ...]:
        """The units that hold `params`, each once."""
        units = (getattr(p, STATE).unit for p in params)
        return tuple({id(unit): unit for unit in units}.values())

    def all_gather_coalesced(self, params: Iterable[Parameter], safe_mode: bool = False, quantize: bool = False):
        """Start gathering the units of `params` for computing; returns a handle with wait().

        `safe_mode` and `quantize` are DeepSpeed's; the session decides the format.
        """
        units = self.units_of(sorted(params, key=lambda p: p.ds_id))
        for unit in units:
            self.start(unit)
        return UnitsHandle(self, units)

    def gather_now(self, params: Sequence[Parameter]) -> None:
        """Gather for computing, complete on the current stream; parameters that are available stay as they are."""
        missing = [p for p in params if p.ds_status != ZeroParamStatus.AVAILABLE]
        self.all_gather_coalesced(missing).wait()

    def gather_exactly(self, params: Sequence[Parameter]) -> None:
        """Gather with every bit, complete on the current stream, for looking at weights and changing them.

        A parameter that is there in quantized form is gathered again.
        """
        self._check_not_resident()
        self.partition([p for p in params if getattr(p, STATE).lossy and not p.ds_active_sub_modules])
        missing = [p for p in params if p.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        if missing:
            self._gather_missing(missing)

    def _gather_missing(self, missing: list[Parameter]) -> None:
        """Every bit of parameters that are not there, complete on the current stream."""
        levels = self.session.topology.gather_levels()
        formats, payloads = [], []
        for param in missing:
            shard, stored = param.ds_tensor.data.to(self.session.device), stored_weight(param)
            if stored is not None:
                check_untouched(param)
            formats.append(UnquantizedFormat(shard.dtype) if stored is None else stored.wire_format)
            payloads.append(formats[-1].encode(shard) if stored is None else shard)
        payload = torch.cat(payloads)
        with self.session.ledger.counting(OUTSIDE):
            held = gather_through(payload, levels[0], self.session.ledger)
            pending = start_gather(held, *levels, payload.numel(), self.session.ledger)
        self._decode_exactly(missing, formats, pending.wait())

    def _decode_exactly(self, params: Sequence[Parameter], formats: Sequence[WireFormat], payloads: Tensor) -> None:
        """Decode uint8 [*levels, bytes] (rank order) into parameters, one by one: each may be dropped by itself."""
        world = self.session.topology.world_size
        offset = 0
        for param, wire_format in zip(params, formats):
            shard_numel = param.ds_tensor.ds_numel
            size = wire_format.payload_bytes(shard_numel)
            rows = payloads[..., offset : offset + size].reshape(world, size)
            offset += size
            flat = wire_format.decode_rows(rows, shard_numel, value_dtype(param)).view(-1)
            param.data = flat[: param.ds_numel].view(param.ds_shape)
            param.ds_status = ZeroParamStatus.AVAILABLE
            note_version(param)

    # -- partitioning --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def partition(self, params: Sequence[Parameter], has_been_updated: bool = False, free_data: bool = True) -> None:
        """Drop the values of parameters; with `has_been_updated`, what was written to them goes into the shards first.

        Collective then. Where no rank finds a bit changed in its part nothing is forgotten, so that looking at weights
        (save_16bit_model asks for them as for writing) changes nothing in training: stochastic rounding would draw
        other numbers for a new copy, and delayed scaling would start without a history.
        """
        self._check_not_resident()
        written: list[Parameter] = []
        if has_been_updated:
            self._count_update(params)
            written = self._written([p for p in params if stored_weight(p) is None])
        try:
            for param in written:
                own = self.session.placement.own_part(param, param.data)
                param.ds_tensor.data.view(-1)[: own.numel()].copy_(own)
            stored = [p for p in params if stored_weight(p) is not None]
            for param in params:
                if stored_weight(param) is None:
                    if free_data and param.ds_status == ZeroParamStatus.AVAILABLE:
                        free_param(param)  # refuses, by an exception, while a module uses the parameter
                    param.ds_status = ZeroParamStatus.NOT_AVAILABLE
                param.__dict__.pop(GATHERED_OPERAND, None)
                getattr(param, STATE).lossy = False
            if stored:  # last: it may refuse what was written; all at once: ranks agree on what that is
                written += partition_stored(stored, has_been_updated, free_data)
        finally:
            if written:  # after the write: the gather lane waits for what the current stream was given
                self.weights_changed(written)
                self._forget_amax(written)

    def _count_update(self, params: Iterable[Parameter]) -> None:
        """GatheredParameters(modifier_rank=...) broadcasts each parameter before it partitions it again."""
        with self.session.ledger.counting(OUTSIDE):
            for param in params:
                self.session.ledger.sent_around_ring(param.ds_numel * param.element_size())

    def _written(self, params: Sequence[Parameter]) -> list[Parameter]:
        """Those gathered parameters of which some rank holds other bits than its shard. Collective, one message."""
        gathered = [p for p in params if p.ds_status == ZeroParamStatus.AVAILABLE]
        if not gathered:
            return []
        differs = torch.stack([self._own_part_differs(param) for param in gathered])
        dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=self.session.topology.group)
        return [param for param, changed in zip(gathered, differs.tolist()) if changed]

    def _own_part_differs(self, param: Parameter) -> Tensor:
        """uint8 []: whether this rank's part of a gathered parameter has other bits than its shard."""
        own = self.session.placement.own_part(param, param.data)
        shard = param.ds_tensor.data.view(-1)[: own.numel()].to(own.device)
        if own.dtype != shard.dtype:
            return torch.ones((), dtype=torch.uint8, device=self.device)
        bits = _BITS[own.dtype.itemsize]
        return (own.view(bits) != shard.view(bits)).any().to(self.device, torch.uint8)

    # -- invalidation --------------------------------------------------------------------------------------------

    def weights_changed(self, params: Iterable[Parameter] | None = None) -> None:
        """Forget what was derived from `params` (None: all, frozen ones too). Call it on every rank, after the write.

        Buffers of secondary shards stay allocated: the next step fills them again.
        """
        params = None if params is None else list(params)
        for unit in self.units if params is None else self.units_of(params):
            self.cancel(unit)
            self._drop(unit)
        self.gemm_weights.changed(params)
        self.frozen_operands.changed(params)
        self._weights_ready = mark(self.device)

    def _forget_amax(self, params: Iterable[Parameter]) -> None:
        """Weights of converted layers were written from outside: what earlier steps have shown of operands is past.

        Delayed scaling would let the new ones saturate until a step has seen them, in evaluations too.
        """
        conversion = self.session.conversion
        if conversion is not None and any(id(param) in self._converted for param in params):
            conversion.scaling.load_state_dict({})

    @staticmethod
    def _drop(unit: GatherUnit) -> None:
        unit.payload = None
        unit.held_is_current = False

    # -- inspection ----------------------------------------------------------------------------------------------

    def secondary_bytes(self) -> int:
        """Bytes of secondary shards that this rank can use now."""
        if self.session.secondary_ranks is None:
            return 0
        return sum(unit.held.numel() for unit in self.units if unit.held_is_current)
