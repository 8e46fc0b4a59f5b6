"""Attaches parameters to an engine, and detaches them.

DeepSpeed puts `all_gather`, `all_gather_coalesced` and `partition` on each ZeRO-3 parameter as closures. They are
replaced while the parameter is attached to an engine of the plugin. Engines over one model are a stack: the last one
has the parameters, ends first, and gives them back to the one before. All ranks attach, suspend and detach alike.

If making an engine fails, it gives parameters back as they were, without asking other ranks: these may be elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.config import SECTION, ConfigError
from zeropp_fp8.zero.gather.attached import Owner, ParameterWire, by_engine, units_of
from zeropp_fp8.zero.gather.storage import Storage
from zeropp_fp8.zero.gather.units import Unit

_CLOSURES = ("all_gather", "all_gather_coalesced", "partition")


def check_attachable(params: Iterable[Parameter]) -> None:
    """Check that an engine over these parameters can be made.

    Raises:
        ConfigError: it would take only some of the parameters that another engine gathers together.
    """
    for engine, mine in by_engine(params):
        taken = {id(p) for p in mine}
        units = () if engine is None else units_of(mine)
        if any(id(p) not in taken for unit in units for p in unit.params):
            raise ConfigError(
                "another engine has this model and more: what is gathered together cannot be divided between them; "
                "call its destroy() first, or give both the same model"
            )


class Ownership:
    """The parameters of one engine.

    Attributes:
        params: the parameters, by sharded.key; `all_units`: their units; `storages`: the storages of these.
        units: the units that no later engine has.
        given_back: called when a later engine has ended.
    """

    def __init__(self, gatherer: Owner, storages: Sequence[Storage]) -> None:
        self._gatherer, self.storages, self._session = gatherer, storages, gatherer.session
        self.params: dict[int, Parameter] = {}
        self._before: dict[Parameter, ParameterWire] = {}  # their states in the engine before
        self._rested: dict[Parameter, sharded.Shard] = {}  # their shards before, until this engine is made
        self.units: list[Unit] = []
        self.all_units: list[Unit] = []
        self.given_back: Callable[[], None] | None = None

    def attach(self, units: Sequence[Unit]) -> None:
        """Attach the ZeRO-3 parameters of `units`, even from another engine over the same model. Collective."""
        params = [param for unit in units for param in unit.params]
        self.params = {sharded.key(param): param for param in params}
        self._before = {param: state for param in params if (state := sharded.known(param).wire) is not None}
        self._rested = {param: sharded.Shard.of(param) for param in params}
        for previous, theirs in by_engine(params):
            if previous is not None:
                previous.suspend(theirs)
        self.all_units = list(units)
        states = {}
        for unit in units:
            for param in unit.params:
                stock = {name: getattr(param, name) for name in _CLOSURES}
                states[param] = ParameterWire(stock, unit, self._gatherer, self._before.get(param))
        self.take(states)

    def take(self, states: Mapping[Parameter, ParameterWire], placed: bool = False) -> None:
        """Put the gatherer's closures on parameters that are DeepSpeed's, and move their shards to its storage.

        `placed`: the shards are there already.
        """
        units = list({id(state.unit): state.unit for state in states.values()}.values())
        for storage in self.storages:
            storage.prepare([unit.params for unit in units if unit.storage is storage])
        for unit in units:
            if not placed:
                unit.storage.place(unit.params)
            for param in unit.params:
                sharded.remember(param, wire=states[param])
                for name, closure in self._gatherer.closures_of(param).items():
                    setattr(param, name, closure)
        for storage in self.storages:
            storage.attach([param for unit in units if unit.storage is storage for param in unit.params])
        self._find_own_units()
        self._gatherer.written(states)

    def made(self) -> None:
        """The engine has been made: forget how shards were stored before."""
        self._rested.clear()

    def resume(self, states: Mapping[Parameter, ParameterWire], placed: bool) -> None:
        """Attach parameters again. Collective, unless their shards are `placed`."""
        self.take(states, placed)
        if self.given_back is not None:
            self.given_back()

    def _find_own_units(self) -> None:
        own = [unit for unit in self.all_units if all(map(self.has, unit.params))]
        # Keep the same list object if nothing is missing: the coordinator then knows that its learned order holds.
        self.units = self.all_units if len(own) == len(self.all_units) else own

    def suspend(self, params: Sequence[Parameter]) -> None:
        """Give parameters to another engine over the same model. Collective, before that engine attaches them.

        From then on its hooks gather them, for this engine's calls of the model too, and only it holds copies of them,
        until it is destroyed.
        """
        left = units_of(params)
        for unit in left:
            unit.leave()
            unit.looked_at.clear()
        self._gatherer.drop(left)
        for unit in left:
            unit.put_aside()
        try:
            self._let_go(params)
        finally:
            self._find_own_units()

    def detach(self) -> None:
        """Give parameters back to the engine before, or to DeepSpeed. Collective, if this engine was made."""
        # A parameter without engine was about to be attached when an error occurred.
        mine = [param for param in self.params.values() if self.has(param) or sharded.known(param).wire is None]
        failed = bool(self._rested)
        before: dict[int, tuple[Owner, dict[Parameter, ParameterWire]]] = {}
        for param, state in ((param, self._before.get(param)) for param in mine):
            if state is not None:
                before.setdefault(id(state.owner), (state.owner, {}))[1][param] = state
        self._gatherer.drop(self.all_units)
        for unit in self.all_units:
            unit.changed()
            unit.drop_copy()
        self._let_go(filter(self.has, mine), together=not failed)
        for param in mine if failed else ():
            self._rested[param].put(param)
        for remembered in (self.params, self._before, self._rested):
            remembered.clear()
        self.units = self.all_units = []
        self.given_back = None  # it may keep other objects alive: states of an ended engine may live on
        for engine, states in before.values():
            engine.resume(states, placed=failed)

    def _let_go(self, params: Iterable[Parameter], together: bool = True) -> None:
        """Restore DeepSpeed's closures on parameters and, `together` with other ranks, its slices."""
        for unit in units_of(params):
            if together:
                unit.storage.leave(unit.params, self._gatherer.gather_exactly)
            for param in unit.params:
                state: ParameterWire = sharded.known(param).wire
                for name, closure in state.stock.items():
                    setattr(param, name, closure)
                sharded.remember(param, wire=None, as_numbers=False)

    # -- beside a later engine -------------------------------------------------------------------------------------

    def has(self, param: Parameter) -> bool:
        """Whether a parameter is attached to this engine."""
        state: ParameterWire | None = sharded.known(param).wire
        return state is not None and state.owner is self._gatherer

    def elsewhere(self) -> list[tuple[Owner | None, list[Parameter]]]:
        """Parameters that later engines over the model have, by engine."""
        if len(self.units) == len(self.all_units):
            return []
        return [(engine, params) for engine, params in by_engine(self.params.values()) if engine is not self._gatherer]

    def check_placement(self) -> None:
        """Check that parameters are on the ranks where this engine reads or writes gradients, weights and checkpoints.

        Raises:
            RuntimeError: a later engine over the model has them on other ranks. Raised on all ranks.
        """
        for engine, params in self.elsewhere():
            theirs = None if engine is None else engine.session
            if not all(self._session.places_like(theirs, param) for param in params):
                raise RuntimeError(
                    "a later engine over this model keeps its weights on other ranks, so this one cannot train, show "
                    "master weights, save or load: call the later one's destroy() first, or give both the same "
                    f"{SECTION}.partition"
                )

    def earlier_units(self, units: Iterable[Unit]) -> set[Unit]:
        """Units of earlier engines, which get these units' parameters back when this engine ends."""
        found: set[Unit] = set()
        if self._before:
            for state in (self._before.get(param) for unit in units for param in unit.params):
                while state is not None:
                    found.add(state.unit)
                    state = state.before
        return found
