"""The cached weights of other nodes, to which differences are added, as a part of a stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from zeropp_fp8.comm.issue import all_reduce
from zeropp_fp8.comm.ledger import OUTSIDE
from zeropp_fp8.zero.gather.gatherer import Gatherer
from zeropp_fp8.zero.session import Session
from zeropp_fp8.zero.stage_part import StagePart


class HeldWeights(StagePart):
    """The cached weights of other nodes, to which differences are added.

    Attributes:
        wrote_alone: a script has written to this rank's part of master weights since the last step.
    """

    of_topology = True

    def __init__(self, session: Session, gatherer: Gatherer, names: Mapping[Parameter, str]) -> None:
        self.session, self.gatherer, self.names = session, gatherer, names
        self.wrote_alone = False
        self._differs = session.formats.differences is not None
        self._saved: dict = {}

    def gradients_ready(self) -> None:
        if self.session.formats.differences is None:
            return
        with self.session.ledger.counting("other"):
            if self._somebody_wrote_alone():  # the host waits for the device here; it would do so next in any case
                for unit in self.gatherer.units:
                    unit.delta.large_step = True

    def _somebody_wrote_alone(self) -> bool:
        """Whether any rank wrote alone, unknown to the others: differences to copies are then not small. Collective."""
        wrote = torch.tensor([self.wrote_alone], dtype=torch.uint8, device=self.session.device)
        self.wrote_alone = False
        all_reduce(wrote, dist.ReduceOp.MAX, self.session.topology.group, self.session.ledger)
        return bool(wrote.item())

    def extra_state(self) -> dict[str, Any]:
        held = self.gatherer.held_states(self.names)
        return {"held weights": held, "wrote alone": self.wrote_alone} if held else {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self._saved, self.wrote_alone = state.get("held weights", {}), state.get("wrote alone", False)

    def weights_loaded(self) -> None:
        held, self._saved = self._saved, {}
        if self._differs:
            with self.session.ledger.counting(OUTSIDE):
                if self._somebody_wrote_alone():  # the weights are master weights now, far from the cached ones
                    held = {}
        self.gatherer.hold_again(held, self.names)
