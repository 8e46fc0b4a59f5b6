"""Reducing the gradients of a unit with qgZ inside ZeRO-3."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8.comm import ErrorFeedback
from zeropp_fp8.comm.lanes import Lane
from zeropp_fp8.comm.reduce_scatter import ReduceLanes, ReduceScatterPlan, Rings
from zeropp_fp8.zero.session import Session


class GradientReducer:
    """Quantized mean of gradients over the data-parallel group, one message a unit and hop.

    Args:
        last_stream: on a GPU, the stream on which results are written.
    """

    def __init__(self, session: Session, last_stream: torch.cuda.Stream | None = None) -> None:
        self.session = session
        self.error_feedback = ErrorFeedback() if session.config.gradients.error_feedback else None
        self._plans: dict[tuple, ReduceScatterPlan] = {}
        self._rings = Rings.on(session.device)
        self._lanes = ReduceLanes(Lane(session.device), Lane(session.device, last_stream))
        self._under_way: deque[Iterator[None]] = deque()

    def _plan_of(self, params: Sequence[Parameter], grads: Sequence[Tensor]) -> ReduceScatterPlan:
        key = tuple((p.ds_id, g.dtype) for p, g in zip(params, grads))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = ReduceScatterPlan(
                [p.ds_shape for p in params],
                [g.dtype for g in grads],
                self.session.topology,
                self.session.intra_format,
                self.session.inter_format,
                self.session.device,
            )
        return plan

    def own_numel(self, param: Parameter) -> int:
        """Elements of the parameter's slice on this rank, without padding."""
        size = -(-param.ds_numel // self.session.topology.world_size)
        return min(size, max(0, param.ds_numel - self.session.topology.rank * size))

    def start(
        self,
        params: Sequence[Parameter],
        grads: Sequence[Tensor],
        names: Sequence[str],
        results: Sequence[Tensor],
        accumulate: bool,
    ) -> None:
        """Start writing (or adding) this rank's slices of the mean gradients to `results`; `drain` ends it.

        Args:
            params: ZeRO-3 parameters, in the same order on every rank.
            grads: their full gradients (fp32, bf16 or fp16), not needed any more afterwards.
            names: stable names, the keys of error feedback.
            results: for each parameter [own_numel(param)], fp32, bf16 or fp16.
        """
        session = self.session
        with session.ledger.counting("gradients"):
            session.ledger.stock_would_send(sum(p.ds_tensor.ds_numel for p in params) * session.topology.world_size)
        steps = self._plan_of(params, grads).run(
            grads,
            results,
            accumulate=accumulate,
            rings=self._rings,
            lanes=self._lanes,
            ledger=session.ledger,
            generator=session.generators["gradients"],
            error_feedback=self.error_feedback,
            keys=names,
        )
        with session.ledger.counting("gradients"):
            if session.device.type == "cuda":
                for _ in steps:  # nothing here waits on the host
                    pass
                return
            # On a CPU each reduction moves one hop on whenever the next one has started, so that hops overlap.
            next(steps, None)
            still = deque(earlier for earlier in self._under_way if next(earlier, self) is not self)
            still.append(steps)
            self._under_way = still

    def drain(self) -> None:
        """End all reductions: the current stream sees their results."""
        with self.session.ledger.counting("gradients"):
            for steps in self._under_way:
                for _ in steps:
                    pass
        self._under_way.clear()
        self._lanes.first.before_current()
        self._lanes.last.before_current()

    def reduce(
        self, params: Sequence[Parameter], grads: Sequence[Tensor], names: Sequence[str], dtype: torch.dtype
    ) -> list[Tensor]:
        """For each parameter this rank's slice of the mean gradient, without padding, in `dtype`; complete."""
        device = self.session.device
        results = [torch.empty(self.own_numel(p), dtype=dtype, device=device) for p in params]
        self.start(params, [g.contiguous() for g in grads], names, results, accumulate=False)
        self.drain()
        return results
