"""Which parameters an engine has, and to whom they go when another one takes them or it ends.

DeepSpeed puts `all_gather`, `all_gather_coalesced` and `partition` on each ZeRO-3 parameter as closures, which are
replaced while an engine of the plugin has it. Engines over one model take it from each other: the last one has it, and
gives it back to the one before that is still there, in whatever order they end. Taking, leaving and giving back are the
same on all ranks.

Where nothing was written in between, the engine that has parameters again goes on as if it had never given them up: it
gets the same bits again, from weights and rows of what was held (on the host meanwhile).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch.nn import Parameter

from zeropp_fp8.comm.failures import all_have_failed
from zeropp_fp8.compute.products import READ_AS_NUMBERS
from zeropp_fp8.config import SECTION, ConfigError
from zeropp_fp8.zero.gather.adopted import STATE, ParameterWire, by_engine, gather_by_engine, partition_by_engine
from zeropp_fp8.zero.gather.kinds import Kind
from zeropp_fp8.zero.gather.route import Route
from zeropp_fp8.zero.gather.units import Unit


def _still_there(state: ParameterWire | None) -> ParameterWire | None:
    """The state of the last engine before that has not been destroyed."""
    while state is not None and not state.owner.adopted:
        state = state.before
    return state


class Adoption(ABC):
    """The parameters of one engine.

    Attributes:
        adopted: these, by ds_id; `units`: what they are gathered in; `kinds`: what these are.
        module_depth: > 0 while a module of the model runs.
    """

    def __init__(self, route: Route, kinds: Sequence[Kind]) -> None:
        self.route, self.kinds, self.session, self.device = route, kinds, route.session, route.device
        self.adopted: dict[int, Parameter] = {}
        self._before: dict[Parameter, ParameterWire] = {}  # what they were in an engine before
        self.units: list[Unit] = []
        self._all_units: list[Unit] = []  # also those that another engine has now
        self.module_depth = 0
        self.given_back: Callable[[], None] | None = None  # told that a later engine has ended

    # -- what a gather is, to who only knows whose it is -----------------------------------------------------------

    @abstractmethod
    def all_gather_coalesced(self, params: Iterable[Parameter], safe_mode: bool = False, quantize: bool = False):
        """Start gathering for computing; a handle with wait()."""

    @abstractmethod
    def gather_now(self, params: Sequence[Parameter]) -> None:
        """Gather for computing, while a module runs."""

    @abstractmethod
    def gather_exactly(self, params: Sequence[Parameter]) -> None:
        """Gather every bit, complete."""

    @abstractmethod
    def release(self, unit: Unit) -> None:
        """Drop the values of a unit's parameters."""

    @abstractmethod
    def cancel(self, unit: Unit) -> None:
        """End a gather that nothing will use."""

    @abstractmethod
    def weights_changed(self, params: Iterable[Parameter] | None = None, by_step: bool = False) -> None:
        """Forget what was derived from parameters."""

    @abstractmethod
    def _check_not_resident(self) -> None:
        """Raise RuntimeError where weights stay, for generation."""

    @abstractmethod
    def _settle(self) -> None:
        """Let what is held be complete, for the current stream."""

    @abstractmethod
    def _are_ready(self, params: Iterable[Parameter]) -> None:
        """The current stream has been given the last write to parameters, or brought them here."""

    @abstractmethod
    def _forget_buffers(self) -> None:
        """Give buffers to the allocator."""

    # -- taking and giving back ------------------------------------------------------------------------------------

    @staticmethod
    def check_adoptable(params: Iterable[Parameter]) -> None:
        """An engine over these parameters is about to be made.

        Raises:
            ConfigError: of what another one gathers together some would be left there.
        """
        for engine, mine in by_engine(params):
            taken = {id(p) for p in mine}
            units = () if engine is None else engine.units_of(mine)
            if any(id(p) not in taken for unit in units for p in unit.params):
                raise ConfigError(
                    "another engine has this model and more: what is gathered together cannot be divided between them; "
                    "call its destroy() first, or give both the same model"
                )

    def adopt(self, units: Sequence[Unit]) -> None:
        """Take the ZeRO-3 parameters of `units`, from another engine over the same model too. Collective."""
        params = [param for unit in units for param in unit.params]
        self.adopted = {param.ds_id: param for param in params}
        self._before = {param: getattr(param, STATE) for param in params if hasattr(param, STATE)}
        for previous, theirs in by_engine(params):
            if previous is not None:
                previous._leave(theirs)
        self._all_units = list(units)
        states = {
            param: ParameterWire(
                stock_all_gather=param.all_gather,
                stock_all_gather_coalesced=param.all_gather_coalesced,
                stock_partition=param.partition,
                unit=unit,
                owner=self,
                before=self._before.get(param),
            )
            for unit in units
            for param in unit.params
        }
        self._take_over(states)

    def _take_over(self, states: Mapping[Parameter, ParameterWire]) -> None:
        """Put this gatherer's closures on parameters that are DeepSpeed's, and their shards where they rest here."""
        units = list({id(state.unit): state.unit for state in states.values()}.values())
        for kind in self.kinds:
            kind.prepare([unit for unit in units if unit.kind is kind])
        for unit in units:
            unit.kind.place(unit)
            for param in unit.params:
                setattr(param, STATE, states[param])
                param.all_gather_coalesced = self.all_gather_coalesced
                param.all_gather = self._all_gather_closure(param)
                param.partition = self._partition_closure(param)
        for kind in self.kinds:
            kind.adopt([param for unit in units if unit.kind is kind for param in unit.params])
        self._find_own_units()
        self._are_ready(states)

    def _find_own_units(self) -> None:
        own = [unit for unit in self._all_units if all(map(self.has, unit.params))]
        # The same list again, where it is: by it the coordinator knows that what it has learned of their order holds.
        self.units = self._all_units if len(own) == len(self._all_units) else own

    def _leave(self, params: Sequence[Parameter]) -> None:
        """Another engine over the same model takes parameters over. Collective, before it adopts them.

        From then on its hooks bring them, for this engine's calls of the model too, and only it holds copies of them,
        until it is destroyed.
        """
        left = self.units_of(params)
        for unit in left:
            unit.forget_users()
            self.release(unit)
            self.cancel(unit)
        self._settle()
        for unit in left:
            unit.put_aside()
        try:
            self._let_go(params)
        finally:
            self._find_own_units()

    def _earlier_units(self, units: Iterable[Unit]) -> set[Unit]:
        """Units of engines that had their parameters before, and may have them again."""
        found: set[Unit] = set()
        if self._before:
            for state in (self._before.get(param) for unit in units for param in unit.params):
                while state is not None:
                    found.add(state.unit)
                    state = state.before
        return found

    def give_back(self) -> None:
        """Give parameters to the engine that had them before, or DeepSpeed; and the buffers to the allocator."""
        if self.session.collected:
            # Ranks collect engines at moments of their own, and must agree on who gathers what: parameters keep the
            # gatherer, whose gathers go on working, until another engine takes them over, on all ranks.
            return
        # What no engine has was about to be taken over, when something failed.
        mine = [param for param in self.adopted.values() if self.has(param) or not hasattr(param, STATE)]
        previous = {param: _still_there(self._before.get(param)) for param in mine}
        engines = {id(state.owner): state.owner for state in previous.values() if state is not None}.values()
        together = any(kind.leaves_together for each in (self, *engines) for kind in each.kinds)
        if self.session.failed and together and not all_have_failed(self.session.number, self.session.topology.group):
            return  # the job is lost: rather than to wait for the others the error shall go its way
        for unit in self._all_units:  # what another engine has now lies aside
            self.cancel(unit)
            unit.changed()
            unit.secondary = None
        self._forget_buffers()
        self._let_go(filter(self.has, mine))
        self.adopted.clear()
        self._before.clear()
        self.units = self._all_units = []
        self.given_back = None  # earlier states may be remembered for as long as later ones
        for engine in engines:
            theirs = {p: state for p, state in previous.items() if state is not None and state.owner is engine}
            engine._take_over(theirs)
            if engine.given_back is not None:
                engine.given_back()

    def _let_go(self, params: Iterable[Parameter]) -> None:
        """Give parameters DeepSpeed's slices and closures again."""
        for unit in self.units_of(params):
            unit.kind.leave(self, unit)
            for param in unit.params:
                state: ParameterWire = getattr(param, STATE)
                param.__dict__.pop(READ_AS_NUMBERS, None)
                param.all_gather = state.stock_all_gather
                param.all_gather_coalesced = state.stock_all_gather_coalesced
                param.partition = state.stock_partition
                delattr(param, STATE)

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

    def check_placement(self) -> None:
        """Gradients, new weights or a checkpoint are about to go to, or come from, where this engine has parameters.

        Raises:
            RuntimeError: a later engine over the model has them elsewhere. On all ranks.
        """
        for engine, params in self.elsewhere():
            theirs = None if engine is None else engine.session
            if not all(self.session.places_like(theirs, param) for param in params):
                raise RuntimeError(
                    "a later engine over this model keeps its weights on other ranks, so this one cannot train, show "
                    "master weights, save or load: call the later one's destroy() first, or give both the same "
                    f"{SECTION}.partition"
                )

    def elsewhere(self) -> list[tuple[Adoption | None, list[Parameter]]]:
        """Parameters that later engines over the model have taken over, by engine."""
        if len(self.units) == len(self._all_units):
            return []
        return [(engine, params) for engine, params in by_engine(self.adopted.values()) if engine is not self]

    def has(self, param: Parameter) -> bool:
        """Whether a parameter is this engine's to gather."""
        state: ParameterWire | None = getattr(param, STATE, None)
        return state is not None and state.owner is self

    # -- looking up ------------------------------------------------------------------------------------------------

    @staticmethod
    def unit_of(param: Parameter) -> Unit:
        """The unit of an adopted parameter."""
        return getattr(param, STATE).unit

    @staticmethod
    def units_with(param: Parameter) -> list[Unit]:
        """The units of an adopted parameter in all engines that have it or had it before, the last one's first."""
        state: ParameterWire | None = getattr(param, STATE)
        found = []
        while state is not None:
            found.append(state.unit)
            state = state.before
        return found

    def units_of(self, params: Iterable[Parameter]) -> tuple[Unit, ...]:
        """The units that hold `params`, each once."""
        units = (getattr(p, STATE).unit for p in params)
        return tuple({id(unit): unit for unit in units}.values())
