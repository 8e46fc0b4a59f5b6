"""Buckets of gradients that are not quantized.

A bucket has stock's content, laid out as in stock: sums of more than two ranks depend on where an element lies in the
message. Stock issues a dozen operations and 50 Python calls per parameter for that; here are a few per bucket.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm.issue import timed_by_deepspeed
from zeropp_fp8.comm.lanes import Lane, after, mark
from zeropp_fp8.comm.reduce_scatter import slice_numel
from zeropp_fp8.comm.topology import Topology
from zeropp_fp8.zero.as_deepspeed import reduce_scatter, replaced

# The double-underscore methods of DeepSpeed's class, by the names under which Python stores them.
AVG_SCATTER_GRADS = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
AVG_SCATTER_CONTIGUOUS_GRADS = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads"
_UNDER_WAY = 2  # buckets on their way: one is sent while the next one is filled


class Buckets:
    """The buckets of one stage.

    Attributes:
        waiting: the parameters in the bucket, or in DeepSpeed's, by sharded.key.
        are_stale: gradients are the last step's; this step may not overwrite all of them.
    """

    def __init__(self, stage) -> None:
        self.stage = stage
        self.waiting: dict[int, Parameter] = {}
        self.are_stale = False
        self._numel = 0  # of the waiting gradients
        self._under_way: deque[tuple[Tensor, torch.Event | None]] = deque()  # messages, and when they are done with

    @functools.cached_property
    def _by_deepspeed(self) -> bool:
        """Whether DeepSpeed's own buckets are used, for what only they know."""
        stage = self.stage
        return not stage.session.config.reduces_gradients and (
            stage.contiguous_gradients  # "reduce_scatter": false
            or set(stage.ipg_buckets) != {stage.dtype}  # gradients are sent in another dtype, or in several
            or stage.gradient_predivide_factor != 1.0
            or stage.enable_sanity_checks
            or any(sharded.experts_group(p) is not None for group in stage.fp16_groups for p in group)
        )

    @functools.cached_property
    def _lane(self) -> Lane:
        return Lane(self.stage.session.device, self.stage.reduce_and_partition_stream)

    def put(self, params: list[Parameter]) -> None:
        """Put gradients into the bucket, or into DeepSpeed's; a full one is reduced first."""
        if self._by_deepspeed:
            self._put_into_deepspeeds(params)
            return
        for param in params:
            key, numel = sharded.key(param), sharded.numel(param)
            if key in self.waiting:  # autograd has added to the waiting gradient
                continue
            if self._numel + numel > self.stage.reduce_bucket_size:
                self._reduce()
            if getattr(param, "ds_grad_is_ready", True):
                self.waiting[key] = param
                self._numel += numel

    def finish(self) -> None:
        """End a backward: the current stream sees all its gradients where they are kept, so the host need not wait."""
        stream = self.stage.reduce_and_partition_stream
        if not self._by_deepspeed:
            self._reduce()
            self._drain()
            stream = _NoWait()
        with replaced(self.stage, "reduce_and_partition_stream", stream):
            self.stage.stock.independent_gradient_partition_epilogue()

    def _drain(self) -> None:
        if self._under_way:
            self._lane.before_current()
            self._under_way.clear()

    @torch.no_grad()
    def zero_stale(self) -> None:
        """Set gradients to zero before the first gradient of a step, as in the fixed order.

        In stock, a parameter without a gradient keeps the last step's.
        """
        self.are_stale = False
        self.stage.gradients.forget()
        self.stage.grad_partitions_flat_buffer.zero_()  # offloaded ones
        for flat in self.stage.fp32_partitioned_groups_flat if self.stage.offload_optimizer else ():
            if flat.grad is not None:
                flat.grad.zero_()

    def empty(self) -> None:
        """Drop the waiting gradients."""
        for bucket in self.stage.ipg_buckets.values():
            bucket.params.clear()
            bucket.elements = 0
        self.waiting.clear()
        self._numel = 0
        self._drain()

    # -- reducing a full bucket --------------------------------------------------------------------------------------

    @torch.no_grad()
    def _reduce(self) -> None:
        """Reduce the waiting gradients to this rank's slices of their means, and put these where gradients are kept."""
        params, self._numel = sorted(self.waiting.values(), key=sharded.key), 0
        if not params:
            return
        stage, session = self.stage, self.stage.session
        world_size, group = session.topology.world_size, session.topology.group
        if len(self._under_way) == _UNDER_WAY:
            after(self._under_way.popleft()[1])
        grads = stage.reduction.gradients_of(params)
        sizes = [slice_numel(grad.numel(), world_size) for grad in grads]
        message = _message(grads, sizes, world_size)
        for param in params:
            param.grad = None  # the current stream has its last use
        self._lane.after_current()
        with self._lane:
            message.div_(world_size)
            own = message.view(world_size, -1)[session.topology.rank]
            with self._counted(message.numel(), 1):
                reduce_scatter(own, message, group)
            self.partition_grads(params, own.split(sizes))
            self._under_way.append((message, mark(session.device)))

    def _counted(
        self, numel: int, rounds: int, dtype: torch.dtype | None = None, ring: Topology | None = None
    ) -> AbstractContextManager[None]:
        """Count `numel` elements that are reduced inside, and time it; `rounds` is 2 for an all-reduce."""
        session = self.stage.session
        with session.ledger.counting("gradients"):
            num_bytes = numel * (dtype or self.stage.communication_data_type).itemsize
            session.ledger.sent_around_ring(num_bytes, rounds, ring)
            session.ledger.stock_would_send(numel, ring)
        return timed_by_deepspeed(session.ledger, session.device.type == "cuda")

    def partition_grads(self, params_to_release: list[Parameter], grad_partitions: Sequence[Tensor]) -> list[Tensor]:
        """Write reduced gradients, or add them to those that this step has written.

        DeepSpeed decides this for all parameters at once, by the number of forwards: with two backwards over one
        forward the second would overwrite the first.
        """
        stage, buffers, written = self.stage, [], self.stage.reduction.written
        for again in (False, True):
            some = [(p, g) for p, g in zip(params_to_release, grad_partitions) if (sharded.key(p) in written) == again]
            if not some:
                continue
            params, parts = map(list, zip(*some))
            if self._by_deepspeed or stage.offload_optimizer:
                buffers += stage.gradients.take(params, parts, again)
                continue
            places, _ = stage.gradients.destinations(params, again, headroom=1.0)
            numels = [place.numel() for place in places]
            parts = [part if part.numel() == n else part[:n] for part, n in zip(parts, numels)]
            if again:
                torch._foreach_add_(places, [part.to(stage.gradient_accumulation_dtype) for part in parts])
            else:
                torch._foreach_copy_(places, parts)
        for key in map(sharded.key, params_to_release):
            self.waiting.pop(key, None)
            written[key] = stage.backwards.ended
        return buffers

    # -- DeepSpeed's own buckets -------------------------------------------------------------------------------------

    def _put_into_deepspeeds(self, params: list[Parameter]) -> None:
        """Put gradients into DeepSpeed's buckets."""
        stage = self.stage
        for param in params:
            if sharded.key(param) not in self.waiting:
                stage.stock.reduce_ready_partitions_and_remove_grads(param)
                if getattr(param, "ds_grad_is_ready", True):
                    self.waiting[sharded.key(param)] = param
            elif stage.contiguous_gradients:
                raise RuntimeError(
                    f"the gradient of {stage.param_names.get(param, sharded.key(param))} comes twice in one backward, "
                    'which "reduce_scatter": false cannot add up; leave that key out of zero_optimization, or '
                    "checkpoint with use_reentrant=False"
                )
            elif param.grad.is_cuda:  # autograd has added to the waiting gradient
                stage.reduce_and_partition_stream.wait_stream(torch.cuda.current_stream(param.grad.device))

    def avg_scatter_grads(self, params: list[Parameter], *communication_data_type: torch.dtype) -> list[Tensor]:
        """Reduce DeepSpeed's bucket to this rank's slices of the mean, by its reduce-scatter."""
        ring = self.stage.session.of(params[0]).topology
        numel = sum(sharded.shard_numel(p) for p in params) * ring.world_size
        with self._counted(numel, 1, *communication_data_type, ring=ring):
            return getattr(self.stage.stock, AVG_SCATTER_GRADS)(params, *communication_data_type)

    def avg_scatter_contiguous_grads(self, buffer: Tensor, *communication_data_type: torch.dtype) -> list[Tensor]:
        """Do so by an all-reduce of the whole bucket, for `"reduce_scatter": false`."""
        with self._counted(buffer.numel(), 2, *communication_data_type):
            return getattr(self.stage.stock, AVG_SCATTER_CONTIGUOUS_GRADS)(buffer, *communication_data_type)


def _message(grads: Sequence[Tensor], sizes: Sequence[int], world_size: int) -> Tensor:
    """Lay gradients out as DeepSpeed does, flat: for each rank its slices of all of them, with padding at the ends. A
    single gradient without padding is its own message."""
    flat = [grad.view(-1) for grad in grads if grad.numel()]
    if len(flat) == 1 and flat[0].numel() == world_size * sum(sizes):
        return flat[0]
    message = grads[0].new_empty(world_size * sum(sizes))
    if flat:
        torch._chunk_cat(flat, dim=0, num_chunks=world_size, out=message.view(world_size, -1))
    return message


class _NoWait:
    """A stand-in for a stream whose work the current stream waits for already."""

    def synchronize(self) -> None:
        """Do nothing: DeepSpeed stops the host here at the end of every backward."""
