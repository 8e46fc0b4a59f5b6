"""Which elements of which parameter lie on which rank, where parameters have owners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm.reduce_to_owners import OwnedPart, OwnerReducePlan
from zeropp_fp8.optim import UPDATES, StateFormats, Update, update_of
from zeropp_fp8.zero.owners.plan import TensorStates, balance_of, plan_parts
from zeropp_fp8.zero.placement import Range, Slices


@dataclass(frozen=True)
class OwnedRange:
    """Contiguous elements (whole rows) of a parameter on one rank."""

    owner: int
    start: int
    numel: int


class Owners(Slices):
    """Every parameter on one owner, or cut by rows between a few (plan.py), once they are planned.

    Args:
        optimizer: the engine's, if any: its update may need whole tensors.

    Attributes:
        balance: what the start table says of it; None: nothing is planned yet.
    """

    def __init__(self, rank: int, world_size: int, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__(rank, world_size)
        update = None if optimizer is None else update_of(optimizer)
        groups = [] if update is None else optimizer.param_groups
        self._updates = {id(p): (update.of_group(group), group) for group in groups for p in group["params"]}
        self._parts: dict[int, list[OwnedRange]] = {}  # by sharded.key, in ascending order of elements
        self.balance: str | None = None

    def plan(
        self,
        units: Sequence[Sequence[Parameter]],
        ranks_per_node: int,
        gradient_bytes: float,
        formats: StateFormats,
        wire_bytes: Sequence[Sequence[float]],
        split: Literal["balance", "none"],
    ) -> None:
        """Assign the parameters of all gather units.

        Args:
            units: parameters that are gathered together.
            gradient_bytes, formats: per element of those that are trained.
            wire_bytes: bytes per element of each parameter when it is gathered.
            split: see `plan_parts`.
        """
        params = [p for unit in units for p in unit]

        def trained(param: Parameter) -> float:
            return gradient_bytes + formats.bytes_per_parameter(self._update_of(param)[0].states.values())

        tensors = [
            TensorStates(
                name=str(sharded.key(p)),
                shape=tuple(sharded.shape(p)),
                bytes_per_element=sharded.shard(p).element_size() + (trained(p) if p.requires_grad else 0.0),
                block=index if len(unit) > 1 else None,
                wire_bytes_per_element=wire,
                operations=self._operations(p),
            )
            for index, (unit, wires) in enumerate(zip(units, wire_bytes))
            for p, wire in zip(unit, wires)
        ]
        planned = plan_parts(tensors, self.world_size, ranks_per_node, split)
        self._parts = {sharded.key(p): [] for p in params}
        for part in planned:
            first, end = part.element_range(tensors[part.tensor])
            self._parts[sharded.key(params[part.tensor])].append(OwnedRange(part.owner, first, end - first))
        memory, worst, mean, arithmetic = balance_of(tensors, planned, self.world_size)
        exchange = f"a block's exchange max/mean {worst:.2f} (mean block {mean:.2f})"
        if any(tensor.operations for tensor in tensors):
            exchange = f"updates of whole matrices max/mean {arithmetic:.3f}; {exchange}"
        self.balance = f"memory max/mean {memory:.3f}; {exchange}; {len(planned)} parts of {len(tensors)} tensors"

    def _operations(self, param: Parameter) -> int:
        update, group = self._update_of(param)
        return max(1, update.operations(sharded.shape(param), group)) if update.needs_whole else 0

    def _update_of(self, param: Parameter) -> tuple[Update, Mapping[str, Any]]:
        """The parameter's update, and its group; AdamW's where there is none that the plugin knows."""
        return self._updates.get(id(param), (UPDATES["AdamW"], {}))

    def parts(self, param: Parameter) -> list[OwnedRange]:
        """All ranks' parts of a parameter, in ascending order of elements."""
        return self._parts[sharded.key(param)]

    def of_all_ranks(self, param: Parameter) -> list[OwnedRange]:
        return self.parts(param)

    def ranges(self, param: Parameter) -> list[Range]:
        return [(part.start, part.numel) for part in self.parts(param) if part.owner == self.rank and part.numel]

    def reduce_plan(self, params: Sequence[Parameter], *args) -> OwnerReducePlan:
        owned = [(index, part) for index, param in enumerate(params) for part in self.parts(param)]
        return OwnerReducePlan([OwnedPart(i, part.owner, part.start, part.numel) for i, part in owned], *args)
