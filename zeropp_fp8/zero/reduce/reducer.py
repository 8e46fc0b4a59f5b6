"""Reduce the gradients of a unit with qgZ inside ZeRO-3."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm import ErrorFeedback
from zeropp_fp8.comm.lanes import Lane
from zeropp_fp8.comm.reduce_scatter import Reduction, Rings, slice_numel
from zeropp_fp8.formats.scale_table import SharedScales
from zeropp_fp8.zero.reduce.gradient_scales import GradientScales
from zeropp_fp8.zero.reduce.reduction_unit import ReductionUnit
from zeropp_fp8.zero.session import Session


class GradientReducer:
    """Compute the quantized mean of gradients over the data-parallel group, with one message per unit and hop.

    Args:
        last_stream: on a GPU, the stream that writes results.

    Attributes:
        names: names of parameters by sharded.key, the keys of residuals; set before the first reduction.
    """

    def __init__(self, session: Session, last_stream: torch.cuda.Stream | None = None) -> None:
        self.session = session
        gradients = session.config.gradients
        self.error_feedback = ErrorFeedback(gradients.block_size) if gradients.error_feedback else None
        self.names: dict[int, str] = {}
        self._units: dict[tuple[int, ...], ReductionUnit] = {}  # by sharded.key of their parameters, first seen first
        self._rings = Rings.on(session.device)
        self._first, self._last = Lane(session.device), Lane(session.device, last_stream)
        self._under_way: deque[Iterator[None]] = deque()
        self.scales: GradientScales | None = None  # if ranks share scales: set once the order of reduction is known

    def unit_of(self, params: Sequence[Parameter]) -> ReductionUnit:
        """Return the unit of these ZeRO-3 parameters, whose order is the same on every rank."""
        keys = tuple([sharded.key(p) for p in params])
        if keys not in self._units:
            self._units[keys] = ReductionUnit(self.session.of(params[0]), params, [self.names[key] for key in keys])
        return self._units[keys]

    def residual_bytes(self, params: Iterable[Parameter]) -> int:
        """Return the bytes of the residuals of trained parameters once all have been reduced."""
        if self.error_feedback is None:
            return 0
        rounded = (p for p in params if p.requires_grad and not self.session.sends_exactly("gradients", p))
        each = [(self.session.of(p).topology, sharded.numel(p)) for p in rounded]
        sizes = [(ring.nodes, slice_numel(numel, ring.world_size)) for ring, numel in each if ring.nodes > 1]
        return sum(itertools.starmap(self.error_feedback.num_bytes, sizes))

    def start(
        self,
        unit: ReductionUnit,
        grads: Sequence[Tensor] | None,
        results: Sequence[Tensor],
        accumulate: bool,
        arrived: Callable[[], None] | None = None,
    ) -> None:
        """Start writing (or adding) this rank's slices of the mean gradients to `results`; `drain` ends it.

        The mean includes the unit's sums that have accumulated in the node.

        Args:
            grads: full gradients (fp32, bf16 or fp16), free for reuse afterwards; None: only the accumulated sums.
            results: per parameter this rank's elements, fp32, bf16 or fp16; uint8 gets FP8 codes.
            arrived: called once they are written, where they are written (on a GPU: on that stream).
        """
        if grads is not None:
            self._count_stock(unit)
        if grads is None:
            steps = self._spread(unit, results, accumulate)
        elif unit.backward_passes:
            steps = itertools.chain(self._add_to(unit, grads), self._spread(unit, results, accumulate))
        else:
            reduction = self._reduction(unit, self._scales_of(unit, grads))
            steps = unit.planned(grads).run(grads, results, reduction, accumulate)
        self._begin(steps, arrived)

    def sum_in_node(self, unit: ReductionUnit, grads: Sequence[Tensor], dtype: torch.dtype) -> None:
        """Start adding gradients to the sums in the node, in `dtype`; the next `start` sends the sums."""
        plan = unit.planned(grads)
        unit.sums = unit.sums or plan.new_sums(dtype)
        self._count_stock(unit)
        self._begin(self._add_to(unit, grads))

    def _add_to(self, unit: ReductionUnit, grads: Sequence[Tensor]) -> Iterator[None]:
        reduction = self._reduction(unit, self._scales_of(unit, grads, to_the_end=False))
        unit.backward_passes += 1
        return unit.plan.sum_in_node(grads, unit.sums, reduction, accumulate=unit.backward_passes > 1)

    def _spread(self, unit: ReductionUnit, results: Sequence[Tensor], accumulate: bool) -> Iterator[None]:
        shared = self.scales.of_sums(unit.params) if self.scales is not None else None
        headroom, unit.backward_passes = unit.headroom(), 0
        return unit.plan.spread(unit.sums, results, self._reduction(unit, shared), accumulate, headroom)

    @property
    def accumulated(self) -> list[ReductionUnit]:
        """Return the units that have sums in the node."""
        return [unit for unit in self._units.values() if unit.backward_passes]

    def forget_sums(self) -> None:
        """Drop the sums in the node; `drain` must have been called."""
        for unit in self._units.values():
            unit.backward_passes = 0

    def formats_changed(self) -> None:
        """Forget all that depends on the session's formats, which have changed."""
        self._units.clear()
        self.scales = None
        self.error_feedback = None  # the residuals are small beside the reason for changing formats

    def _count_stock(self, unit: ReductionUnit) -> None:
        with self.session.ledger.counting("gradients"):
            self.session.ledger.stock_would_send(unit.stock_numel, unit.session.topology)

    def _scales_of(self, unit: ReductionUnit, grads: Sequence[Tensor], to_the_end: bool = True) -> SharedScales | None:
        if self.scales is None:
            return None
        with self.session.ledger.counting("gradients"):
            return self.scales.of(unit.params, grads, to_the_end)

    def _reduction(self, unit: ReductionUnit, shared: SharedScales | None) -> Reduction:
        ledger, feedback = self.session.ledger, self.error_feedback
        return Reduction(self._rings, self._first, self._last, ledger, feedback, unit.names, shared)

    def _begin(self, steps: Iterator[None], arrived: Callable[[], None] | None = None) -> None:
        """Run a reduction as far as it goes without waiting on the host."""
        session = self.session
        if arrived is not None:
            steps = self._followed_by(steps, arrived)
        with session.ledger.counting("gradients"):
            if session.device.type == "cuda":
                for _ in steps:  # nothing here waits on the host
                    pass
                return
            # On a CPU each reduction moves one hop on whenever the next one has started, so hops overlap.
            next(steps, None)
            still = deque(earlier for earlier in self._under_way if next(earlier, self) is not self)
            still.append(steps)
            self._under_way = still

    def _followed_by(self, steps: Iterator[None], arrived: Callable[[], None]) -> Iterator[None]:
        yield from steps
        if self.session.topology.world_size == 1:  # the current stream issues all work
            arrived()
            return
        with self._last:
            arrived()

    def drain(self) -> None:
        """End all reductions: the current stream sees their results."""
        with self.session.ledger.counting("gradients"):
            for steps in self._under_way:
                for _ in steps:
                    pass
        self._under_way.clear()
        self._first.before_current()
        self._last.before_current()
        self._rings.clear()  # forwards use their memory: 0.25 GiB at 1.3 B parameters on two ranks

    def reduce(self, unit: ReductionUnit, grads: Sequence[Tensor] | None, dtype: torch.dtype) -> list[Tensor]:
        """Reduce to the end; return per parameter this rank's slice of the mean, without padding, in `dtype`.

        `grads`: None for a unit of `accumulated`: only its sums in the node.
        """
        device = self.session.device
        results = [torch.empty(self.session.own_numel(p), dtype=dtype, device=device) for p in unit.params]
        if grads is None or self.scales is None:
            self.start(unit, grads and [grad.contiguous() for grad in grads], results, accumulate=False)
        else:
            # Shared scales are in the order of reduction; these parameters may have another order.
            for run in self.scales.runs(unit.params):
                part = self.unit_of([unit.params[i] for i in run])
                self.start(part, [grads[i].contiguous() for i in run], [results[i] for i in run], accumulate=False)
        self.drain()
        return results
