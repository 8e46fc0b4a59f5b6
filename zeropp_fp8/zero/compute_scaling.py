"""The compute formats of linear layers, as a part of a stage."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zeropp_fp8 import sharded
from zeropp_fp8.comm.issue import all_reduce
from zeropp_fp8.compute.experts import Projection
from zeropp_fp8.compute.gemm import execution
from zeropp_fp8.compute.grouped import has_grouped_gemm
from zeropp_fp8.config import patterns_of_gemms
from zeropp_fp8.zero.session import Session
from zeropp_fp8.zero.stage_part import Row, StagePart, shown


class ComputeScaling(StagePart):
    """The compute formats of linear layers. Delayed scaling reduces a step's amax at its end, in one collective."""

    if_lost = "delayed scaling starts afresh"

    def __init__(self, session: Session) -> None:
        self.session, self.scaling = session, session.conversion.scaling
        formats = self.scaling.compute.format
        self.gives_up = f"GEMMs of linear layers ({formats if isinstance(formats, str) else 'mixed formats'})"

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
        self.session.conversion.restore()  # plain layers again; torch.compile traces them anew
        self.session.parts.remove(self)

    def rows(self) -> list[Row]:
        """The compute formats of linear layers, and the layers that stay in high precision."""
        conversion, compute, device = self.session.conversion, self.scaling.compute, self.session.device
        formats = ", ".join(f"{role} {name}" for role, name in self.scaling.formats.items())
        # Old-style weight_norm keeps a plain tensor in `weight`.
        weights = [module.weight for module in conversion.converted.values()]
        numel = sum(math.prod(sharded.shape(weight)) for weight in weights)
        rows = [
            ("linear layers", f"{compute.scaling} scaling", numel, f"{len(conversion.converted)} layers; {formats}"),
            ("", "", 0, execution(device, compute.scaling)),
        ]
        experts = sum(isinstance(layer, Projection) for layer in conversion.converted.values())
        if experts and device.type == "cuda" and compute.scaling != "mx":
            how = "bf16 ones on FP8 tensor cores, others" if has_grouped_gemm(device) else "no groups of FP8 rows here:"
            rows.append(("packed experts", "", 0, f"{experts} weights; {how} emulated one after the other"))
        if compute.scaling == "delayed" and self.session.config.compile == "none":  # graphs are unfused
            where = "" if device.type == "cuda" else "; done on a GPU only, not here"
            remark = f"{len(conversion.fused)} norms and gated products hand codes to the layer after them{where}"
            rows.append(("fused with the cast", "", 0, remark))
        if conversion.adapted:
            why = "no GEMM operands, because PEFT's target_parameters add to them"
            rows.append(("adapted weights", "as values", 0, f"{shown(conversion.adapted)}: {why}"))
        for gemm in patterns_of_gemms(compute):
            names = [name for name, module in conversion.converted.items() if getattr(module.precision.high, gemm)]
            rows.append((f"GEMM {gemm}", "high precision", 0, f"{len(names)} layers: {shown(names)}"))
        names_of: dict[str, list[str]] = defaultdict(list)
        for name, reason in conversion.skipped.items():
            names_of[reason].append(name)
        for reason, names in names_of.items():
            rows.append(("linear layers", "high precision", 0, f"{shown(names)}: {reason}"))
        return rows
