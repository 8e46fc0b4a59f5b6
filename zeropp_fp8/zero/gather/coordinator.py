"""Fetches, prefetches and releases units, as DeepSpeed's PartitionedParameterCoordinator does with parameters.

The rules and their keys are DeepSpeed's. `stage3_prefetch_bucket_size` bounds the prefetched elements (the next unit is
always prefetched, unless it is 0), `stage3_max_live_parameters` bounds the live ones, and a unit that is needed again
within `stage3_max_reuse_distance` elements stays. With a secondary shard a forward starts the hop between nodes for
all units at once, in their order, and the network is busy from the first to the last of them.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm.ledger import OUTSIDE
from zeropp_fp8.zero.gather.attached import by_unit
from zeropp_fp8.zero.gather.gatherer import Gatherer
from zeropp_fp8.zero.gather.trace import FetchTrace
from zeropp_fp8.zero.gather.units import Unit

# Calls of one submodule in a pass that another module began: a chunked loss calls a head that often, generation more.
_MOST_CALLS = 16
_NONE = -1  # the number of a backward, outside any backward


class _Called(NamedTuple):
    """A forward that was announced.

    Attributes:
        module: the module that is called by itself; None: the whole model.
        backward: the number of the backward that runs it.
    """

    module: nn.Module | None
    backward: int


class _Members(NamedTuple):
    """The parameters that a module uses itself.

    Attributes:
        external: how many of them belong to other modules.
        params: all of them.
        units: the units that hold them, each with its parameters among these.
    """

    external: int
    params: list[Parameter]
    units: dict[Unit, list[Parameter]]


class UnitCoordinator:
    """The interface that DeepSpeed's hooks call, over the units of a Gatherer.

    Args:
        prefetch_numel, max_live_numel, max_reuse_numel: in elements of full parameters.

    Attributes:
        apart: modules inside of leaf modules that fetch their parameters themselves.
    """

    apart: Collection[nn.Module] = ()

    def __init__(self, gatherer: Gatherer, prefetch_numel: int, max_live_numel: int, max_reuse_numel: int) -> None:
        self.gatherer = gatherer
        self.prefetch_numel = prefetch_numel
        self.max_live_numel = max_live_numel
        self.max_reuse_numel = max_reuse_numel
        self.hierarchy = 0  # DeepSpeed sets it; hops are chosen by the gatherer
        self._trace = FetchTrace()
        self._prefetched_until = 0
        self._called: _Called | None = None  # begins the next pass at its first fetch
        self._first_called: nn.Module | None = None  # the submodule that began this pass
        self._calls: dict[nn.Module, int] = {}  # calls of submodules by themselves, in this pass
        self._in_backward: dict[nn.Module, int] = {}  # modules with the number of their calls in backward
        self._of_module: dict[int, _Members] = {}
        self._units = gatherer.units
        # Autograd may run the hooks of a module with several outputs in several threads.
        self._lock = threading.RLock()

    # -- DeepSpeed's questions about its own trace; this one needs no modes ----------------------------------------

    def trace_prologue(self, sub_module: nn.Module) -> None:
        """Do nothing: every pass is compared with the known order as it runs."""

    def is_record_trace(self) -> bool:
        """False: the trace always records, but not through record_module."""
        return False

    def is_invalid_trace(self) -> bool:
        """False, so that DeepSpeed calls `_invalidate_trace` when hooks are registered anew."""
        return False

    def _invalidate_trace(self) -> None:
        self._trace.forget()
        self._of_module.clear()

    def reset_step(self) -> None:
        """A forward of the whole model begins."""
        self._called = _Called(None, torch._C._current_graph_task_id())

    def submodule_called(self, module: nn.Module) -> None:
        """A forward of a part of the model begins: of the model without its head, or of one part after another.

        The module that began the pass begins the next one too. So does a module that is called so often that it must be
        a loop of its own. Thus passes end, and their order is learned, even if the whole model is never called.
        """
        self._called = _Called(module, torch._C._current_graph_task_id())

    def _begin_pass(self) -> None:
        """Begin a pass at the first fetch after an announced forward; all ranks see this fetch.

        A rank that runs gathered modules alone fetches nothing, so the pass that all ranks are in goes on. If the fetch
        belongs to another backward than the announced forward, that forward was run by one rank alone.
        """
        (module, backward), self._called = self._called, None
        if backward != torch._C._current_graph_task_id():
            return
        if module is not None:
            calls = self._calls.get(module, 0) + 1
            if self._trace.position and module is not self._first_called and calls <= _MOST_CALLS:
                self._calls[module] = calls
                return
        if backward == _NONE:  # else the backward runs the model again
            self.release_backward_leftovers()
        self._trace.start_pass()
        self._prefetched_until = 0
        self._first_called = module
        self._calls = {} if module is None else {module: 1}

    def _start_all_first_hops(self) -> None:
        """Fill the secondary shards, unit by unit in the order in which this forward will need them."""
        for unit in self._trace.first_order():
            if unit.keeps_secondary and sharded.missing(unit.params):
                self.gatherer.hops.start_first(unit)

    # -- fetch and release -----------------------------------------------------------------------------------------

    def _members(self, module: nn.Module) -> _Members:
        """The parameters that `module` uses itself; external parameters may be added while it runs."""
        if self._units is not self.gatherer.ownership.units:  # another engine has attached some of them
            self._invalidate_trace()
            self._units = self.gatherer.units
        external = module._external_params
        held = self._of_module.get(id(module))
        if held is None or held.external != len(external):
            # What was added to the module later is there as it is.
            own = {id(p): p for p in module.parameters(sharded.is_leaf(module)) if sharded.is_sharded(p)}
            for inner in module.modules() if self.apart else ():
                if inner in self.apart and inner is not module:
                    for param in inner.parameters():
                        own.pop(id(param), None)
            params = list({**own, **{id(p): p for p in external.values()}}.values())
            if not all(map(self.gatherer.ownership.has, params)):
                raise RuntimeError(
                    f"zeropp_fp8: a {type(module).__name__} uses parameters that another engine has: call that "
                    "engine's destroy() if it is over the same model, make a new engine over the model if making that "
                    "one has failed, or make one engine over both models"
                )
            held = self._of_module[id(module)] = _Members(len(external), params, by_unit(params))
        return held

    def fetch_sub_module(self, current_submodule: nn.Module, forward: bool) -> None:
        """Make the parameters of a module available, and start to prefetch the units after it.

        Without `forward` they stay until the module's backward is over, or at the latest the whole backward.
        """
        with self._lock:
            _, params, units = self._members(current_submodule)
            if not params:
                return
            gatherer, key = self.gatherer, sharded.key(current_submodule)
            if self._called is not None and _fetched(units)[0]:
                self._begin_pass()
            if not forward:
                self._in_backward.setdefault(current_submodule, 0)
            fetched, needed = _fetched(units)
            for param in params:
                sharded.users(param).add(key)
            for unit in units:
                unit.active_modules.add(key)
                unit.pay()
            if fetched:
                if self._trace.position == 0:
                    self._start_all_first_hops()
                self._trace.fetched(fetched, gatherer.session.ledger.kind)
            for unit in needed:
                gatherer.hops.start(unit)
            if fetched and gatherer.device.type == "cpu":  # finish() blocks, so start the next units before
                self._prefetch(needed)
            for unit in needed:
                gatherer.finish(unit)
            if fetched and gatherer.device.type != "cpu":
                self._prefetch()

    def _prefetch(self, needed_now: Sequence[Unit] = ()) -> None:
        """Start gathering the next units of the known order, as far as the limits allow."""
        if self.prefetch_numel == 0:
            return
        gatherer = self.gatherer
        start = max(self._prefetched_until, self._trace.position)
        ahead = gatherer.hops.pending_numel - sum([unit.numel for unit in needed_now if unit.is_pending])
        for position, unit, kind in self._trace.coming(start):
            self._prefetched_until = position
            if unit.is_pending or not unit.may_prefetch:
                continue
            if not sharded.missing(unit.params):
                if not self._stays(unit):
                    return  # it will be released and then fetched again: wait for that
            else:
                if ahead > 0 and ahead + unit.numel > self.prefetch_numel:
                    return
                if ahead > 0 and gatherer.live_numel + ahead + unit.numel > self.max_live_numel:
                    return
                # A unit that the forward prefetches for the backward counts as the backward's bytes. An evaluation
                # follows the order of a training step, and keeps its own kind.
                ledger = gatherer.session.ledger
                with ledger.counting(ledger.kind if ledger.kind == OUTSIDE else kind):
                    gatherer.hops.start(unit, ahead=True)
                ahead += unit.numel

    def _stays(self, unit: Unit) -> bool:
        """Whether a live unit stays until it is needed again."""
        distance = self._trace.numel_until(unit)
        near = distance is not None and distance < self.max_reuse_numel
        return near and self.gatherer.live_numel <= self.max_live_numel

    def release_sub_module(self, submodule: nn.Module, forward: bool = False) -> None:
        """After a module's run, drop its parameters, unless its backward or another module needs them soon."""
        with self._lock:
            if not forward:
                self._in_backward.pop(submodule, None)
            elif submodule in self._in_backward:
                return
            for unit in self._leave(submodule):
                if not unit.active_modules and not unit.persistent and not self._stays(unit):
                    self._release(unit)

    def backward_begins(self, module: nn.Module) -> None:
        """The backward of a module's call begins; its parameters have been fetched."""
        with self._lock:
            self._in_backward[module] = self._in_backward.get(module, 0) + 1

    def backward_ends(self, module: nn.Module) -> bool:
        """The backward of a module's call ends; returns whether no other call of it (an outer one) is in one."""
        with self._lock:
            calls = self._in_backward.get(module, 0) - 1
            if calls > 0:
                self._in_backward[module] = calls
            return calls <= 0

    def _leave(self, module: nn.Module) -> Iterable[Unit]:
        """A module uses its parameters no more; returns their units."""
        (_, params, units), key = self._members(module), sharded.key(module)
        for param in params:
            sharded.users(param).discard(key)
        for unit in units:
            unit.active_modules.discard(key)
        return units

    def leave_all(self) -> None:
        """No module uses its parameters any more; they may stay until something releases them."""
        with self._lock:
            for unit in self.gatherer.units:
                unit.leave()

    def _release(self, unit: Unit) -> None:
        for param in unit.params:
            if param.is_external_param:
                return
        self.gatherer.release(unit)

    def release_backward_leftovers(self) -> None:
        """Release modules whose hook after backward was never called.

        Either no input needs a gradient, or they were run again after their backward, or an exception ended it.
        """
        with self._lock:
            while self._in_backward:
                module, _ = self._in_backward.popitem()
                for unit in self._leave(module):
                    if not unit.active_modules and not unit.persistent:
                        self._release(unit)

    def release_and_reset_all(self, module: nn.Module) -> None:
        """Release everything, including parameters kept between steps."""
        with self._lock:
            self._in_backward.clear()
            for unit in self.gatherer.units:
                if unit.is_pending:
                    self.gatherer.hops.cancel(unit)
                unit.leave()
                unit.looked_at.clear()
                self.gatherer.release(unit)
            for param in [param for unit in self.gatherer.units for param in unit.params]:
                if param.data.numel() and sharded.numel(param):
                    raise RuntimeError(f"expected to be released: {sharded.describe(param)}")


def _fetched(units: Mapping[Unit, list[Parameter]]) -> tuple[tuple[Unit, ...], list[Unit]]:
    """Split the units of a module: (units whose fetch all ranks see, units of which it misses parameters)."""
    needed = [unit for unit, params in units.items() if sharded.missing(params)]
    return tuple([u for u in units if not u.persistent and (u in needed or not u.looked_at)]), needed
