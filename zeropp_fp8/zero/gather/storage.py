"""Storages keep parameters on the ranks, and do what concerns several parameters at once.

The base class is right for shards of numbers in any placement. An engine has one object of each storage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.zero.gather.route import Route

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element


class Storage(ABC):
    """One way to store parameters, in one engine.

    Attributes:
        unit_class: the class of its units (units.py).
        sends_as_stored: shards are sent as they are. Otherwise they are numbers, and are encoded for the wire.
    """

    unit_class: type
    sends_as_stored = False

    def __init__(self, route: Route) -> None:
        self.route = route

    @abstractmethod
    def takes(self, param: Parameter) -> bool:
        """Whether this storage keeps a parameter."""

    def prepare(self, units: Sequence[Sequence[Parameter]]) -> None:
        """The parameters of these units are about to be placed."""

    def place(self, params: Sequence[Parameter]) -> None:
        """Move parameters from DeepSpeed's slices to this storage, all or none. Collective, before `attach`."""

    def attach(self, params: Sequence[Parameter]) -> None:
        """Parameters in this storage belong to the engine from now on."""
        self.route.gemm_weights.attach(params)

    def changed(self, params: Sequence[Parameter] | None) -> None:
        """Weights (None: all) were written."""
        self.route.gemm_weights.changed(params)

    def formats_changed(self) -> None:
        """Stop sending weights as operands of products."""
        self.route.gemm_weights.clear()

    def leave(self, params: Sequence[Parameter], gather_exactly: Callable[[Sequence[Parameter]], None]) -> None:
        """Give parameters DeepSpeed's slices again, all or none: the engine ends, or another one attaches them.

        Collective; `gather_exactly` is the engine's.
        """

    def report_rows(self, params: Sequence[Parameter]) -> list[tuple]:
        """Lines of the start table: (what, format, parameters, remark)."""
        return []

    # -- a parameter in a checkpoint: DeepSpeed's slices -------------------------------------------------------------

    def fragment(self, name: str, param: Parameter, stock: Callable[[], Tensor]):
        """The object to save for a frozen parameter; `stock` returns DeepSpeed's own. Collective."""
        return self.to_slice(param, stock())

    def to_slice(self, param: Parameter, own: Tensor) -> Tensor:
        """Convert each rank's part of a parameter to DeepSpeed's slice, padded. Collective."""
        return own

    def from_slice(self, param: Parameter, one_slice: Tensor) -> Tensor:
        """The inverse of `to_slice`. Collective."""
        return one_slice

    @abstractmethod
    def gather_exactly(self, params: Sequence[Parameter]) -> None:
        """Gather missing parameters with every bit, complete on the current stream. Collective."""

    # -- parameters that others may have written to ------------------------------------------------------------------

    def check_usable(self, params: Iterable[Parameter]) -> None:
        """Raise RuntimeError if a parameter must not be used."""

    def check_untouched(self, params: Iterable[Parameter]) -> None:
        """Raise RuntimeError if a parameter was written and the write would be lost."""

    def note(self, params: Iterable[Parameter]) -> None:
        """The plugin has set or dropped the values of parameters."""

    # -- writing back -----------------------------------------------------------------------------------------------

    def take_back(
        self, params: Sequence[Parameter], has_been_updated: bool, free_data: bool, written: list[Parameter]
    ) -> None:
        """Drop values; with `has_been_updated`, copy what was written to them to the shards first. Collective then.

        Changed parameters are added to `written`, the same on every rank, even if an exception says that some cannot be
        dropped.
        """
        changed = self._written(params) if has_been_updated else []
        written += changed
        for param in changed:
            own = self.route.session.placement.own_part(param, param.data)
            sharded.unpadded(param, own.numel()).copy_(own)
        for param in params:
            if free_data and sharded.is_full(param):
                sharded.free(param)  # raises an exception while a module uses the parameter
            sharded.set_dropped(param)
            sharded.drop_operand(param)

    def _written(self, params: Sequence[Parameter]) -> list[Parameter]:
        """The gathered parameters that on any rank differ in bits from the shard. Collective, one message."""
        gathered = sharded.full(params)
        if not gathered:
            return []
        differs = torch.stack([self._own_part_differs(param) for param in gathered])
        dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=self.route.session.topology.group)
        return [param for param, changed in zip(gathered, differs.tolist()) if changed]

    def _own_part_differs(self, param: Parameter) -> Tensor:
        """uint8 []: whether this rank's part of a gathered parameter has other bits than its shard."""
        own = self.route.session.placement.own_part(param, param.data)
        shard = sharded.unpadded(param, own.numel()).to(own.device)
        if own.dtype != shard.dtype:
            return torch.ones((), dtype=torch.uint8, device=self.route.device)
        bits = BITS[own.dtype.itemsize]
        return (own.view(bits) != shard.view(bits)).any().to(self.route.device, torch.uint8)
