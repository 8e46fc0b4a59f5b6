"""Updates a unit's secondary shard, with differences (difference.py) or with the whole weights.

Slices and whole tensors differ in the places of their rows (HoldsRows); the update is the same.
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
    """The interface of a unit for its delta.

    Attributes:
        rows_held: rows with the same contents in the result of the first hops; 0: the unit is always sent as a whole.
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
        """uint8 [rows, bytes]: the payloads in `held` that differences are added to."""

    def own_held_row(self, held: Tensor) -> Tensor:
        """uint8 [1, bytes]: this rank's payload in `held`."""

    def bring_own_row(self, held: Tensor) -> list[dist.Work]:
        """Start the first hops with the row of `own_held_row`; their result is `held`."""

    def shards(self) -> list[Tensor]:
        """This rank's part of each tensor of a payload, flat."""

    def own_row_of_differences(self, brought: Tensor) -> Tensor:
        """uint8 [1, bytes]: this rank's payload of differences in `brought`, the result of the first hops."""

    def bring_differences(self, brought: Tensor) -> list[dist.Work]:
        """Start the first hops with the row of `own_row_of_differences`; their result is `brought`."""


class Delta:
    """Manages differences of one unit, on the ranks that hold a copy of its previous weights.

    Attributes:
        difference: encodes and adds the differences; None if the unit is always sent as a whole.
        large_step: a script has written weights or master weights; the next step copies the latter to the former.
        aside: the `state` from when the unit stopped holding a copy. Its next gather restores it. Else empty.
    """

    def __init__(self, unit: HoldsRows) -> None:
        self._unit = unit
        self.difference: Difference | None = None
        self.large_step = False
        self.aside: dict = {}

    def is_of(self, param: Parameter) -> bool:
        """Whether differences update a parameter's secondary shard. Small persistent parameters have no such shard."""
        unit, session = self._unit, self._unit.route.session
        differs = session.formats.differences is not None and unit.rows_held > 0 and not unit.persistent
        return differs and not session.sends_exactly("weights", param)

    def format_of(self, param: Parameter) -> WireFormat:
        """The format of a parameter's differences; the parameter's own format if it is sent whole."""
        return self._unit.route.session.formats.differences if self.is_of(param) else self._unit.format_of(param)

    def lay_out(self, own: Contents, brought: Contents) -> None:
        """Send differences from now on, if any of the unit's parameters has them."""
        route, self.difference = self._unit.route, None
        if any(self.is_of(param) for param in self._unit.params):
            self.difference = Difference(own, brought, route.device, route.fits)

    # -- a gather ----------------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether the next first hops bring differences to the copy; else they bring the whole (`first_hops`).

        The answer is the same on all ranks that exchange them.
        """
        return self.difference is not None and self._unit.keeps_secondary and self.difference.is_due

    @property
    def brought_bytes(self) -> int:
        """Bytes of differences that the first hops bring; 0 if none of those ranks owns anything."""
        return self._unit.rows_held * self.difference.brought.row_bytes

    def begin(self) -> None:
        """The whole unit is about to be sent; it is held as a copy from then on."""
        if self.difference is not None and self._unit.keeps_secondary:
            self.difference.begin()

    def send(self, held: Tensor, brought: Tensor) -> list[dist.Work]:
        """Encode this rank's differences from `held`, and start the first hops; their result is `brought`."""
        unit = self._unit
        self.difference.encode(unit.shards(), unit.own_held_row(held), unit.own_row_of_differences(brought))
        return unit.bring_differences(brought)

    def add(self, brought: Tensor, held: Tensor) -> None:
        """Add the differences in `brought`, the result of the first hops, to `held`."""
        rows = brought.view(self._unit.rows_held, self.difference.brought.row_bytes)
        self.difference.add(rows, self._unit.held_rows(held))

    def changed(self, by_step: bool) -> None:
        """The weights were written; `by_step`: by a step of the optimizer."""
        if not by_step or self.large_step:
            self.forget()
        if by_step:
            self.large_step = False
            self.aside = self.aside and {**self.aside, "current": False}

    def forget(self) -> None:
        """Stop using the copy, or the state put aside, as the base of differences."""
        self.aside = {}
        if self.difference is not None:
            self.difference.forget()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> dict:
        """The copy's state that training depends on, for `hold_again`; it may be empty. No gather may be pending."""
        state = self._held()
        # The copy equals the current weights: the next full gather brings the same.
        return {} if state and state["current"] and not state["steps"] else state

    def _held(self) -> dict:
        unit, difference = self._unit, self.difference
        if self.large_step:
            return {}  # loaded weights are master weights, far from the copy
        if self.aside or difference is None or not difference.begun or unit.secondary is None:
            return self.aside
        own = unit.own_held_row(unit.secondary).view(-1).cpu()
        return {"row": own, "holds": self._holds(), "current": unit.secondary_is_current, **difference.state()}

    def put_aside(self) -> None:
        """Keep only this rank's row of the copy."""
        self.aside = self._held()
        if self.difference is not None:
            self.difference.forget()

    def take_aside(self) -> dict:
        """The state that was put aside, if it fits this unit, else empty. The same on all ranks."""
        state, self.aside = self.aside, {}
        fits = self.difference is not None and self._unit.keeps_secondary and state["holds"] == self._holds()
        return state if fits else {}

    def _holds(self) -> str:
        """A description of rows: formats, and placement on ranks. The number of bytes alone may agree by chance.

        It is a string, so that stock can read it without the plugin.
        """
        unit, placement = self._unit, self._unit.route.session.placement
        return repr([(unit.format_of(param), placement.of_all_ranks(param)) for param in unit.params])

    def hold_again(self, state: dict, held: Tensor) -> Sequence[dist.Work]:
        """Fill `held` with the copy from when `state` was taken. Collective among the ranks of the first hops."""
        self._unit.own_held_row(held).view(-1).copy_(state["row"])
        self.difference.continue_from(state)
        return self._unit.bring_own_row(held)
