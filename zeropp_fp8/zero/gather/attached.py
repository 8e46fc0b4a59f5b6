"""The plugin's state of a ZeRO-3 parameter, and lists with parameters of several engines.

`GatheredParameters` passes all of its parameters to the closures of the first. They may belong to several engines (a
policy and the reference model that follows it, a model and its moving average), to DeepSpeed's own engines, or to none
yet. An engine knows its own wire format, owners and copies only, so every list is split by engine first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.zero.gather.storage import Storage
from zeropp_fp8.zero.gather.units import Unit
from zeropp_fp8.zero.session import Session


class Owner(Protocol):
    """The interface of the gatherer that a parameter is attached to, for its ownership and for other engines."""

    session: Session

    def gather_exactly(self, params: Sequence[Parameter]) -> None:
        """Gather with every bit, complete on the current stream. Collective."""

    def partition(self, params: Sequence[Parameter], has_been_updated: bool = False, free_data: bool = True) -> None:
        """Drop values; `has_been_updated`: first copy what was written to them to the shards. Collective then."""

    def suspend(self, params: Sequence[Parameter]) -> None:
        """Give parameters to an engine that was made later. Collective."""

    def resume(self, states: Mapping[Parameter, ParameterWire], placed: bool) -> None:
        """Attach parameters again as they were, after the later engine has ended. Collective, unless `placed`."""

    def closures_of(self, param: Parameter) -> dict[str, Callable]:
        """Replacements for DeepSpeed's closures on a parameter, by their names."""

    def drop(self, units: Iterable[Unit]) -> None:
        """Release units and cancel their pending gathers, for the current stream too."""

    def written(self, params: Iterable[Parameter] | None) -> None:
        """The current stream has the last write to parameters (None: all), or the work that brought them here."""


@dataclass
class ParameterWire:
    """The plugin's state of one parameter."""

    stock: dict[str, Callable]  # DeepSpeed's closures, by their names
    unit: Unit
    owner: Owner
    before: ParameterWire | None = None  # its state in the engine before, which gets it back when this one is destroyed


# -- looking up ------------------------------------------------------------------------------------------------------


def unit_of(param: Parameter) -> Unit:
    """The unit of a parameter, in the engine that it is attached to."""
    return sharded.attached(param).wire.unit


def units_of(params: Iterable[Parameter]) -> tuple[Unit, ...]:
    """The units that hold `params`, each once."""
    return tuple(by_unit(params))


def by_unit(params: Iterable[Parameter]) -> dict[Unit, list[Parameter]]:
    """Parameters by the unit that holds them, in the order of each unit's first parameter."""
    units: dict[Unit, list[Parameter]] = {}
    for param in params:
        units.setdefault(sharded.attached(param).wire.unit, []).append(param)
    return units


def by_storage(params: Iterable[Parameter]) -> list[tuple[Storage, list[Parameter]]]:
    """(storage, parameters) in the order of each first parameter; storages that send shards as they are come last.

    Such storages may refuse a write to a parameter, so the others must be done by then.
    """
    parts: dict[Storage, list[Parameter]] = {}
    for param in params:
        parts.setdefault(unit_of(param).storage, []).append(param)
    return sorted(parts.items(), key=lambda part: part[0].sends_as_stored)


def by_engine(params: Iterable[Parameter]) -> list[tuple[Owner | None, list[Parameter]]]:
    """(gatherer of an engine, its parameters) in the order of each first parameter; None: attached to no engine here.

    Ranks that pass the same list take the parts in the same order.
    """
    parts: dict[int, tuple[Owner | None, list[Parameter]]] = {}
    for param in params:
        state: ParameterWire | None = sharded.known(param).wire
        gatherer = None if state is None else state.owner
        parts.setdefault(id(gatherer), (gatherer, []))[1].append(param)
    return list(parts.values())


def gather_by_engine(params: Iterable[Parameter]) -> None:
    """Gather parameters of any engines with every bit, complete on the current stream. Collective."""
    for gatherer, mine in by_engine(params):
        if gatherer is None:
            mine[0].all_gather(param_list=mine)
        else:
            gatherer.gather_exactly(mine)


def partition_by_engine(params: Iterable[Parameter], has_been_updated: bool = False, free_data: bool = True) -> None:
    """Drop values of parameters of any engines; `has_been_updated`: write them back first. Collective then."""
    for gatherer, mine in by_engine(params):
        if gatherer is None:
            mine[0].partition(param_list=mine, has_been_updated=has_been_updated, free_data=free_data)
        else:
            gatherer.partition(mine, has_been_updated, free_data)
