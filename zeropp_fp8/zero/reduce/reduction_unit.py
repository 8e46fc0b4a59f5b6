"""Parameters whose gradients are reduced in one message per hop, and their sums that accumulate in the node.

With k micro-batches per step, N nodes of L ranks and M gradients, a node would otherwise send (N - 1) / N of k M: every
backward pass reduces to the end (qgZ, arXiv 2306.10209, section 3.3). Here each pass runs the first hop, and adds its
result, M / L per rank, to sums in 16 or 32 bits; the last pass, or the step, runs the second hop. So a gradient is
quantized for the network once instead of k times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm.reduce_scatter import ReducePlan, slice_numel
from zeropp_fp8.zero.session import Session


@dataclass(eq=False)
class ReductionUnit:
    """A reduction unit of an engine.

    Attributes:
        params: in the same order on every rank.
        names: their stable names, the keys of error feedback.
        plan: of its reduction; made with the first gradients, for their `dtypes`.
        sums: from `ReducePlan.new_sums`: 1 / ranks-per-node of the gradients.
        backward_passes: how many passes the sums contain; 0: there are no sums in the node.
    """

    session: Session
    params: Sequence[Parameter]
    names: Sequence[str]
    plan: ReducePlan | None = None
    dtypes: tuple[torch.dtype, ...] = ()
    sums: list[Tensor] = field(default_factory=list)
    backward_passes: int = 0
    stock_numel: int = field(init=False)  # elements that stock would reduce

    def __post_init__(self) -> None:
        world = self.session.topology.world_size
        self.stock_numel = sum(slice_numel(sharded.numel(p), world) for p in self.params) * world

    def planned(self, grads: Sequence[Tensor]) -> ReducePlan:
        """Return the plan for gradients of these dtypes; while there are sums, the plan that made them."""
        dtypes = tuple([grad.dtype for grad in grads])
        if self.dtypes != dtypes and not self.backward_passes:
            session, self.dtypes, self.sums = self.session, dtypes, []
            # Parameters that are sent in full are reduced as vectors are.
            exactly = [session.sends_exactly("gradients", p) for p in self.params]
            shapes = [(sharded.numel(p),) if e else sharded.shape(p) for p, e in zip(self.params, exactly)]
            formats = session.formats.within, session.formats.between
            self.plan = session.placement.reduce_plan(
                self.params, shapes, dtypes, session.topology, *formats, session.device
            )
        return self.plan

    def headroom(self, more: int = 0) -> float:
        """Return how many times larger than a gradient the sums (with so many more) may be: a power of two is exact.

        It is 1 without sums.
        """
        return float(1 << max(0, self.backward_passes + more - 1).bit_length())
