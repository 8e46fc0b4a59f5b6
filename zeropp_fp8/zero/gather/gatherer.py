"""Gathers parameters: quantized once, in two levels, with the node's copy kept as received codes.

* For computing: in the configured wire format, one unit at a time. The shards' payload is encoded once and kept until
  the weights change, so all passes see the same bits. With hpZ the result of the first hops is kept (the secondary
  shard), and later gathers use the node's own links only. One node needs no such copy.
* For reading and writing (`GatheredParameters` and all that is built on it): with every bit, in two levels too.

Payloads and secondary shards are dropped by `weights_changed()`, which every writer of weights calls on every rank: by
version counters ranks could disagree (a padded shard is never written) and hang.

hops.py decides what is sent when. Decoding runs on the compute stream just before the values are needed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm.ledger import OUTSIDE
from zeropp_fp8.comm.reduce_scatter import slice_numel
from zeropp_fp8.zero.gather.attached import (
    Owner,
    ParameterWire,
    by_engine,
    by_storage,
    gather_by_engine,
    partition_by_engine,
    unit_of,
    units_of,
)
from zeropp_fp8.zero.gather.hops import Hops
from zeropp_fp8.zero.gather.ownership import Ownership
from zeropp_fp8.zero.gather.route import Route
from zeropp_fp8.zero.gather.secondary import SecondaryShards
from zeropp_fp8.zero.gather.storage import Storage
from zeropp_fp8.zero.gather.units import Unit


class UnitsHandle:
    """Units whose gather is pending; `wait` makes their parameters available."""

    def __init__(self, gatherer: Gatherer, units: Sequence[Unit]) -> None:
        self._gatherer = gatherer
        self._units = units

    def wait(self, handle_dependency: bool = True) -> None:
        """Finish the gathers. `handle_dependency` is DeepSpeed's; buffers are always protected here."""
        for unit in self._units:
            self._gatherer.finish(unit)


class Gatherer(Owner):
    """Gathers the parameters of one engine.

    Attributes:
        ownership: the engine's parameters.
        module_depth: > 0 while a module of the model runs.
        hops: pending gathers.
        secondary: chooses the units that the ranks of a node keep.
        live_numel: elements of units whose parameters hold their values now.
        resident: weights stay for generation, and only generation gathers or drops them.
    """

    def __init__(self, route: Route, storages: Sequence[Storage]) -> None:
        self.route, self.session, self.device = route, route.session, route.device
        self.ownership = Ownership(self, storages)
        self.module_depth = 0
        self.hops = Hops(route, lambda: self.units)
        self.secondary = SecondaryShards(route.session)
        self.live_numel = 0
        self.resident = False
        self._sent_early: set[int] = set()  # by sharded.key: what is sent already while a step writes the others
        self._padded_numel: dict[int, int] = {}  # by sharded.key: elements that stock would gather
        device = route.device
        self._nothing = functools.cache(lambda dtype: torch.empty(0, dtype=dtype, device=device))
        self._not_a_number = functools.cache(lambda dtype: torch.full((1,), torch.nan, dtype=dtype, device=device))

    @property
    def units(self) -> list[Unit]:
        """The units that this engine gathers: no later engine has any of their parameters."""
        return self.ownership.units

    # -- attaching and detaching (ownership.py) ----------------------------------------------------------------------

    def attach(self, units: Sequence[Unit]) -> None:
        """Gather the parameters of units from now on. Collective."""
        self.ownership.attach(units)
        worlds = {key: unit_of(param).route.world_size for key, param in self.ownership.params.items()}
        params = self.ownership.params
        self._padded_numel = {key: slice_numel(sharded.numel(params[key]), n) * n for key, n in worlds.items()}

    def detach(self) -> None:
        """Detach parameters, and free buffers. Collective if whole tensors have owners."""
        self.ownership.detach()
        self.hops.free()

    def suspend(self, params: Sequence[Parameter]) -> None:
        self.ownership.suspend(params)

    def resume(self, states: Mapping[Parameter, ParameterWire], placed: bool) -> None:
        self.ownership.resume(states, placed)

    def closures_of(self, param: Parameter) -> dict[str, Callable]:
        def all_gather(param_list=None, async_op=False, hierarchy=0):
            if param_list is None and self.module_depth > 0:
                self._check_not_resident()
                return self.gather_now([param])
            gather_by_engine([param] if param_list is None else param_list)
            return [] if async_op else None  # no handles: the gather is complete

        def partition(param_list=None, hierarchy=0, has_been_updated=False, free_data=True):
            partition_by_engine([param] if param_list is None else param_list, has_been_updated, free_data)

        return {"all_gather": all_gather, "all_gather_coalesced": self.all_gather_coalesced, "partition": partition}

    def drop(self, units: Iterable[Unit]) -> None:
        for unit in units:
            self.release(unit)
            self.hops.cancel(unit)
        self.hops.settle()

    # -- values ------------------------------------------------------------------------------------------------------

    def finish(self, unit: Unit) -> None:
        """Make the parameters of a unit available on the current stream; available ones stay as they are."""
        ledger = self.session.ledger
        unit.pay()
        missing = sharded.missing(unit.params)
        if not missing:
            return
        unit.storage.check_usable(missing)
        self.hops.start(unit)
        pending = unit.pending
        if pending is None:  # there is nothing to gather
            self._lend_shards(unit, missing)
            return
        ledger.pay(pending.bill)
        with ledger.billed(pending.bill):
            padded = sum([self._padded_numel[sharded.key(p)] for p in missing])
            ledger.stock_would_send(padded, unit.route.session.topology)
        if pending.bill:
            unit.bill.update(pending.bill)
        pending.wait()
        values, operands = unit.decode(pending.gathered)
        wanted = None if len(missing) == len(unit.params) else set(map(sharded.key, missing))
        arrived = [one for one in values if wanted is None or sharded.key(one[0]) in wanted]
        for param, operand in operands:
            if wanted is None or sharded.key(param) in wanted:
                sharded.set_operand(param, operand)
                dtype = unit.dtype_of(param)
                if sharded.attached(param).as_numbers:
                    value = operand.dequantize(dtype).view(sharded.shape(param))  # of a stack it is one matrix
                else:
                    # Code that reads the values and bypasses compute/linear.py shall see NaN.
                    value = self._not_a_number(dtype).expand(sharded.shape(param))
                arrived.append((param, value, False))
        sharded.set_all_full(arrived)
        self.hops.end(unit)
        self._are_there(unit, missing)

    def _are_there(self, unit: Unit, params: list[Parameter]) -> None:
        """Note that parameters of a unit have their values."""
        unit.storage.note(params)
        if not unit.live:
            unit.live = True
            self.live_numel += unit.numel

    def _is_not_live(self, unit: Unit) -> None:
        unit.bill.clear()
        if unit.live:
            unit.live = False
            self.live_numel -= unit.numel

    def _lend_shards(self, unit: Unit, missing: list[Parameter]) -> None:
        """Use shards as parameters while modules run: a copy of an embedding would take a gigabyte.

        GatheredParameters still makes a copy, because writes without `modifier_rank` must be dropped.
        """
        for param in missing:
            value = sharded.shard(param)[: sharded.numel(param)].view(sharded.shape(param))
            sharded.set_full(param, value, lossy=True)
        self._are_there(unit, missing)

    def release(self, unit: Unit, even_used: bool = False) -> None:
        """Drop the values of a unit's parameters, except those that modules use or a script has gathered.

        `even_used`: those that modules use too, because the unit is about to be gathered again.
        """
        full, looked_at = sharded.full(unit.params), unit.looked_at
        there = [p for p in full if (even_used or not sharded.users(p)) and sharded.key(p) not in looked_at]
        unit.storage.check_untouched(there)
        # The values were made and used on the compute stream only, so no stream must be recorded.
        sharded.drop(there, [self._nothing(param.dtype) for param in there])
        unit.storage.note(there)
        self._is_not_live(unit)

    def _check_not_resident(self) -> None:
        if self.resident:
            raise RuntimeError(
                "inside zeropp_fp8.generation all weights are there: gather parameters before or after it (with TRL, "
                "set ds3_gather_for_generation to False)"
            )

    def let_hold(self, unit: Unit, param: Parameter, value: Tensor) -> None:
        """Make one parameter of a unit available with a value that was decoded elsewhere."""
        sharded.set_full(param, value, lossy=not unit.is_exact(param))
        self._are_there(unit, [param])

    # -- gathers of parameters -----------------------------------------------------------------------------------

    def all_gather_coalesced(self, params: Iterable[Parameter], safe_mode: bool = False, quantize: bool = False):
        """Start to gather the units of `params` for computing; returns a handle with wait().

        `safe_mode` and `quantize` are DeepSpeed's; the session decides the format.
        """
        missing = sharded.missing(params)
        units = units_of(sorted(missing, key=sharded.key))
        for unit in units:
            self.hops.start(unit)
        return UnitsHandle(self, units)

    def gather_now(self, params: Sequence[Parameter]) -> None:
        """Gather for computing, complete on the current stream; parameters that are available stay as they are."""
        for engine, missing in by_engine(sharded.missing(params)):
            engine.all_gather_coalesced(missing).wait()

    def gather_exactly(self, params: Sequence[Parameter]) -> None:
        """Gather with every bit, complete on the current stream, for reading and changing weights.

        A parameter that was gathered in quantized form is gathered again.
        """
        self._check_not_resident()
        self.partition([p for p in params if sharded.known(p).lossy and not sharded.users(p)])
        for storage, missing in by_storage(sharded.missing(params)):
            storage.gather_exactly(missing)
        for param in params:
            unit_of(param).looked_at.add(sharded.key(param))

    @torch.no_grad()
    def partition(self, params: Sequence[Parameter], has_been_updated: bool = False, free_data: bool = True) -> None:
        """Drop the values of parameters; with `has_been_updated`, copy what was written to them to the shards first.

        It is collective then. If no rank finds a changed bit in its part, nothing is forgotten, so reading weights
        (save_16bit_model gathers them as for writing) does not change training: otherwise delayed scaling would lose
        its history.
        """
        self._check_not_resident()
        if has_been_updated:
            # GatheredParameters(modifier_rank=...) broadcasts each parameter before partitioning it again.
            with self.session.ledger.counting(OUTSIDE):
                for param in params:
                    self.session.ledger.sent_around_ring(sharded.numel(param) * param.element_size())
        written: list[Parameter] = []
        try:
            for storage, mine in by_storage(params):
                storage.take_back(mine, has_been_updated, free_data, written)
        finally:
            for unit in units_of(params):
                self._is_not_live(unit)
            for param in params:
                unit_of(param).looked_at.discard(sharded.key(param))
                if not sharded.is_full(param):
                    sharded.attached(param).lossy = False
            if written:  # after the write: the gather lane waits for the current stream's work
                self.weights_changed(written)
                if self.session.conversion is not None:
                    # Forget the amax history of operands. Delayed scaling would let new operands saturate until a step
                    # has seen them, in evaluations too. This concerns all layers, not only the written one: inputs of
                    # the others, forward and backward, have changed with it.
                    self.session.conversion.scaling.load_state_dict({})

    # -- invalidation --------------------------------------------------------------------------------------------

    def step_writes(self, parts: Iterable[Sequence[Parameter]]) -> None:
        """Let a step write weights, part by part; units that are written are sent between nodes while it goes on.

        A unit whose copy is current has been used since the last step, so it will be used in the next one. Units start
        once the host has issued the update of the next part: for differences it waits until the ranks know their sizes.
        """
        written: set[int] = set()
        ready: list[Unit] = []
        self._sent_early = set()  # of a step that has failed
        for params in itertools.chain(parts, [()]):
            for unit in ready:
                self.hops.start_first(unit)
            written.update(map(sharded.key, params))
            used = [unit for unit in units_of(filter(self.ownership.has, params)) if unit.secondary_is_current]
            ready = [unit for unit in used if written.issuperset(map(sharded.key, unit.params))]
            done = [param for unit in ready for param in unit.params]
            if done:
                self.weights_changed(done, by_step=True)
                self._sent_early.update(map(sharded.key, done))

    def step_wrote(self, params: Sequence[Parameter]) -> None:
        """A step has written these. Call it on every rank."""
        sent, self._sent_early = self._sent_early, set()
        left = [param for param in params if sharded.key(param) not in sent] if sent else params
        self.weights_changed(left, by_step=True)

    def weights_changed(self, params: Iterable[Parameter] | None = None, by_step: bool = False) -> None:
        """Forget all that was derived from `params` (None: all, even frozen). Call it on every rank, after the write.

        `by_step`: an optimizer step wrote them, so few bits of copies have changed.

        Buffers of secondary shards stay allocated: the next step fills them again.
        """
        params = None if params is None else list(params)
        elsewhere = self.ownership.elsewhere()
        if elsewhere:
            for engine, theirs in elsewhere if params is None else by_engine(params):
                if engine not in (None, self):  # that engine holds copies
                    engine.weights_changed(theirs, by_step)
            params = params and [p for p in params if self.ownership.has(p)]
        units = self.units if params is None else units_of(params)
        for unit in units:
            self.hops.cancel(unit)
            unit.changed(by_step)
        for unit in self.ownership.earlier_units(units):
            unit.changed()
        self.written(params)

    def written(self, params: Iterable[Parameter] | None) -> None:
        for storage in self.ownership.storages:
            storage.changed(params)
        self.hops.written()

    def formats_changed(self) -> None:
        """Use other wire formats from now on. Call it between steps, on every rank; collective."""
        self.drop(self.ownership.all_units)  # an evaluation without a step after it may have kept rounded values
        for unit in self.ownership.all_units:
            unit.layout = None
        for storage in self.ownership.storages:
            storage.formats_changed()
        self.weights_changed()
        self.secondary.choose_again(self.units)
