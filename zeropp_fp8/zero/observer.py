"""What watches an engine while it trains (zeropp_fp8/numerics/); an engine has none unless its section asks for one."""

from __future__ import annotations

from torch import Tensor


class Observer:
    """Is told of each step, in this order, on every rank alike: what it does may be collective."""

    def loss_is(self, loss: Tensor) -> None:
        """`engine.backward` is called with the loss of a micro-batch, as the script has it."""

    def gradients_are_there(self) -> None:
        """All gradients of a step are reduced, and the optimizer has not seen them."""

    def step_ended(self) -> None:
        """A step has ended, or was skipped because gradients were not finite."""

    def state_dict(self) -> dict:
        """What a checkpoint is to keep; nothing, unless an observer has something."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """A checkpoint is loaded: what `state_dict` gave, or {} where it has nothing."""
