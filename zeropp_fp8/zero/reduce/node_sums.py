"""Whether gradients of several backward passes add up inside the node: where there is memory for them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.nn import Parameter

from zeropp_fp8.zero.memory import device_bytes
from zeropp_fp8.zero.session import Session

# Of a device's memory, that sums may take where the configuration leaves the choice: 8 billion parameters in fp32 on 8
# GPUs of 80 GB a node take 5 %, and still leave the room that stock ZeRO-3 would have.
SHARE_OF_MEMORY = 0.1


def numel_of_sums(session: Session, params: Iterable[Parameter], dtype: torch.dtype) -> int:
    """How many elements this rank's sums will have; 0: gradients of each backward pass are reduced to the end.

    Collective where memory decides.

    Args:
        params: of the model, ZeRO-3's or not yet.
        dtype: of the sums.
    """
    gradients, topology = session.config.gradients, session.topology
    if not session.config.quantizes_gradients or topology.nodes == 1 or gradients.accumulate_in == "world":
        return 0
    trainable = sum(getattr(p, "ds_numel", p.numel()) for p in params if p.requires_grad)
    numel = -(-trainable // topology.ranks_per_node)
    if gradients.accumulate_in == "node":
        return numel
    memory = device_bytes(session.device, session.ranks_here)
    fits = torch.tensor([int(numel * dtype.itemsize <= SHARE_OF_MEMORY * memory)], device=session.device)
    dist.all_reduce(fits, op=dist.ReduceOp.MIN, group=topology.group)
    return numel if fits.item() else 0
