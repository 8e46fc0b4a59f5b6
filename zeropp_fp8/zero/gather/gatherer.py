"""Gathering parameters: quantized once, two-level, with the node's copy kept as received codes.

Two kinds of gather exist:

* for computing (fetches of the coordinator, `all_gather_coalesced`, and `all_gather()` while a module runs): the
  configured wire format, a unit at a time. The shards' payload is encoded once and kept until the weights change, so
  forward, backward, every micro-batch and evaluation see the same bits. With hpZ what
  the first hops brought is kept (the secondary shard): later gathers use the node's own links only. One node needs no
  such copy.
* for looking and changing (`GatheredParameters` and everything built on it): every bit, in two levels too.

Payloads and secondary shards are dropped by `weights_changed()`, which every writer of weights calls on every rank:
the optimizer step, checkpoint loads, `partition(has_been_updated=True)`. All ranks therefore agree on who holds what;
looking at a tensor's version counter instead would let them disagree (a padded shard is never written) and hang.

On a GPU the hops run on lanes (streams) of their own: encoding and the hop between nodes on one, the hop within nodes
on another, so that consecutive units use both kinds of link at the same time. Decoding runs on the compute stream just
before the values are needed: 40 microseconds for a block of 50M parameters, and its buffer never crosses streams.

Where nodes exchange differences (difference.py), a third lane adds what has come to what is held. The lanes are far
ahead of what is computed, so whoever uses what one unit has brought waits for that unit, never for a lane.

What arrives lies in rings of buffers, which grow to the largest unit that they have seen. Units much larger than the
others get buffers out of the compute stream's memory, for one gather each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8.comm.lanes import BufferRing, Lane, after, buffer_for, mark, used_last
from zeropp_fp8.comm.ledger import OUTSIDE
from zeropp_fp8.comm.reduce_scatter import slice_numel
from zeropp_fp8.compute.products import GATHERED_OPERAND, READ_AS_NUMBERS
from zeropp_fp8.formats import WireFormat
from zeropp_fp8.zero.gather.adopted import STATE, by_engine
from zeropp_fp8.zero.gather.adoption import Adoption
from zeropp_fp8.zero.gather.gemm_weights import GemmWeights
from zeropp_fp8.zero.gather.kinds import Kind, by_kind
from zeropp_fp8.zero.gather.route import Route
from zeropp_fp8.zero.gather.secondary import keep_in_other_formats
from zeropp_fp8.zero.gather.units import Flight, Unit

# Units whose differences are on their way at a time: one is sent, one is added, one waits.
_MOST_COMING = 3


def outsized_units(units: Sequence[Unit], bytes_of: Callable[[Parameter], float]) -> set[Unit]:
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

    def __init__(self, gatherer: Gatherer, units: Sequence[Unit]) -> None:
        self._gatherer = gatherer
        self._units = units

    def wait(self, handle_dependency: bool = True) -> None:
        """`handle_dependency` is DeepSpeed's; buffers are always protected here."""
        for unit in self._units:
            self._gatherer.finish(unit)


class Gatherer(Adoption):
    """Gathers the parameters of one engine.

    Attributes:
        live_numel, in_flight_numel: elements of units whose parameters hold their values now, or get them.
        resident: weights stay, for generation: nobody else gathers or drops them.
    """

    def __init__(self, route: Route, kinds: Sequence[Kind]) -> None:
        super().__init__(route, kinds)
        self.live_numel = self.in_flight_numel = 0
        self.resident = False
        self._network = Lane(self.device)
        self._node = Lane(self.device)
        self._adding = Lane(self.device)
        # Without a secondary shard the first hops' results are as short-lived as the last hop's.
        self._held_ring = BufferRing(self.device, 3)
        self._gathered_ring = BufferRing(self.device, 2)
        self._brought_ring = BufferRing(self.device, _MOST_COMING)
        self._coming: deque[Unit] = deque()  # whose differences are not yet added
        self._outsized: set[Unit] = set()  # units whose buffers do not come from the rings
        self._weights_ready = None  # device event: the last write to the weights
        self._padded_numel: dict[int, int] = {}  # by ds_id: elements that stock would gather
        self._nothing: dict[torch.dtype, Tensor] = {}
        self._nan: dict[torch.dtype, Tensor] = {}

    def adopt(self, units: Sequence[Unit]) -> None:
        super().adopt(units)
        world = self.route.world_size
        self._padded_numel = {
            ds_id: slice_numel(param.ds_numel, world) * world for ds_id, param in self.adopted.items()
        }
        self._outsized = outsized_units(self.units, self.bytes_of)

    def _forget_buffers(self) -> None:
        for ring in (self._held_ring, self._gathered_ring, self._brought_ring):
            ring.clear()

    # -- what is said of parameters ----------------------------------------------------------------------------------

    def format_of(self, param: Parameter) -> WireFormat:
        """The wire format of a parameter."""
        return self.unit_of(param).format_of(param)

    def bytes_of(self, param: Parameter) -> float:
        """Bytes that each rank sends of a parameter, on average."""
        return self.unit_of(param).bytes_of(param)

    @property
    def gemm_weights(self) -> GemmWeights:
        """Weights that travel as the operands of products."""
        return self.route.gemm_weights

    def secondary_bytes(self) -> int:
        """Bytes of secondary shards that this rank can use now."""
        return sum(unit.secondary.numel() for unit in self.units if unit.secondary_is_current)

    # -- what checkpoints hold of secondary shards -----------------------------------------------------------------

    def held_states(self, names: Mapping[Parameter, str]) -> dict[tuple[str, ...], dict]:
        """What each unit holds of this rank's weights, by the names of its parameters."""
        self._settle()
        states = {tuple(names.get(p, "") for p in unit.params): unit.held_state() for unit in self._all_units}
        return {key: state for key, state in states.items() if state}

    def _settle(self) -> None:
        for unit in list(self._coming):
            self._add_differences(unit)
        for lane in (self._network, self._adding):
            lane.before_current()

    def hold_again(self, states: Mapping[tuple[str, ...], dict], names: Mapping[Parameter, str]) -> None:
        """Let units hold what they held when `held_states` was called. Collective; weights are there already."""
        for unit in self.units:
            state = states.get(tuple(names.get(p, "") for p in unit.params), {})
            unit.continue_from(state)
            unit.lay_out()
            if unit.keeps_secondary and unit.can_hold(state):
                self._hold_again(unit, state)

    def _hold_again(self, unit: Unit, state: dict) -> None:
        unit.secondary = self._held_buffer(unit, Flight())
        with self.session.ledger.counting(OUTSIDE), self._network:
            after(self._weights_ready)
            unit.wait_for(unit.hold_again(state, unit.secondary))
            self._node.after_current()
        self._network.before_current()
        unit.secondary_is_current = state["current"]

    # -- a unit's gather -----------------------------------------------------------------------------------------

    def start_first_hops(self, unit: Unit) -> None:
        """Encode this rank's shards and start the hops up to the secondary shard, unless its result is there."""
        if unit.flight is not None or unit.secondary_is_current or unit.shards_are_values:
            return
        unit.lay_out()
        if unit.aside:
            self._hold_again(unit, unit.aside)
            if unit.secondary_is_current:
                return
        if unit.prepare():
            self._weights_ready = mark(self.device)
        flight, at_rest = Flight(), unit.at_rest()
        flight.held = self._held_buffer(unit, flight) if at_rest is None else at_rest
        bill = unit.copy_bill if unit.keeps_secondary else flight.bill
        with self._network, self.session.ledger.billed(bill):
            after(self._weights_ready)
            differs = unit.brings_differences
            if differs:
                flight.brought = self._brought_ring.take(unit.brought_bytes)
                flight.first_work = unit.send_differences(flight.held, flight.brought)
            elif at_rest is None:
                flight.first_work = unit.first_hops(flight.held)
            if not flight.first_work:
                flight.filled = mark(self.device)
        unit.flight = flight
        if unit.keeps_secondary:
            unit.secondary, unit.secondary_is_current = flight.held, True
        if differs:
            self._coming.append(unit)
            while len(self._coming) >= _MOST_COMING:
                self._add_differences(self._coming[0])

    def _add_differences(self, unit: Unit) -> None:
        """Add what the first hops of a unit bring to what is held, when it is there; on a CPU the host waits for it."""
        flight = unit.flight
        self._coming.remove(unit)
        with self._adding:
            unit.wait_for(flight.first_work)
            unit.add_differences(flight.brought, flight.held)
            self._brought_ring.give_back(flight.brought)
            flight.filled = mark(self.device)
            if not self._coming:  # the last of this forward, whose backward and step the copy has time for
                self.route.fits.bring_to_host()
        flight.first_work, flight.brought = [], None

    def _held_buffer(self, unit: Unit, flight: Flight) -> Tensor:
        """For the first hops' result: the secondary shard's, or one for this gather."""
        if not unit.keeps_secondary:
            return self._take(unit, flight, self._network, self._held_ring, unit.held_bytes)
        if unit.secondary is not None and unit.secondary.numel() == unit.held_bytes:
            return unit.secondary
        with self._network:
            return torch.empty(unit.held_bytes, dtype=torch.uint8, device=self.device)

    def _take(self, unit: Unit, flight: Flight, lane: Lane, ring: BufferRing, num_bytes: int) -> Tensor:
        """A buffer for one gather, which `lane` fills. To be called on the stream that decodes."""
        if unit in self._outsized:
            buffer = buffer_for(lane, num_bytes, self.device)
            flight.taken.append((None, buffer))
            return buffer
        with lane:
            buffer = ring.take(num_bytes)
        flight.taken.append((ring, buffer))
        return buffer

    def start(self, unit: Unit, ahead: bool = False) -> None:
        """Start gathering a unit's parameters for computing; no-op when that is under way.

        `ahead`: the values are not needed yet. On a CPU the last hop is then left to `finish` unless it can start at
        once, because waiting for the first hops would block.
        """
        if unit.shards_are_values or (unit.flight is not None and unit.flight.gathered is not None):
            return
        self.start_first_hops(unit)
        if unit.flight is None:
            unit.flight = Flight(unit.secondary)
        if not unit.flight.asked_for:
            unit.flight.asked_for = True
            self.in_flight_numel += unit.numel
        if not (ahead and unit.flight.first_work and self.device.type == "cpu"):
            self._start_last_hop(unit, unit.flight)

    def _start_last_hop(self, unit: Unit, flight: Flight) -> None:
        if flight.brought is not None:
            self._add_differences(unit)
        if self.route.last.size == 1:
            flight.gathered = flight.held
            return
        flight.gathered = self._take(unit, flight, self._node, self._gathered_ring, unit.gathered_bytes)
        with self._node, self.session.ledger.billed(flight.bill):
            self._wait_for_first_hops(unit)
            flight.last_work = unit.last_hop(flight.held, flight.gathered)

    def pay(self, unit: Unit) -> None:
        """A unit is used: what it has sent outside of steps counts for the step, if it is one that uses it."""
        for bill in (unit.copy_bill, unit.bill):
            self.session.ledger.pay(bill)

    def finish(self, unit: Unit) -> None:
        """Make the parameters of a unit available on the current stream; those that are stay as they are."""
        ledger = self.session.ledger
        if unit.is_billed:
            self.pay(unit)
        missing = unit.missing
        if not missing:
            return
        unit.check_usable(missing)
        if unit.shards_are_values:
            self._lend_shards(unit, missing)
            return
        self.start(unit)
        ledger.pay(unit.flight.bill)
        with ledger.billed(unit.flight.bill):
            ledger.stock_would_send(sum([self._padded_numel[p.ds_id] for p in missing]))
        unit.bill.update(unit.flight.bill)
        self._wait_for_last_hop(unit)
        values, operands, lent = unit.decode(unit.flight.gathered)
        for param, value, exact in values:
            if param.ds_status != ZeroParamStatus.AVAILABLE:
                _let_hold(param, value, lossy=not exact)
        for param, operand in operands:
            if param.ds_status != ZeroParamStatus.AVAILABLE:
                setattr(param, GATHERED_OPERAND, operand)
                dtype = unit.dtype_of(param)
                if getattr(param, READ_AS_NUMBERS, False):
                    value = operand.dequantize(dtype)
                else:
                    # Whoever reads the values in a way that compute/linear.py does not notice shall see it.
                    value = self._not_a_number(dtype).expand(param.ds_shape)
                _let_hold(param, value, lossy=True)
        unit.note(missing)
        self._end(unit, lent)
        self._is_live(unit)

    def _is_live(self, unit: Unit) -> None:
        if not unit.live:
            unit.live = True
            self.live_numel += unit.numel

    def _is_not_live(self, unit: Unit) -> None:
        unit.bill.clear()
        if unit.live:
            unit.live = False
            self.live_numel -= unit.numel

    @staticmethod
    def _wait_for_first_hops(unit: Unit) -> None:
        """The current stream (on a CPU: the host) waits for what fills `held`, and for no more.

        The network's lane is far ahead: a forward starts the first hops of all units at once. Were the lane waited for,
        the first unit would wait for the last one.
        """
        after(unit.flight.filled)
        unit.wait_for(unit.flight.first_work)

    def _wait_for_last_hop(self, unit: Unit) -> None:
        """The current stream (on a CPU: the host) waits until all has arrived."""
        if unit.flight.last_work:
            unit.wait_for(unit.flight.last_work)
        else:
            self._wait_for_first_hops(unit)

    def _lend_shards(self, unit: Unit, missing: list[Parameter]) -> None:
        """Let parameters be their shards while modules use them: a copy of an embedding would be a gigabyte.

        GatheredParameters makes a copy all the same: what is written there without `modifier_rank` is to be dropped.
        """
        for param in missing:
            _let_hold(param, param.ds_tensor.data[: param.ds_numel].view(param.ds_shape), lossy=True)
        unit.note(missing)
        self._is_live(unit)

    def _not_a_number(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._nan:
            self._nan[dtype] = torch.full((1,), torch.nan, dtype=dtype, device=self.device)
        return self._nan[dtype]

    def _end(self, unit: Unit, lent: bool = False) -> None:
        """The current stream has been given the last use of what a gather has brought.

        `lent`: operands lie in it; it goes back when the unit is released.
        """
        flight, unit.flight = unit.flight, None
        if flight.asked_for:
            self.in_flight_numel -= unit.numel
        for ring, buffer in flight.taken:
            if ring is None:
                used_last(buffer)  # operands in it keep it until the release, as tensors do
            elif lent and buffer is flight.gathered:
                unit.lent.append((ring, buffer))
            else:
                ring.give_back(buffer)

    def cancel(self, unit: Unit) -> None:
        """End a gather that nothing will use: its buffers go back."""
        flight = unit.flight
        if flight is None:
            return
        if flight.brought is not None:
            self._add_differences(unit)
        if flight.gathered is None:
            with self._node:  # where the next use of what is held may begin
                self._wait_for_first_hops(unit)
        self._wait_for_last_hop(unit)
        self._end(unit)

    def release(self, unit: Unit) -> None:
        """Drop the values of a unit's parameters, but for those that modules use or somebody looks at."""
        there = [
            p
            for p in unit.params
            if p.ds_status == ZeroParamStatus.AVAILABLE and not (p.ds_active_sub_modules or p.ds_id in unit.looked_at)
        ]
        unit.check_untouched(there)
        for param in there:
            dtype = unit.dtype_of(param)
            if dtype not in self._nothing:
                self._nothing[dtype] = torch.empty(0, dtype=dtype, device=self.device)
            # The values were made and used on the compute stream only, so no stream has to be told.
            param.data = self._nothing[dtype]
            param.ds_status = ZeroParamStatus.NOT_AVAILABLE
            state = param.__dict__
            state[STATE].lossy = False
            if GATHERED_OPERAND in state:
                del state[GATHERED_OPERAND]
        unit.note(there)
        self._is_not_live(unit)
        if unit.lent and not any(GATHERED_OPERAND in p.__dict__ for p in unit.params):
            for ring, buffer in unit.lent:
                ring.give_back(buffer)
            unit.lent = []

    # -- codes, for who keeps them and multiplies with them (generation/) ------------------------------------------

    def _check_not_resident(self) -> None:
        if self.resident:
            raise RuntimeError(
                "inside zeropp_fp8.generation all weights are there: gather parameters before or after it (with TRL, "
                "set ds3_gather_for_generation to False)"
            )

    def holds_codes(self, unit: Unit) -> bool:
        """Whether this rank has the payloads of all ranks between gathers."""
        world = self.route.world_size
        return world == 1 or (unit.keeps_secondary and world == self.route.reached)

    def take_codes(self, unit: Unit) -> Tensor:
        """uint8 [ranks, row bytes]: the payloads of all ranks, for `unit.decode_codes`. Collective.

        They stay as they are until the weights change: memory of their own, unless this rank has them anyway.
        """
        self.start(unit)
        self._wait_for_last_hop(unit)
        codes = unit.codes_in(unit.flight.gathered)
        if not self.holds_codes(unit):
            codes = codes.clone()
        self._end(unit)
        return codes

    def let_hold(self, unit: Unit, param: Parameter, value: Tensor) -> None:
        """Make one parameter of a unit available with a value that was decoded elsewhere."""
        _let_hold(param, value, lossy=not unit.is_exact(param))
        unit.note([param])
        self._is_live(unit)

    # -- gathers of parameters -----------------------------------------------------------------------------------

    def all_gather_coalesced(self, params: Iterable[Parameter], safe_mode: bool = False, quantize: bool = False):
        """Start gathering the units of `params` for computing; returns a handle with wait().

        `safe_mode` and `quantize` are DeepSpeed's; the session decides the format.
        """
        missing = [p for p in params if p.ds_status != ZeroParamStatus.AVAILABLE]
        units = self.units_of(sorted(missing, key=lambda p: p.ds_id))
        for unit in units:
            self.start(unit)
        return UnitsHandle(self, units)

    def gather_now(self, params: Sequence[Parameter]) -> None:
        """Gather for computing, complete on the current stream; parameters that are available stay as they are."""
        for engine, missing in by_engine(p for p in params if p.ds_status != ZeroParamStatus.AVAILABLE):
            engine.all_gather_coalesced(missing).wait()

    def gather_exactly(self, params: Sequence[Parameter]) -> None:
        """Gather with every bit, complete on the current stream, for looking at weights and changing them.

        A parameter that is there in quantized form is gathered again.
        """
        self._check_not_resident()
        self.partition([p for p in params if getattr(p, STATE).lossy and not p.ds_active_sub_modules])
        for kind, missing in by_kind(p for p in params if p.ds_status == ZeroParamStatus.NOT_AVAILABLE):
            kind.gather_exactly(missing)
        for param in params:
            self.unit_of(param).looked_at.add(param.ds_id)

    @torch.no_grad()
    def partition(self, params: Sequence[Parameter], has_been_updated: bool = False, free_data: bool = True) -> None:
        """Drop the values of parameters; with `has_been_updated`, what was written to them goes into the shards first.

        Collective then. Where no rank finds a bit changed in its part nothing is forgotten, so that looking at weights
        (save_16bit_model asks for them as for writing) changes nothing in training: delayed scaling would start without
        a history.
        """
        self._check_not_resident()
        if has_been_updated:
            self._count_update(params)
        written: list[Parameter] = []
        try:
            for kind, mine in by_kind(params):
                kind.take_back(mine, has_been_updated, free_data, written)
        finally:
            for unit in self.units_of(params):
                self._is_not_live(unit)
            for param in params:
                self.unit_of(param).looked_at.discard(param.ds_id)
            if written:  # after the write: the gather lane waits for what the current stream was given
                self.weights_changed(written)
                for unit in (unit for param in written for unit in self.units_with(param)):
                    unit.expect_large_step()  # which brings back what master weights say
                self._forget_amax()

    def _count_update(self, params: Iterable[Parameter]) -> None:
        """GatheredParameters(modifier_rank=...) broadcasts each parameter before it partitions it again."""
        with self.session.ledger.counting(OUTSIDE):
            for param in params:
                self.session.ledger.sent_around_ring(param.ds_numel * param.element_size())

    # -- invalidation --------------------------------------------------------------------------------------------

    def weights_changed(self, params: Iterable[Parameter] | None = None, by_step: bool = False) -> None:
        """Forget what was derived from `params` (None: all, frozen ones too). Call it on every rank, after the write.

        `by_step` of the optimizer: then differences to what is held are small.

        Buffers of secondary shards stay allocated: the next step fills them again.
        """
        params = None if params is None else list(params)
        elsewhere = self.elsewhere()
        if elsewhere:
            for engine, theirs in elsewhere if params is None else by_engine(params):
                if engine not in (None, self):  # it holds copies
                    engine.weights_changed(theirs, by_step)
            params = params and [p for p in params if self.has(p)]
        units = self.units if params is None else self.units_of(params)
        for unit in units:
            self.cancel(unit)
            unit.changed(by_step)
        for unit in self._earlier_units(units):
            unit.changed()
        self._are_ready(params)

    def _are_ready(self, params: Iterable[Parameter] | None) -> None:
        for kind in self.kinds:
            kind.changed(params)
        self._weights_ready = mark(self.device)

    def formats_changed(self) -> None:
        """Weights travel in other formats from now on. Between steps, on every rank; collective."""
        for unit in self._all_units:
            self.cancel(unit)
            unit.forget_layout()
        for kind in self.kinds:
            kind.formats_changed()
        self.weights_changed()
        keep_in_other_formats(self.units, self.session)

    def _forget_amax(self) -> None:
        """Weights were written from outside: what earlier steps have shown of operands is past.

        Delayed scaling would let the new ones saturate until a step has seen them, in evaluations too; and not only
        those of the layer that was written: what others get, forward and backward, has changed with it.
        """
        if self.session.conversion is not None:
            self.session.conversion.scaling.load_state_dict({})


def _let_hold(param: Parameter, value: Tensor, lossy: bool) -> None:
    """Let a parameter have a value; `lossy`: not every bit of what rests."""
    param.data = value
    param.ds_status = ZeroParamStatus.AVAILABLE
    param.__dict__[STATE].lossy = lossy
