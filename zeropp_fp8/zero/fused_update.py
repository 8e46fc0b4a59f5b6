"""torch's fused Adam where the user left the choice to torch.

torch picks the foreach variant by itself, which passes over a flat partition a dozen times: about 90 bytes an element
against 28 for the fused kernel, 7 ms against 2 for 330M elements on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def use_fused_update(optimizer: torch.optim.Optimizer, updated: Sequence[Tensor] | None = None) -> bool:
    """Select `fused` in every group of a torch Adam or AdamW on a GPU that asks for neither fused nor foreach.

    `updated`: what the optimizer will update; None: the groups' parameters. ZeRO-3 leaves groups empty between steps.
    Returns whether a group was changed.
    """
    changed = False
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return changed
    for group in optimizer.param_groups:
        chosen = any(group.get(name) is not None for name in ("fused", "foreach"))
        params = group["params"] if updated is None else updated
        on_gpu = len(params) > 0 and all(p.is_cuda and p.is_floating_point() for p in params)
        if chosen or group.get("capturable") or group.get("differentiable") or not on_gpu:
            continue
        group["fused"] = changed = True
    for param, state in optimizer.state.items():
        # The fused kernel counts steps on the device.
        if isinstance(param, torch.Tensor) and param.is_cuda and torch.is_tensor(state.get("step")):
            state["step"] = state["step"].to(param.device)
    return changed
