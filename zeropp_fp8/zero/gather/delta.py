"""How a unit's secondary shard is brought up to date: only what has changed crosses (difference.py), or all of it.

Slices and whole tensors differ in which rows lie where (HoldsRows); what is done with them is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8.formats import WireFormat
from zeropp_fp8.zero.gather.difference import Contents, Difference
from zeropp_fp8.zero.gather.route import Route


class HoldsRows(Protocol):
    """A unit, as its delta knows it.

    Attributes:
        rows_held: rows of the same contents in what the first hops bring; 0: it always travels as a whole.
    """

    params: list[Parameter]
    route: Route
    persistent: bool
    keeps_secondary: bool
    secondary: Tensor | None
    secondary_is_current: bool
    rows_held: int

    def format_of(self, param: Parameter) -> WireFormat:
        """The wire format of a parameter."""

    def held_rows(self, held: Tensor) -> Tensor:
        """uint8 [rows, bytes]: those payloads in `held` that differences are added to."""

    def own_held_row(self, held: Tensor) -> Tensor:
        """uint8 [1, bytes]: this rank's payload there."""

    def bring_own_row(self, held: Tensor) -> list[dist.Work]:
        """Start the first hops with what `own_held_row` has; their result is `held`."""

    def shards(self) -> list[Tensor]:
        """This rank's part of each tensor of a payload, flat."""

    def own_row_of_differences(self, brought: Tensor) -> Tensor:
        """uint8 [1, bytes]: this rank's payload of differences in what the first hops bring of them."""

    def bring_differences(self, brought: Tensor) -> list[dist.Work]:
        """Start the first hops with what `own_row_of_differences` has; their result is `brought`."""


class Delta:
    """What ranks that hold a unit's weights as they were have to do with differences to them.

    Attributes:
        difference: how it travels to them; None where it always travels as a whole.
        large_step: somebody has written weights or master weights, and the next step makes the former the latter.
        aside: `state` of when the unit stopped holding anything, which its next gather brings back; else empty.
    """

    def __init__(self, unit: HoldsRows) -> None:
        self._unit = unit
        self.difference: Difference | None = None
        self.large_step = False
        self.aside: dict = {}

    def is_of(self, param: Parameter) -> bool:
        """Whether a secondary shard of a parameter is made of differences. Small ones that stay gathered have none."""
        unit, session = self._unit, self._unit.route.session
        differs = session.formats.differences is not None and unit.rows_held > 0 and not unit.persistent
        return differs and not session.sends_exactly("weights", param)

    def format_of(self, param: Parameter) -> WireFormat:
        """What a parameter travels in where only how it has changed does; its own format where it travels whole."""
        return self._unit.route.session.formats.differences if self.is_of(param) else self._unit.format_of(param)

    def lay_out(self, own: Contents, brought: Contents) -> None:
        """From now on differences travel, if any of the unit's parameters does so."""
        route, self.difference = self._unit.route, None
        if any(self.is_of(param) for param in self._unit.params):
            self.difference = Difference(own, brought, route.device, route.fits)

    # -- a gather ----------------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether the first hops are about to bring differences to what is held; else all of it (`first_hops`).

        The same on all ranks that exchange them.
        """
        return self.difference is not None and self._unit.keeps_secondary and self.difference.is_due

    @property
    def brought_bytes(self) -> int:
        """Bytes of differences that the first hops bring; none where none of those ranks owns anything."""
        return self._unit.rows_held * self.difference.brought.row_bytes

    def begin(self) -> None:
        """All of the unit is about to travel, and is held from then on."""
        if self.difference is not None and self._unit.keeps_secondary:
            self.difference.begin()

    def send(self, held: Tensor, brought: Tensor) -> list[dist.Work]:
        """Encode how this rank's shards differ from `held`, and start the first hops, whose result is `brought`."""
        unit = self._unit
        self.difference.encode(unit.shards(), unit.own_held_row(held), unit.own_row_of_differences(brought))
        return unit.bring_differences(brought)

    def add(self, brought: Tensor, held: Tensor) -> None:
        """Add what the first hops have brought to `held`."""
        rows = brought.view(self._unit.rows_held, self.difference.brought.row_bytes)
        self.difference.add(rows, self._unit.held_rows(held))

    def changed(self, by_step: bool) -> None:
        """The weights were written, `by_step` of the optimizer."""
        if not by_step or self.large_step:
            self.forget()
        if by_step:
            self.large_step = False
            self.aside = self.aside and {**self.aside, "current": False}

    def forget(self) -> None:
        """What is held, or was put aside, is no base of a difference."""
        self.aside = {}
        if self.difference is not None:
            self.difference.forget()

    # -- what checkpoints hold ---------------------------------------------------------------------------------------

    def state(self) -> dict:
        """What training depends on of what is held, while no gather is under way: empty, or `hold_again` needs it."""
        state = self._held()
        # The weights as they are: the next full gather brings the same.
        return {} if state and state["current"] and not state["steps"] else state

    def _held(self) -> dict:
        unit, difference = self._unit, self.difference
        if self.large_step:
            return {}  # weights that are loaded are the masters, far from what is held
        if self.aside or difference is None or not difference.begun or unit.secondary is None:
            return self.aside
        own = unit.own_held_row(unit.secondary).view(-1).cpu()
        return {"row": own, "holds": self._holds(), "current": unit.secondary_is_current, **difference.state()}

    def put_aside(self) -> None:
        """Keep of what is held this rank's row only."""
        self.aside = self._held()
        if self.difference is not None:
            self.difference.forget()

    def take_aside(self) -> dict:
        """What was put aside, if it is of a unit like this one. The same on all ranks."""
        state, self.aside = self.aside, {}
        fits = self.difference is not None and self._unit.keeps_secondary and state["holds"] == self._holds()
        return state if fits else {}

    def _holds(self) -> str:
        """What rows are of: formats, and what lies on which rank. Rows of others may have as many bytes.

        A string, which stock can read where the plugin is not installed.
        """
        unit, placement = self._unit, self._unit.route.session.placement
        return repr([(unit.format_of(param), placement.of_all_ranks(param)) for param in unit.params])

    def hold_again(self, state: dict, held: Tensor) -> Sequence[dist.Work]:
        """Fill `held` with what was held when `state` was taken. Collective among the ranks of the first hops."""
        self._unit.own_held_row(held).view(-1).copy_(state["row"])
        self.difference.continue_from(state)
        return self._unit.bring_own_row(held)
