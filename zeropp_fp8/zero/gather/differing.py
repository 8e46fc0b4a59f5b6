"""Units of which only how they have changed crosses, where ranks hold what they were (difference.py).

Slices and whole tensors differ in which rows lie where; what is done with them is the same.
"""

from __future__ import annotations

from abc import abstractmethod

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8.formats import SharedScaleFormat, WireFormat
from zeropp_fp8.zero.gather.difference import Contents, Difference
from zeropp_fp8.zero.gather.gemm_weights import WIRE_FORMAT
from zeropp_fp8.zero.gather.kinds import Kind
from zeropp_fp8.zero.gather.units import Unit


class DifferingUnit(Unit):
    """A unit whose secondary shard may be made of differences.

    Attributes:
        difference: how it travels to ranks that hold what it was; None where it always travels as a whole.
        large_step: somebody has written weights or master weights, and the next step makes the former the latter.
    """

    def __init__(self, params: list[Parameter], kind: Kind, persistent: bool = False) -> None:
        super().__init__(params, kind, persistent)
        self.difference: Difference | None = None
        self.large_step = False
        self.layout = None  # where everything lies, as each kind of unit has it

    def forget_layout(self) -> None:
        self.layout = None

    # -- what its parameters are on the wire -------------------------------------------------------------------------

    @abstractmethod
    def bytes_in(self, wire_format: WireFormat, param: Parameter) -> float:
        """Bytes that a rank sends of a parameter in a format, on average."""

    def bytes_of(self, param: Parameter) -> float:
        codes = SharedScaleFormat(WIRE_FORMAT)
        return self.bytes_in(codes if self.travels_as_operand(param) else self.format_of(param), param)

    def first_bytes_of(self, param: Parameter) -> float:
        if not self.keeps_secondary or not self._differs(param):
            return self.bytes_of(param)
        return self.bytes_in(self.route.session.difference_format, param)

    def is_exact(self, param: Parameter) -> bool:
        return super().is_exact(param) and not self._differs(param)

    def _differs(self, param: Parameter) -> bool:
        """Whether a secondary shard of a parameter is made of differences. Small ones that stay gathered have none."""
        differs = self.route.session.difference_format is not None and not self.kind.sends_what_rests
        return differs and not self.persistent and not self.route.session.sends_exactly("weights", param)

    def format_of_difference(self, param: Parameter) -> WireFormat:
        """What a parameter travels in where only how it has changed does; its own format where it travels whole."""
        return self.route.session.difference_format if self._differs(param) else self.format_of(param)

    def let_differ(self, own: Contents, brought: Contents) -> None:
        """From now on differences travel, if any of the unit's parameters does so."""
        self.difference, self.aside = None, {}
        if any(self._differs(param) for param in self.params):
            self.difference = Difference(own, brought, self.route.device, self.route.fits)

    # -- which rows lie where ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def rows_held(self) -> int:
        """Rows of the same contents in what the first hops bring."""

    @abstractmethod
    def held_rows(self, held: Tensor) -> Tensor:
        """uint8 [rows, bytes]: those payloads in `held` that differences are added to."""

    @abstractmethod
    def own_held_row(self, held: Tensor) -> Tensor:
        """uint8 [1, bytes]: this rank's payload there."""

    @abstractmethod
    def bring_own_row(self, held: Tensor) -> list[dist.Work]:
        """Start the first hops with what `own_held_row` has; their result is `held`."""

    # -- a gather ----------------------------------------------------------------------------------------------------

    @property
    def brings_differences(self) -> bool:
        return self.difference is not None and self.keeps_secondary and self.difference.is_due

    @property
    def brought_bytes(self) -> int:
        """Bytes of differences that the first hops bring; none where none of those ranks owns anything."""
        return self.rows_held * self.difference.brought.row_bytes

    @abstractmethod
    def send_differences(self, held: Tensor, brought: Tensor) -> list[dist.Work]:
        """Encode how this rank's shards differ from `held`, and start the first hops, whose result is `brought`."""

    def add_differences(self, brought: Tensor, held: Tensor) -> None:
        """Add what the first hops have brought to `held`."""
        rows = brought.view(self.rows_held, self.difference.brought.row_bytes)
        self.difference.add(rows, self.held_rows(held))

    def changed(self, by_step: bool = False) -> None:
        super().changed(by_step)
        if not by_step or self.large_step:
            self._forget_held()
        elif self.aside:
            self.aside = {**self.aside, "current": False}
        if by_step:
            self.large_step = False

    def put_aside(self) -> None:
        state = self._held()  # all of it: a step may come before the next gather
        super().put_aside()
        self._forget_held()
        self.aside = state

    def expect_large_step(self) -> None:
        self.large_step = True

    def continue_from(self, state: dict) -> None:
        self.large_step = False

    def _forget_held(self) -> None:
        self.aside = {}
        if self.difference is not None:
            self.difference.forget()

    # -- what checkpoints hold ---------------------------------------------------------------------------------------

    def held_state(self) -> dict:
        state = self._held()
        if not state or (state["current"] and not state["steps"]):
            state = {}  # the weights as they are: the next full gather brings the same
        if self.large_step:
            state = {}  # weights that are loaded are the masters, far from what is held
        return state

    def _held(self) -> dict:
        if self.aside:
            return self.aside
        difference = self.difference
        if difference is None or not difference.begun or self.secondary is None:
            return {}
        own = self.own_held_row(self.secondary).view(-1).cpu()
        return {"row": own, "holds": self._holds(), "current": self.secondary_is_current, **difference.state()}

    def can_hold(self, state: dict) -> bool:
        return self.difference is not None and state.get("holds") == self._holds()

    def _holds(self) -> str:
        """What rows are of: formats, and what lies on which rank. Rows of others may have as many bytes.

        A string, which stock can read where the plugin is not installed.
        """
        placement = self.route.session.placement
        return repr([(self.format_of(param), placement.of_all_ranks(param)) for param in self.params])

    def hold_again(self, state: dict, held: Tensor) -> list[dist.Work]:
        self.aside = {}
        self.own_held_row(held).view(-1).copy_(state["row"])
        self.difference.continue_from(state)
        return self.bring_own_row(held)
