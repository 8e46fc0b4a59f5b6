"""Gathering parameters: quantized once, two-level, with the node's copy kept as received codes.

DeepSpeed puts `all_gather`, `all_gather_coalesced` and `partition` on each ZeRO-3 parameter as closures; `adopt()`
replaces them. Two kinds of gather exist:

* for computing (fetches of the coordinator, `all_gather_coalesced`, and `all_gather()` while a module runs): the
  configured wire format, a unit at a time. The shards' payload is encoded once and kept until the weights change, so
  forward, backward, every micro-batch and evaluation see the same bits, also with stochastic rounding. With hpZ what
  the first hops brought is kept (the secondary shard): later gathers use the node's own links only.
* for looking and changing (`GatheredParameters` and everything built on it): every bit, in two levels too.

Payloads and secondary shards are dropped by `weights_changed()`, which every writer of weights calls on every rank:
the optimizer step, checkpoint loads, `partition(has_been_updated=True)`. All ranks therefore agree on who holds what;
looking at a tensor's version counter instead would let them disagree (a padded shard is never written) and hang.

On a GPU the hops run on lanes (streams) of their own: encoding and the hop between nodes on one, the hop within nodes
on another, so that consecutive units use both kinds of link at the same time. Decoding runs on the compute stream just
before the values are needed: 40 microseconds for a block of 50M parameters, and its buffer never crosses streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, get_allgather_dtype
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8.comm.all_gather import gather_through, rank_of_rows, start_gather, start_regions
from zeropp_fp8.comm.lanes import BufferRing, Lane, after, mark
from zeropp_fp8.comm.ledger import OUTSIDE
from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder
from zeropp_fp8.comm.reduce_scatter import slice_numel
from zeropp_fp8.compute.linear import GATHERED_OPERAND, READ_AS_NUMBERS
from zeropp_fp8.formats import UnquantizedFormat, WireFormat
from zeropp_fp8.formats.base import align_up
from zeropp_fp8.zero.operands import GemmWeights
from zeropp_fp8.zero.session import Session
from zeropp_fp8.zero.units import GatherUnit

STATE = "zeropp_fp8_wire"


@dataclass
class ParameterWire:
    """The plugin's state of one parameter."""

    stock_all_gather: object
    stock_all_gather_coalesced: object
    stock_partition: object
    unit: GatherUnit
    owner: WeightGatherer
    lossy: bool = False  # param.data came through a quantized format


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
        self._weights_ready = None  # device event: the last write to the weights
        self._nothing: dict[torch.dtype, Tensor] = {}
        self._nan: dict[torch.dtype, Tensor] = {}
        self.gemm_weights = GemmWeights(session)  # empty until parameters are adopted
        self._converted: set[int] = set()  # id of the weights of layers that compute in low precision
        rows = self._rank_order.slices
        self._rows_in_rank_order = torch.tensor(sorted(range(len(rows)), key=rows.__getitem__), device=self.device)

    # -- adoption ------------------------------------------------------------------------------------------------

    def adopt(self, units: Sequence[GatherUnit]) -> None:
        """Put this gatherer's closures on the ZeRO-3 parameters of `units`."""
        self.units = list(units)
        self.gemm_weights.adopt(param for unit in units for param in unit.params)
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
            if state.lossy:
                param.partition()
            param.all_gather = state.stock_all_gather
            param.all_gather_coalesced = state.stock_all_gather_coalesced
            param.partition = state.stock_partition
            delattr(param, STATE)
        self.adopted.clear()
        self.units = []

    def _all_gather_closure(self, param: Parameter):
        def all_gather(param_list=None, async_op=False, hierarchy=0):
            if param_list is None and self.module_depth > 0:
                return self.gather_now([param])
            return self.gather_exactly([param] if param_list is None else list(param_list), async_op, hierarchy)

        return all_gather

    def _partition_closure(self, param: Parameter):
        def partition(param_list=None, hierarchy=0, has_been_updated=False, free_data=True):
            params = [param] if param_list is None else list(param_list)
            if has_been_updated:
                self._count_update(params)
            for p in params:
                state = getattr(p, STATE)
                written = has_been_updated and self._keep_own_part(p)
                updated = has_been_updated and not written
                state.stock_partition([p], hierarchy=hierarchy, has_been_updated=updated, free_data=free_data)
                # Afterwards: DeepSpeed refuses, by an exception, while a module uses the parameter.
                p.__dict__.pop(GATHERED_OPERAND, None)
                state.lossy = False
            if has_been_updated:  # after the write: the gather lane waits for what the current stream has been given
                self.weights_changed(params)
                self._forget_amax(params)

        return partition

    def _keep_own_part(self, param: Parameter) -> bool:
        """Write this rank's part of an updated parameter to its shard; False: DeepSpeed does, which knows slices."""
        return False

    # -- formats -------------------------------------------------------------------------------------------------

    def format_of(self, param: Parameter) -> WireFormat:
        """The wire format of a parameter: matrices as configured, vectors and scalars in their own 16 or 32 bits."""
        if len(param.ds_shape) >= 2:
            chosen = self.session.weight_format if param.requires_grad else self.session.frozen_format
            if chosen is not None:
                return chosen
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

    def bytes_of(self, param: Parameter) -> int:
        """Bytes that each rank sends of a parameter."""
        if self.travels_as_operand(param):
            return align_up(self.gemm_weights.slice_bytes(param))
        return self.format_of(param).payload_bytes(param.ds_tensor.ds_numel)

    def _layout_of(self, unit: GatherUnit) -> PayloadLayout:
        """The unit's payload layout, made again when its parameters were frozen, unfrozen or cast."""
        signature = tuple((p.requires_grad, p.ds_tensor.dtype, p.ds_tensor.ds_numel) for p in unit.params)
        if unit.layout is None or unit.signature != signature:
            operands = {p: self.gemm_weights.slice_bytes(p) for p in unit.params if self.travels_as_operand(p)}
            packed = [p for p in unit.params if p not in operands]
            layout = PayloadLayout(
                [p.ds_tensor.ds_numel for p in packed],
                [self.format_of(p) for p in packed],
                [p.ds_tensor.dtype for p in packed],
                self.device,
            )
            unit.lay_out(layout, packed, operands, signature)
            unit.payload = None  # it was made for the old one
        return unit.layout

    # -- a unit's gather -----------------------------------------------------------------------------------------

    def start_first_hops(self, unit: GatherUnit) -> None:
        """Encode this rank's shards and start the hops up to the secondary shard, unless its result is there."""
        if unit.held_is_current:
            return
        before, _ = self.session.gather_levels
        self._layout_of(unit)
        reached, own_row = self._reached, self._own_row
        num_bytes = reached * unit.rank_bytes
        with self._network:
            after(self._weights_ready)
            if unit.operands:
                self.gemm_weights.refresh_scales()
            if self.session.secondary_ranks is None:
                unit.held = self._held_ring.take(num_bytes)
            elif unit.held is None or unit.held.numel() != num_bytes:
                unit.held = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
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

    def _encode_shards(self, unit: GatherUnit, own: list[Tensor]) -> None:
        """Encode into uint8 [1, size] of each region; without a secondary shard the bytes are kept for the next gather.

        Those of the payload only: scales of weights that travel as operands are kept anyway.
        """
        for param, out in zip(unit.operands, own[1:]):
            self.gemm_weights.encode(param, out.view(-1))
        row = own[0]
        if unit.payload is not None:
            row.copy_(unit.payload)
            return
        shards = [p.ds_tensor.data.to(self.device, non_blocking=True).view(-1) for p in unit.packed]
        layout = unit.layout
        layout.encode(shards, self._first_order, row, layout.draw_seed(self.session.generators["weights"]))
        # A secondary shard holds it anyway, and nearest rounding gives the same bytes again.
        if self.session.secondary_ranks is None and (layout.needs_seed or self.device.type == "cpu"):
            quantized = self.session.weight_format is not None or self.session.frozen_format is not None
            unit.payload = row.clone() if quantized else None

    def start(self, unit: GatherUnit, ahead: bool = False) -> None:
        """Start gathering a unit's parameters for computing; no-op when that is under way.

        `ahead`: the values are not needed yet. On a CPU the last hop is then left to `finish` unless it can start at
        once, because waiting for the first hops would block.
        """
        if unit.gathered is not None:
            return
        unit.asked_for = True
        self.start_first_hops(unit)
        if not (ahead and unit.first_work and self.device.type == "cpu"):
            self._start_last_hop(unit)

    def _start_last_hop(self, unit: GatherUnit) -> None:
        _, (last,) = self.session.gather_levels
        with self._node:
            self._node_after_first_hops(unit)
            if last.size == 1:
                unit.gathered = unit.held
                return
            unit.gathered = self._gathered_ring.take(unit.held.numel() * last.size)
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
        self.start(unit)
        world = self.session.topology.world_size
        self.session.ledger.stock_would_send(sum(slice_numel(p.ds_numel, world) for p in missing) * world)
        if unit.last_work:
            for work in unit.last_work:
                work.wait()
        else:
            self._node.before_current()
        values, operands, lent = self._decode(unit)
        for param, value, exact in values:
            if param.ds_status != ZeroParamStatus.AVAILABLE:
                param.data = value
                param.ds_status = ZeroParamStatus.AVAILABLE
                getattr(param, STATE).lossy = not exact
        for param, codes in operands:
            if param.ds_status != ZeroParamStatus.AVAILABLE:
                operand = self.gemm_weights.operand(param, codes)
                setattr(param, GATHERED_OPERAND, operand)
                dtype = param.ds_tensor.dtype
                if getattr(param, READ_AS_NUMBERS, False):
                    param.data = operand.dequantize(dtype)
                else:
                    # Whoever reads the values in a way that linear.py does not notice shall see it.
                    param.data = self._not_a_number(dtype).expand(param.ds_shape)
                param.ds_status = ZeroParamStatus.AVAILABLE
                getattr(param, STATE).lossy = True
        self._drop_gathered(unit, lent)
        if not unit.live:
            unit.live = True
            self.live_numel += unit.numel

    def _decode(
        self, unit: GatherUnit
    ) -> tuple[list[tuple[Parameter, Tensor, bool]], list[tuple[Parameter, Tensor]], bool]:
        """What the last hop brought: (parameter, its values, whether they are exact) of those that are decoded,
        (parameter, uint8 codes) of operands, and whether operands lie in the buffer itself."""
        world = self.session.topology.world_size
        values = unit.empty_parameters(self.device)
        unit.layout.decode(unit.region(unit.gathered, 0, world), self._rank_order, values)
        exact = (isinstance(wire_format, UnquantizedFormat) for wire_format in unit.layout.formats)
        operands = []
        for index, param in enumerate(unit.operands, start=1):
            codes = unit.region(unit.gathered, index, world)
            if not self.in_rank_order:
                codes = codes[self._rows_in_rank_order]  # the copy that sorts slices
            operands.append((param, codes.view(-1)))
        return list(zip(unit.packed, values, exact)), operands, bool(operands) and self.in_rank_order

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
            done.append((self._held_ring, unit.held, lent and unit.gathered is unit.held))
            unit.held = None
            unit.held_is_current = False
        unit.gathered = None
        unit.last_work = []
        unit.asked_for = False
        for ring, buffer, in_use in done:
            if in_use:
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
            for work in unit.last_work:
                work.wait()
            self._drop_gathered(unit)
        elif self.session.secondary_ranks is None and unit.held is not None:
            self._network.before_current()
            self._drop_gathered(unit)

    @torch.compiler.disable  # as finish
    def release(self, unit: GatherUnit) -> None:
        """Drop the values of a unit's parameters."""
        for param in unit.params:
            if param.ds_status == ZeroParamStatus.AVAILABLE and not param.ds_active_sub_modules:
                dtype = param.ds_tensor.dtype
                if dtype not in self._nothing:
                    self._nothing[dtype] = torch.empty(0, dtype=dtype, device=self.device)
                # The values were made and used on the compute stream only, so no stream has to be told.
                param.__dict__.pop(GATHERED_OPERAND, None)
                param.data = self._nothing[dtype]
                param.ds_status = ZeroParamStatus.NOT_AVAILABLE
                getattr(param, STATE).lossy = False
        if unit.live:
            unit.live = False
            self.live_numel -= unit.numel
        if unit.lent and not any(GATHERED_OPERAND in p.__dict__ for p in unit.operands):
            for ring, buffer in unit.lent:
                ring.give_back(buffer)
            unit.lent = []

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

    def gather_exactly(self, params: list[Parameter], async_op: bool = False, hierarchy: int = 0):
        """Gather with every bit, complete on the current stream, for looking at weights and changing them.

        A parameter that is there in quantized form is gathered again. `async_op` is left to DeepSpeed's own gather.
        """
        for param in params:
            if getattr(param, STATE).lossy and not param.ds_active_sub_modules:
                param.partition()
        if async_op:
            return getattr(params[0], STATE).stock_all_gather(params, async_op=True, hierarchy=hierarchy)
        missing = [p for p in params if p.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        if missing:
            self._gather_missing(missing)
        return None

    def _gather_missing(self, missing: list[Parameter]) -> None:
        """Every bit of parameters that are not there, complete on the current stream."""
        levels = self.session.topology.gather_levels()
        formats = [UnquantizedFormat(p.ds_tensor.dtype) for p in missing]
        shards = [p.ds_tensor.data.to(self.session.device) for p in missing]
        payload = torch.cat([f.encode(shard) for f, shard in zip(formats, shards)])
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
            flat = wire_format.decode_rows(rows, shard_numel, param.ds_tensor.dtype).view(-1)
            param.data = flat[: param.ds_numel].view(param.ds_shape)
            param.ds_status = ZeroParamStatus.AVAILABLE

    def _count_update(self, params: list[Parameter]) -> None:
        """GatheredParameters(modifier_rank=...) broadcasts each parameter before it partitions it again."""
        with self.session.ledger.counting(OUTSIDE):
            for param in params:
                self.session.ledger.sent_around_ring(param.ds_numel * param.element_size())

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
