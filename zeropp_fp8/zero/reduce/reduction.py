"""A stage's reduction of gradients: qgZ unit by unit, sums in the node, and the beginning of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.config import SECTION
from zeropp_fp8.zero.as_deepspeed import Freed
from zeropp_fp8.zero.memory import device_bytes
from zeropp_fp8.zero.reduce.gradient_scales import GradientScales
from zeropp_fp8.zero.reduce.reducer import GradientReducer
from zeropp_fp8.zero.reduce.reduction_unit import ReductionUnit
from zeropp_fp8.zero.reduce.residuals import Residuals
from zeropp_fp8.zero.session import Session
from zeropp_fp8.zero.stage_part import Row, StagePart, row_of_hop

# Share of a device's memory that sums may take, if the configuration leaves the choice. With 8 GPUs of 80 GB per node,
# 8 billion parameters in fp32 take 5 %, and still leave the room that stock ZeRO-3 would have.
_SHARE_OF_MEMORY = 0.1


class Reduction(StagePart):
    """Reduce the gradients of one stage.

    Args:
        params: the model's parameters, ZeRO-3's or not yet.
        dtype: of sums over micro-batches.

    Attributes:
        reducer: made with the hooks, when DeepSpeed has made its stream.
        sums_numel: elements of this rank's sums over several backward passes in the node; 0: there are no such sums.
        trained_numel: elements of the trained parameters.
        written: by sharded.key, the last backward since the last step whose mean gradient is in this rank's part, or
            under way to it.
    """

    def __init__(self, stage, params: Iterable[Parameter], dtype: torch.dtype) -> None:
        self.stage, self.dtype = stage, dtype
        self.reducer: GradientReducer | Freed | None = None
        self.trained_numel = 0
        self.written: dict[int, int] = {}
        self.sums_numel = _numel_of_sums(stage.session, params, dtype)

    def begin(self, names: dict[int, str]) -> None:
        """Make the reducer: DeepSpeed has its stream, and the parameters have these names by sharded.key."""
        self.reducer = GradientReducer(self.stage.session, self.stage.reduce_and_partition_stream)
        self.reducer.names = names

    def order_is_known(self, params: list[Parameter]) -> None:
        """Make the shared scales: the order in which quantized gradients of `params` are reduced is known."""
        stage, session = self.stage, self.stage.session
        if session.config.gradients.scales == "tensor":
            self.reducer.scales = GradientScales(session, params, [stage.param_names[p] for p in params])
            session.parts.append(self.reducer.scales)
        stage.gradients.order_is_known(params)

    def add_parts(self, params: list[Parameter]) -> None:
        """Add parts to the stage, which is now complete."""
        session, reducer = self.stage.session, self.reducer
        self.trained_numel = sum(sharded.numel(p) for p in params if p.requires_grad)
        session.parts.append(self)
        if reducer.error_feedback is not None:
            taken = reducer.residual_bytes(params)
            session.parts.append(Residuals(session, reducer.error_feedback, self.trained_numel, taken))

    def free(self) -> None:
        """Free the buffers when the engine has ended: a reducer without buffers replaces this one."""
        stage, lost = self.stage, self.reducer.error_feedback
        self.reducer = Freed() if lost else GradientReducer(stage.session, stage.reduce_and_partition_stream)

    # -- as a part of the stage --------------------------------------------------------------------------------------

    def bytes_to_come(self) -> int:
        return self.sums_numel * self.dtype.itemsize

    def formats_changed(self) -> None:
        self.reducer.formats_changed()

    def rows(self) -> list[Row]:
        """Return a row per hop, and a row for the sums in the node."""
        session = self.stage.session
        formats, topology = session.formats, session.topology
        rows = [
            row_of_hop(session, "within nodes", formats.within, topology.ranks_per_node, self.trained_numel),
            row_of_hop(session, "between nodes", formats.between, topology.nodes, self.trained_numel),
        ]
        if self.sums_numel:
            remark = "of several micro-batches, on a rank of the node; they are sent between nodes once per step"
            rows.append(("gradient sums", "16 or 32 bits", self.sums_numel, remark))
        return rows

    # -- in backward -------------------------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """Prepare for a backward that has reached the model."""
        if self.stage.buckets.are_stale:
            self.stage.buckets.zero_stale()
        if self.stage.hooks.order is not None:
            self.stage.hooks.order.begin()

    def gradients_of(self, params: list[Parameter]) -> list[Tensor]:
        """Return the gradients of parameters, contiguous."""
        for param in params:
            numel = None if param.grad is None else param.grad.numel()
            if numel == sharded.numel(param):
                continue
            name = self.stage.param_names.get(param, str(sharded.key(param)))
            if numel is None:
                raise RuntimeError(
                    f"the gradient of {name} is gone: another engine over the same model has taken it; call destroy() "
                    "on that engine before the next one is made"
                )
            raise RuntimeError(f"the gradient of {name} has {numel} elements, its parameter {sharded.numel(param)}")
        return [param.grad.contiguous() for param in params]

    @torch.no_grad()
    def reduce_unit(self, params: list[Parameter]) -> None:
        """Quantize the gradients of a unit and send them; the result is written to where gradients are kept."""
        unit, grads = self.reducer.unit_of(params), self.gradients_of(params)
        if unit.session is not self.stage.session:  # a mean over the tokens of all ranks, of those with these experts
            share = unit.session.topology.world_size / self.stage.session.topology.world_size
            torch._foreach_mul_(grads, share)
        if self.sums_numel and unit.session.topology.nodes > 1 and not self.at_boundary():
            self.reducer.sum_in_node(unit, grads, self.dtype)
        else:
            self._finish_unit(unit, grads)
        for param in params:
            # Encoding was the last use, on this stream: the memory may be used again at once.
            param.grad = None

    def _finish_unit(self, unit: ReductionUnit, grads: list[Tensor] | None) -> None:
        """Reduce a unit's gradients, and its sums in the node, to where gradients are kept."""
        params, now = unit.params, self.stage.backwards.ended
        # If a parameter's gradient comes twice in one backward, the second adds to the first, as in later backwards.
        before = self.written.get(sharded.key(params[0]))
        again = before is not None
        self.written.update(dict.fromkeys([sharded.key(p) for p in params], now))
        if self.stage.offload_optimizer:
            self.stage.gradients.take(params, self.reducer.reduce(unit, grads, self.dtype), again)
            return
        if before == now:
            self.reducer.drain()  # the first gradient must be there before the second is added
        headroom = unit.headroom(more=int(grads is not None))
        results, arrived = self.stage.gradients.destinations(params, again, headroom)
        self.reducer.start(unit, grads, results, again, arrived)

    def at_boundary(self) -> bool:
        """Whether the step follows this backward."""
        boundary = self.stage.is_gradient_accumulation_boundary  # DeepSpeed 0.18.0 has an attribute, not a method
        return bool(boundary() if callable(boundary) else boundary)

    def finish_backward(self) -> None:
        """Bring the rest of a backward's gradients to where the step finds them."""
        stage = self.stage
        if stage.hooks.order is not None:
            stage.hooks.order.finish()
        if stage.session.config.reduces_gradients:
            if self.at_boundary():
                self.flush_accumulated()  # gradients that came twice in an earlier backward
            self.reducer.drain()  # the current stream now waits for all results, so that the host need not
        for part in stage.session.parts:
            part.backward_issued()
        stage.buckets.finish()
        self._wait_for_copies_to_host()

    def _wait_for_copies_to_host(self) -> None:
        """Wait for offloaded gradients: they are copied on the current stream, and the host reads them next."""
        if self.stage.offload_optimizer and self.stage.session.device.type == "cuda":
            torch.cuda.current_stream(self.stage.session.device).synchronize()

    # -- sums in the node --------------------------------------------------------------------------------------------

    @property
    def _sums_rest(self) -> bool:
        """Whether there may be sums in the node."""
        return bool(self.sums_numel) and not self.stage.parameter_offload.destroyed

    @torch.no_grad()
    def flush_accumulated(self) -> None:
        """End the reduction of all sums in the node. Collective."""
        if not self._sums_rest:
            return
        self.reducer.drain()
        for unit in self.reducer.accumulated:
            self._finish_unit(unit, None)
        self.reducer.drain()
        self._wait_for_copies_to_host()

    def refuse_accumulated(self) -> None:
        """Refuse to go on with sums in the node: one rank alone cannot end a reduction.

        Raises:
            RuntimeError: there are sums in the node.
        """
        if self._sums_rest and self.reducer.accumulated:
            raise RuntimeError(
                "gradients of earlier micro-batches stay inside the node until the step, and one rank alone cannot "
                "finish them: look at them with safe_get_full_grad on all ranks, or set "
                f'"{SECTION}.gradients.accumulate_in": "world"'
            )

    # -- between backwards -------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Begin the step: reduce gradients that came unnoticed, such as after a forward that an exception has ended.

        Raises:
            RuntimeError: an exception has ended the last backward.
        """
        stage, order = self.stage, self.stage.hooks.order
        stage.backwards.refuse_running()
        if (order is not None and order.has_begun) or stage.buckets.waiting:
            stage.independent_gradient_partition_epilogue()
        self.flush_accumulated()
        # A parameter that is frozen now has a gradient of zeros, whatever came before.
        for param in (p for group in stage.fp16_groups for p in group if not p.requires_grad):
            stage.gradients.drop(param)

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Begin a step that was not announced to the last backward. (DeepSpeed 0.18 does not call this.)"""
        self.stage.set_gradient_accumulation_boundary(True)
        self.flush_accumulated()
        self.stage.stock.finalize_gradient_accumulation_boundary()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.stage.backwards.one_runs:
            self.stage.backwards.drop()
        self.stage.stock.zero_grad(set_to_none)
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Let the next gradients replace the present ones. (DeepSpeed's step calls this before it uses them.)"""
        self.written.clear()
        self.stage.backwards.ended = 0
        self.stage.buckets.are_stale = self.stage.hooks.order is None
        if self._sums_rest:
            self.reducer.forget_sums()

    def drop_gradients(self) -> None:
        """Drop the gradients of a backward that ends too early."""
        stage = self.stage
        if stage.hooks.order is not None:
            stage.hooks.order.start_again()
        self.reducer.drain()
        stage.buckets.empty()
        for param in (param for group in stage.fp16_groups for param in group):
            param.grad = None


def _numel_of_sums(session: Session, params: Iterable[Parameter], dtype: torch.dtype) -> int:
    """Return the number of elements of this rank's sums of `dtype`; 0: every backward reduces its gradients to the end.
    Collective if memory decides."""
    gradients, topology = session.config.gradients, session.topology
    if not session.config.reduces_gradients or topology.nodes == 1 or gradients.accumulate_in == "world":
        return 0
    by_ranks: Counter[int] = Counter()
    for param in (param for param in params if param.requires_grad):
        ring = session.of(param).topology
        by_ranks[ring.ranks_per_node] += sharded.shape(param).numel() if ring.nodes > 1 else 0
    numel = sum(-(-numel // ranks) for ranks, numel in by_ranks.items())
    if gradients.accumulate_in == "node":
        return numel
    memory = device_bytes(session.device, session.ranks_here)
    fits = torch.tensor([int(numel * dtype.itemsize <= _SHARE_OF_MEMORY * memory)], device=session.device)
    dist.all_reduce(fits, op=dist.ReduceOp.MIN, group=topology.group)
    return numel if fits.item() else 0
