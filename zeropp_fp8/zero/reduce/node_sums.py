"""Gradients of several backward passes, summed over the ranks of a node: they cross between nodes once a step.

With k micro-batches a step, N nodes of L ranks and M gradients, a node would otherwise send (N - 1) / N of k M: every
backward pass reduces to the end (qgZ, arXiv 2306.10209, section 3.3). Here each runs the first hop, and its result,
M / L on a rank, is added to what rests there in 16 or 32 bits; the last one, or the step, runs the second hop. A
gradient is then quantized for the network once instead of k times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8.comm.reduce_scatter import ReducePlan
from zeropp_fp8.zero.memory import device_bytes
from zeropp_fp8.zero.session import Session

# Of a device's memory, that sums may take where the configuration leaves the choice: 8 billion parameters in fp32 on 8
# GPUs of 80 GB a node take 5 %, and still leave the room that stock ZeRO-3 would have.
SHARE_OF_MEMORY = 0.1


@dataclass
class NodeSums:
    """What a unit's gradients add up to.

    Attributes:
        tensors: of `ReducePlan.new_sums`: 1 / ranks-per-node of the unit.
        backward_passes: how many are in them; 0: nothing is.
    """

    params: Sequence[Parameter]
    plan: ReducePlan
    tensors: list[Tensor]
    backward_passes: int = 0

    def headroom(self, more: int = 0) -> float:
        """How many times larger than a gradient a sum (with so many more) may be: a power of two rounds nothing."""
        return float(1 << (self.backward_passes + more - 1).bit_length())


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
