"""DeepSpeed's buckets, used if gradients are not quantized, or if a script reduces them after several backwards."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm.issue import timed_by_deepspeed
from zeropp_fp8.zero.as_deepspeed import replaced

# The double-underscore methods of DeepSpeed's class, by the names under which Python stores them.
AVG_SCATTER_GRADS = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
AVG_SCATTER_CONTIGUOUS_GRADS = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads"


class Buckets:
    """The buckets of one stage.

    Attributes:
        waiting: sharded.key of the parameters in the buckets.
        are_stale: gradients are the last step's; this step may not overwrite all of them.
    """

    def __init__(self, stage) -> None:
        self.stage = stage
        self.waiting: set[int] = set()
        self.are_stale = False

    def put(self, params: list[Parameter]) -> None:
        """Put gradients into the buckets as stock does, if they are not quantized.

        Raises:
            RuntimeError: a gradient comes twice in one backward, as with reentrant checkpointing, and the first has
                been copied into DeepSpeed's buffer.
        """
        stage = self.stage
        for param in params:
            if sharded.key(param) not in self.waiting:
                stage.stock.reduce_ready_partitions_and_remove_grads(param)
                if not stage._coalesce_grad_reduction and getattr(param, "ds_grad_is_ready", True):
                    self.waiting.add(sharded.key(param))
            elif stage.contiguous_gradients:
                raise RuntimeError(
                    f"the gradient of {stage.param_names.get(param, sharded.key(param))} comes twice in one backward, "
                    'which "reduce_scatter": false cannot add up; leave that key out of zero_optimization, or '
                    "checkpoint with use_reentrant=False"
                )
            elif param.grad.is_cuda:  # autograd has added to the waiting gradient
                stage.reduce_and_partition_stream.wait_stream(torch.cuda.current_stream(param.grad.device))

    def partition_grads(self, params_to_release: list[Parameter], grad_partitions: list[Tensor]) -> list[Tensor]:
        """Write the gradients that DeepSpeed has reduced by itself, or add them to those that this step has written.

        DeepSpeed decides this for all parameters at once, by the number of forwards: with two backwards over one
        forward the second would overwrite the first.
        """
        buffers, written = [], self.stage.reduction.written
        for again in (False, True):
            some = [(p, g) for p, g in zip(params_to_release, grad_partitions) if (sharded.key(p) in written) == again]
            if some:
                params, parts = map(list, zip(*some))
                buffers += self.stage.gradients.take(params, parts, again)
        ids = [sharded.key(p) for p in params_to_release]
        self.waiting.difference_update(ids)
        written.update(dict.fromkeys(ids, self.stage.backwards.ended))
        return buffers

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

    def finish_quantized(self) -> None:
        """Run DeepSpeed's end of a backward, in which the host would wait for its stream.

        That stream has work of its own only if a gradient has come into a bucket.
        """
        stream = self.stage.reduce_and_partition_stream if self.waiting else _NoWait()
        with replaced(self.stage, "reduce_and_partition_stream", stream):
            self.stage.stock.independent_gradient_partition_epilogue()

    # -- reducing a full bucket --------------------------------------------------------------------------------------

    def _count(self, numel: int, communication_data_type: torch.dtype | None, rounds: int) -> None:
        """Count `numel` elements that DeepSpeed reduces by itself; `rounds` is 2 for an all-reduce."""
        ledger = self.stage.session.ledger
        with ledger.counting("gradients"):
            dtype = communication_data_type or self.stage.communication_data_type
            ledger.sent_around_ring(numel * dtype.itemsize, rounds)
            ledger.stock_would_send(numel)

    def avg_scatter_grads(self, params: list[Parameter], communication_data_type=None) -> list[Tensor]:
        """Reduce a bucket to this rank's slices of the mean, by DeepSpeed's reduce-scatter if nothing is quantized."""
        stage, session = self.stage, self.stage.session
        if not session.config.quantizes_gradients:
            numel = sum(sharded.shard_numel(p) for p in params) * session.topology.world_size
            self._count(numel, communication_data_type, rounds=1)
            stock = getattr(stage.stock, AVG_SCATTER_GRADS)
            with timed_by_deepspeed(session.ledger, session.device.type == "cuda"):
                return stock(params) if communication_data_type is None else stock(params, communication_data_type)
        grads = [p.grad.view(sharded.shape(p)) for p in params]
        return stage.reducer.reduce(stage.reducer.unit_of(params), grads, stage.gradient_accumulation_dtype)

    def avg_scatter_contiguous_grads(self, buffer: Tensor, *communication_data_type: torch.dtype) -> list[Tensor]:
        """Do so by an all-reduce of the whole bucket, for `"reduce_scatter": false`; nothing is quantized then."""
        self._count(buffer.numel(), next(iter(communication_data_type), None), rounds=2)
        with timed_by_deepspeed(self.stage.session.ledger, buffer.is_cuda):
            return getattr(self.stage.stock, AVG_SCATTER_CONTIGUOUS_GRADS)(buffer, *communication_data_type)


class _NoWait:
    """A stand-in for a stream whose work the current stream waits for already."""

    def synchronize(self) -> None:
        """Do nothing: DeepSpeed stops the host here at the end of every backward."""
