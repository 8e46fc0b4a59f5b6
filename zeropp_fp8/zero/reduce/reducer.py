"""Reducing the gradients of a unit with qgZ inside ZeRO-3."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8.comm import ErrorFeedback
from zeropp_fp8.comm.lanes import Lane
from zeropp_fp8.comm.reduce_scatter import ReduceLanes, ReducePlan, Rings, slice_numel
from zeropp_fp8.zero.reduce.scales import GradientScales
from zeropp_fp8.zero.session import Session


class GradientReducer:
    """Quantized mean of gradients over the data-parallel group, one message a unit and hop.

    Args:
        last_stream: on a GPU, the stream on which results are written.
    """

    def __init__(self, session: Session, last_stream: torch.cuda.Stream | None = None) -> None:
        self.session = session
        self.error_feedback = ErrorFeedback() if session.config.gradients.error_feedback else None
        self._plans: dict[tuple, ReducePlan] = {}
        self._rings = Rings.on(session.device)
        self._lanes = ReduceLanes(Lane(session.device), Lane(session.device, last_stream))
        self._under_way: deque[Iterator[None]] = deque()
        self.scales: GradientScales | None = None  # where ranks share scales: set once the order of reduction is known

    def _plan_of(self, params: Sequence[Parameter], grads: Sequence[Tensor]) -> ReducePlan:
        key = tuple((p.ds_id, g.dtype) for p, g in zip(params, grads))
        plan = self._plans.get(key)
        if plan is None:
            session = self.session
            args = (
                [p.ds_shape for p in params],
                [g.dtype for g in grads],
                session.topology,
                session.intra_format,
                session.inter_format,
                session.device,
            )
            add_codes = session.config.gradients.reduction == "nccl"
            plan = self._plans[key] = session.placement.reduce_plan(params, *args, add_codes=add_codes)
        return plan

    def start(
        self,
        params: Sequence[Parameter],
        grads: Sequence[Tensor],
        names: Sequence[str],
        results: Sequence[Tensor],
        accumulate: bool,
        arrived: Callable[[], None] | None = None,
    ) -> None:
        """Start writing (or adding) this rank's slices of the mean gradients to `results`; `drain` ends it.

        Args:
            params: ZeRO-3 parameters, in the same order on every rank.
            grads: their full gradients (fp32, bf16 or fp16), not needed any more afterwards.
            names: stable names, the keys of error feedback.
            results: for each parameter this rank's elements, fp32, bf16 or fp16; uint8 gets FP8 codes.
            arrived: called once they are written, where they are (on a GPU: on that stream).
        """
        session = self.session
        plan = self._plan_of(params, grads)
        with session.ledger.counting("gradients"):
            world = session.topology.world_size
            session.ledger.stock_would_send(sum(slice_numel(p.ds_numel, world) for p in params) * world)
        shared = None
        if self.scales is not None:
            with session.ledger.counting("gradients"):
                shared = self.scales.of(params, grads)
        steps = plan.run(
            grads,
            results,
            accumulate=accumulate,
            rings=self._rings,
            lanes=self._lanes,
            ledger=session.ledger,
            generator=session.generators["gradients"],
            error_feedback=self.error_feedback,
            keys=names,
            shared=shared,
        )
        if arrived is not None:
            steps = self._followed_by(steps, arrived)
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

    def _followed_by(self, steps: Iterator[None], arrived: Callable[[], None]) -> Iterator[None]:
        yield from steps
        if self.session.topology.world_size == 1:  # all is issued on the current stream
            arrived()
            return
        with self._lanes.last:
            arrived()

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
        results = [torch.empty(self.session.own_numel(p), dtype=dtype, device=device) for p in params]
        # Scales that ranks share lie in the order of reduction, and what is asked for here may not.
        for run in [range(len(params))] if self.scales is None else self.scales.runs(params):
            some = [[values[i] for i in run] for values in (params, grads, names, results)]
            self.start(some[0], [g.contiguous() for g in some[1]], some[2], some[3], accumulate=False)
        self.drain()
        return results
