"""A feature of training as a stage knows it.

The stage names no feature. At each point of a step and of a checkpoint it goes through `session.parts`, in the same
order on every rank, so what a part does may be collective. A new feature is a new part, which who makes it adds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeropp_fp8.formats import WireFormat

Row = tuple[str, str, int, str]  # of the start table: what, its format, parameters (0: not said), remark


class StagePart:
    """Does nothing at each point; a part overrides those that concern it.

    Attributes:
        of_topology: whether its extra state means something to the same nodes and ranks only.
        gives_up: what `formats_changed` lets be in 16 or 32 bits, in words.
        if_lost: what is said where a checkpoint's extra state does not fit, so that the part starts afresh.
    """

    of_topology = False
    gives_up = ""
    if_lost = ""

    # -- a step, in this order ---------------------------------------------------------------------------------------

    def loss_is(self, loss: Tensor) -> None:
        """`engine.backward` is called with the loss of a micro-batch, as the script has it."""

    def backward_issued(self) -> None:
        """The host has nothing more to issue for a backward pass."""

    def gradients_ready(self) -> None:
        """All gradients of a step are reduced, and the optimizer has not seen them."""

    def step_ended(self, overflow: bool, scale_change: float) -> None:
        """A step has ended, or (`overflow`) was skipped because gradients were not finite.

        `scale_change`: the new loss scale over that of the step.
        """

    def step_counted(self) -> None:
        """The ledger has counted the step too. What is sent now belongs to none."""

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def extra_state(self) -> dict[str, Any]:
        """What training depends on beside weights and optimizer states, by keys of the part's own."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """A checkpoint is loaded: its extra state of all parts, {} where it has none.

        Raises:
            ValueError: it does not fit; it is loaded again with {} then.
        """

    def weights_loaded(self) -> None:
        """The weights of a checkpoint are there too. Collective."""

    # -- at other times ----------------------------------------------------------------------------------------------

    def formats_changed(self) -> None:
        """Between steps: what travels is in 16 or 32 bits from now on. A part that ends with it leaves the list."""

    def bytes_to_come(self) -> int:
        """What it will allocate later than at start."""
        return 0

    def metrics(self) -> dict[str, float]:
        """Its numbers now, by their names in telemetry.py, also once the engine has ended. Not collective."""
        return {}

    def rows(self) -> list[Row]:
        """Lines of the start table."""
        return []


def without_kernel(device: torch.device, wire_format: WireFormat | None) -> str:
    """A remark where a GPU has no kernel for a format."""
    if device.type != "cuda" or wire_format is None:
        return ""
    from zeropp_fp8 import kernels

    return "" if kernels.supports(wire_format) else "no kernel for this format or blocks this long: torch code, slower"


def shown(names: list[str]) -> str:
    """The first four, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") or "none"
