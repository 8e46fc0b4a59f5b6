"""Error feedback (comm/error_feedback.py) as a part of a stage: it says when residuals are reset, and saves them."""

from __future__ import annotations

from typing import Any

from zeropp_fp8.comm import ErrorFeedback
from zeropp_fp8.zero.session import Session
from zeropp_fp8.zero.stage_part import Row, StagePart

_GIGA = 1e9


class Residuals(StagePart):
    """Residuals of the hop between nodes, in units of the scaled gradient; they belong to this topology's hops."""

    of_topology = True
    if_lost = "error feedback starts afresh"

    def __init__(self, session: Session, feedback: ErrorFeedback, numel: int, num_bytes: int) -> None:
        self.session, self.feedback = session, feedback
        self.numel, self.num_bytes = numel, num_bytes  # of trained parameters; of their residuals

    def step_ended(self, overflow: bool, scale_change: float) -> None:
        if overflow or scale_change != 1.0:
            self.feedback.reset()

    def extra_state(self) -> dict[str, Any]:
        return {"error_feedback": self.feedback.state_dict()}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self.feedback.reset()
        self.feedback.load_state_dict(state.get("error_feedback", {}))

    def bytes_to_come(self) -> int:
        return self.num_bytes

    def formats_changed(self) -> None:
        self.session.parts.remove(self)

    def rows(self) -> list[Row]:
        if not self.num_bytes:
            return []
        remark = f"what the hop between nodes drops: {self.num_bytes / _GIGA:.3g} GB per rank, from step 1 on"
        return [("error feedback", f"int8 (block {self.session.config.gradients.block_size})", self.numel, remark)]
