"""Parts of a stage that wrap what is made below it: delayed scaling, what nodes hold of weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8.comm.issue import all_reduce
from zeropp_fp8.comm.ledger import OUTSIDE
from zeropp_fp8.compute.gemm import execution
from zeropp_fp8.config import patterns_of_gemms
from zeropp_fp8.zero.part import Row, StagePart, shown
from zeropp_fp8.zero.session import Session

if TYPE_CHECKING:
    from zeropp_fp8.zero.gather.gatherer import Gatherer


class ComputeScaling(StagePart):
    """What linear layers compute in. With delayed scaling, amax of a step is reduced at its end, in one collective."""

    if_lost = "delayed scaling starts afresh"

    def __init__(self, session: Session) -> None:
        self.session, self.scaling = session, session.conversion.scaling

    def step_ended(self, overflow: bool, scale_change: float) -> None:
        session = self.session

        def largest_of_all(amax: Tensor) -> None:
            all_reduce(amax, dist.ReduceOp.MAX, session.topology.group, session.ledger)

        with session.ledger.counting("other"):
            several = largest_of_all if session.topology.world_size > 1 else None
            self.scaling.end_step(several, session.device, overflow, scale_change)

    def extra_state(self) -> dict[str, Any]:
        state = self.scaling.state_dict()
        return {"compute": state} if state else {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self.scaling.load_state_dict(state.get("compute", {}))

    def formats_changed(self) -> None:
        self.session.conversion.restore()  # plain layers again, which torch.compile traces anew
        self.session.conversion = None
        self.session.parts.remove(self)

    def rows(self) -> list[Row]:
        """What linear layers compute in, and which stay in high precision."""
        conversion, compute, device = self.session.conversion, self.scaling.compute, self.session.device
        formats = ", ".join(f"{role} {name}" for role, name in self.scaling.formats.items())
        # Old-style weight_norm keeps a plain tensor there.
        weights = [module.weight for module in conversion.converted.values()]
        numel = sum(math.prod(getattr(weight, "ds_shape", weight.shape)) for weight in weights)
        rows = [
            ("linear layers", f"{compute.scaling} scaling", numel, f"{len(conversion.converted)} layers; {formats}"),
            ("", "", 0, execution(device, compute.scaling)),
        ]
        if compute.scaling == "delayed":
            where = "" if device.type == "cuda" else "; done on a GPU only, not here"
            remark = f"{len(conversion.fused)} norms and gated products hand codes to the layer after them{where}"
            rows.append(("fused with the cast", "", 0, remark))
        for gemm in patterns_of_gemms(compute):
            names = [name for name, module in conversion.converted.items() if getattr(module.precision.high, gemm)]
            rows.append((f"GEMM {gemm}", "high precision", 0, f"{len(names)} layers: {shown(names)}"))
        names_of: dict[str, list[str]] = defaultdict(list)
        for name, reason in conversion.skipped.items():
            names_of[reason].append(name)
        for reason, names in names_of.items():
            rows.append(("linear layers", "high precision", 0, f"{shown(names)}: {reason}"))
        return rows


class HeldWeights(StagePart):
    """What nodes hold of each other's weights, to which differences are added.

    Attributes:
        wrote_alone: since the last step somebody has written to this rank's part of master weights.
    """

    of_topology = True

    def __init__(self, session: Session, gatherer: Gatherer, names: Mapping[Parameter, str]) -> None:
        self.session, self.gatherer, self.names = session, gatherer, names
        self.wrote_alone = False
        self._differs = session.difference_format is not None
        self._saved: dict = {}

    def gradients_ready(self) -> None:
        if self.session.difference_format is None:
            return
        with self.session.ledger.counting("other"):
            if self._somebody_wrote_alone():  # the host waits for the device next in any case
                for unit in self.gatherer.units:
                    unit.delta.large_step = True

    def _somebody_wrote_alone(self) -> bool:
        """Whether a rank has, of which the others cannot know: then differences to copies are not small. Collective."""
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
                if self._somebody_wrote_alone():  # the weights are master weights now, far from what was held
                    held = {}
        self.gatherer.hold_again(held, self.names)
