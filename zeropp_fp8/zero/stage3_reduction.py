"""How a stage reduces gradients: hooks and their order, qgZ unit by unit, sums that rest inside a node."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from deepspeed.utils import z3_leaf_module
from torch import Tensor, nn
from torch.nn import Parameter

from zeropp_fp8.comm.issue import timed_by_deepspeed
from zeropp_fp8.config import SECTION
from zeropp_fp8.zero.bound import StepWatch
from zeropp_fp8.zero.reduce.gradient_scales import GradientScales
from zeropp_fp8.zero.reduce.node_sums import numel_of_sums
from zeropp_fp8.zero.reduce.order import FixedOrder, is_still_to_come, reduction_units, runs_to_its_leaves
from zeropp_fp8.zero.reduce.reducer import GradientReducer
from zeropp_fp8.zero.reduce.reduction_unit import ReductionUnit
from zeropp_fp8.zero.reduce.residuals import Residuals
from zeropp_fp8.zero.session import Session
from zeropp_fp8.zero.stage3_base import Freed, Replaced, Stage3Base

_LEAF = "ds_z3_leaf_module"
_NONE = -1  # autograd's number of the backward that runs, where none does
_ENDED_BY_EXCEPTION = (
    "an exception has ended the last backward after some of its gradients may have been added to those of earlier "
    "ones; call engine.optimizer.zero_grad() and begin the step again"
)
# The double-underscore methods of DeepSpeed's class, by the names under which Python stores them.
AVG_SCATTER_GRADS = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
AVG_SCATTER_CONTIGUOUS_GRADS = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads"


class ReducingStage3(Stage3Base):
    """The part of a stage that reduces gradients."""

    _coalesce_grad_reduction = False  # DeepSpeedEngine.coalesce_grad_reduction() sets it; DeepSpeed 0.18 has no such

    def __init__(self, module, init_optimizer, param_names, *args, session: Session, **kwargs) -> None:
        self._reducer: GradientReducer | None = None
        self._order: FixedOrder | None = None
        # By ds_id: the last backward since the last step whose mean gradient is in this rank's part, or is on its way.
        self._written: dict[int, int] = {}
        self._backwards = 0  # that have ended since the last step
        self._are_stale = False  # gradients are those of the last step, whose places this step's need not all take
        self._running: _Backward | None = None  # that has reached the model, and has not ended
        # Autograd's numbers of the last one that has been looked at, and of the last one that is none.
        self._looked_at = self._passed_by = _NONE
        self._watch = StepWatch(session) if session.config.report.diagnose else None
        self._in_buckets: set[int] = set()  # ds_id of what waits in DeepSpeed's buckets
        if session.config.quantizes_gradients:
            kwargs["reduce_scatter"] = True
        if kwargs.get("reduce_scatter", True):
            # DeepSpeed would copy each gradient into a buffer, a gigabyte by default, which it then reads tensor by
            # tensor all the same; and what comes twice in one backward would be added to while it is copied.
            kwargs["contiguous_gradients"] = False
        dtype = kwargs.get("gradient_accumulation_dtype", torch.float32)
        session.sums_numel = numel_of_sums(session, module.parameters(), dtype)
        super().__init__(module, init_optimizer, param_names, *args, session=session, **kwargs)
        session.residual_bytes = self.reducer.residual_bytes(module.parameters())
        self.reducer.trained_numel = sum(p.ds_numel for p in module.parameters() if p.requires_grad)
        session.parts.append(self.reducer)
        if self.reducer.error_feedback is not None:
            session.parts.append(Residuals(session, self.reducer.error_feedback, self.reducer.trained_numel))
        session.bytes_to_come = session.residual_bytes + session.sums_numel * dtype.itemsize

    @property
    def reducer(self) -> GradientReducer:
        """Made on first use: DeepSpeed's constructor makes the stream, and already needs the reducer before it ends."""
        if self._reducer is None:
            self._reducer = GradientReducer(self.session, self.reduce_and_partition_stream)
        return self._reducer

    def destroy(self) -> None:
        super().destroy()
        self._reducer = Freed() if self.reducer.error_feedback else None

    # -- hooks and their order -------------------------------------------------------------------------------------

    def create_reduce_and_remove_grad_hooks(self) -> None:
        """Reduce every parameter from its own gradient hook, blocks (z3 leaf modules) included.

        DeepSpeed reduces a leaf module from a full backward hook of the module, which fires before the gradients
        exist when no input of the block needs one (a frozen embedding under LoRA). The unit order below keeps blocks
        together without it, and gives the same buckets as stock's leaf modules.
        """
        self.session.on_model.callback(self.take_no_more)
        trainable = [param for group in self.fp16_groups for param in group]
        self.reducer.names = {param.ds_id: self.param_names.get(param, str(param.ds_id)) for param in trainable}
        self.parameter_offload.before_backward = self._module_reached
        if self._uses_fixed_order():
            quantized = self.session.config.quantizes_gradients
            self._order = FixedOrder(
                reduction_units(
                    trainable,
                    self.module.parameters(),
                    self.parameter_offload.blocks,
                    # Stock's buckets are filled parameter by parameter, so there is nothing to join for them.
                    joined_numel=self.reduce_bucket_size if quantized else 0,
                ),
                self._reduce_unit if quantized else self._put_into_bucket,
            )
            if quantized:
                params = [param for unit in self._order.units for param in unit]
                if self.session.config.gradients.scales == "tensor":
                    names = [self.param_names[p] for p in params]
                    self.reducer.scales = GradientScales(self.session, params, names)
                    self.session.parts.append(self.reducer.scales)
                self._order_is_known(params)
            self._users = Counter(id(p) for module in self.module.modules() for p in module.parameters(recurse=False))
            self._used_by_only: dict[tuple[int, bool], list[Parameter]] = {}
            self.parameter_offload.after_backward_of = self._module_ended
            leaf_of = {param: param.__dict__.pop(_LEAF) for param in trainable if _LEAF in param.__dict__}
            super().create_reduce_and_remove_grad_hooks()
            for param, leaf in leaf_of.items():
                setattr(param, _LEAF, leaf)
            for param, handle in zip((p for p in trainable if p.requires_grad), self._grad_acc_hooks, strict=True):
                handle.hooks_dict_ref()[handle.id] = functools.partial(self._gradient_is_there, param)
        else:
            super().create_reduce_and_remove_grad_hooks()

    def take_no_more(self) -> None:
        """Leave gradients to other engines over the model: this one has ended, or was collected."""
        for hook in (*self._grad_acc_hooks, *self._leaf_module_hooks):
            hook.remove()
        self.parameter_offload.before_backward = self.parameter_offload.after_backward_of = None

    def _gradient_is_there(self, param: Parameter, tensor: Tensor) -> None:
        """Stand for DeepSpeed's hook, which takes 30 calls in Python a parameter to find where a backward ends."""
        self.reduce_ready_partitions_and_remove_grads(param)

    def should_refresh_expected_hook_count(self) -> bool:
        """Never: the end of a backward is told by autograd, not by a count of DeepSpeed's hooks."""
        return False

    def _uses_fixed_order(self) -> bool:
        """Always, except that `lossless` at module granularity promises stock's buckets, filled as gradients come."""
        return self.session.config.quantizes or self.session.config.gather_granularity == "block"

    def reduce_ready_partitions_and_remove_grads(self, param: Parameter) -> None:
        number = torch._C._current_graph_task_id()  # none where coalesced gradients are reduced, after all backwards
        if number not in (self._looked_at, _NONE) and not self._is_under_way(number):
            self._begin_backward()
        if self._are_stale:
            self._zero_stale()
        if self._coalesce_grad_reduction or self._order is None:
            self._put_into_bucket([param])
        elif getattr(param, "ds_grad_is_ready", True):  # not while a tiled computation goes on adding to it
            self._order.is_ready(param)

    def _module_ended(self, module: nn.Module) -> None:
        """Of a module whose backward is over: gradients of parameters that no other module has come no more."""
        if self._running is None:  # torch.autograd.grad(), or a loss in tiles
            return
        leaf = z3_leaf_module(module)  # another engine over the model may have it so
        params = self._used_by_only.get((id(module), leaf))
        if params is None:
            params = [p for p in module.parameters(recurse=leaf) if self._users[id(p)] == 1]
            self._used_by_only[id(module), leaf] = params
        if params and not self._coalesce_grad_reduction:
            self._order.module_ended(params)

    def _put_into_bucket(self, params: list[Parameter]) -> None:
        """Stock's way, where gradients are not quantized.

        Raises:
            RuntimeError: a gradient comes twice in one backward, as with reentrant checkpointing, and the first has
                been copied into DeepSpeed's buffer.
        """
        for param in params:
            if param.ds_id not in self._in_buckets:
                super().reduce_ready_partitions_and_remove_grads(param)
                if not self._coalesce_grad_reduction and getattr(param, "ds_grad_is_ready", True):
                    self._in_buckets.add(param.ds_id)
            elif self.contiguous_gradients:
                raise RuntimeError(
                    f"the gradient of {self.param_names.get(param, param.ds_id)} comes twice in one backward, which "
                    '"reduce_scatter": false cannot add up; leave that key out of zero_optimization, or checkpoint '
                    "with use_reentrant=False"
                )
            elif param.grad.is_cuda:  # autograd has added to what waits
                self.reduce_and_partition_stream.wait_stream(torch.cuda.current_stream(param.grad.device))

    @torch.no_grad()
    def _reduce_unit(self, params: list[Parameter]) -> None:
        """Quantize the gradients of a unit, send them, and let the result arrive in the gradient partitions."""
        unit = self.reducer.unit_of(params)
        for param, name in zip(params, unit.names):
            if param.grad is None:
                raise RuntimeError(
                    f"the gradient of {name} is gone: another engine over the same model has taken it; call destroy() "
                    "on that engine before the next one is made"
                )
            if (numel := param.grad.numel()) != param.ds_numel:
                raise RuntimeError(f"the gradient of {name} has {numel} elements, its parameter {param.ds_numel}")
        grads = [param.grad.contiguous() for param in params]
        if self.session.sums_numel and not self._at_boundary():
            self.reducer.sum_in_node(unit, grads, self.gradient_accumulation_dtype)
        else:
            self._finish_unit(unit, grads)
        for param in params:
            # Encoding was the last use, on this stream: the memory may be used again at once.
            param.grad = None

    def _finish_unit(self, unit: ReductionUnit, grads: list[Tensor] | None) -> None:
        """Let the mean of a unit's gradients, those that rest in the node too, arrive in the gradient partitions."""
        params = unit.params
        # A parameter whose gradient comes twice in one backward adds to what it has reduced before, as later backwards.
        written = self._written.get(params[0].ds_id)
        again, twice = written is not None, written == self._backwards
        self._written.update(dict.fromkeys([p.ds_id for p in params], self._backwards))
        if self.offload_optimizer:
            slices = self.reducer.reduce(unit, grads, self.gradient_accumulation_dtype)
            self._partition_grads(params, slices, again)
            return
        headroom = unit.headroom(more=int(grads is not None))
        results, arrived = self._gradient_results(params, again, twice, headroom)
        if grads is None:
            self.reducer.spread(unit, results, again, arrived)
        else:
            self.reducer.start(unit, grads, results, again, arrived)

    def partition_grads(self, params_to_release: list[Parameter], grad_partitions: list[Tensor]) -> list[Tensor]:
        """Write what DeepSpeed has reduced by itself, or add it to what this step has written.

        DeepSpeed decides that for all parameters at once, by the number of forwards: of two backwards over one forward
        the second would take the place of the first.
        """
        buffers = []
        for again in (False, True):
            some = [(p, g) for p, g in zip(params_to_release, grad_partitions) if (p.ds_id in self._written) == again]
            if some:
                params, parts = map(list, zip(*some))
                buffers += self._partition_grads(params, parts, again)
        ids = [p.ds_id for p in params_to_release]
        self._in_buckets.difference_update(ids)
        self._written.update(dict.fromkeys(ids, self._backwards))
        return buffers

    def _partition_grads(self, params: Sequence[Parameter], parts: list[Tensor], again: bool) -> list[Tensor]:
        with Replaced(self, "micro_step_id", int(again)):  # DeepSpeed adds from 1 on
            return super().partition_grads(params, parts)

    def _at_boundary(self) -> bool:
        """Whether the step follows this backward."""
        boundary = self.is_gradient_accumulation_boundary  # in DeepSpeed 0.18.0 no method yet
        return bool(boundary() if callable(boundary) else boundary)

    @torch.no_grad()
    def _finish_resting(self) -> None:
        """End the reduction of all that rests in the node. Collective."""
        if not self._sums_rest():
            return
        self.reducer.drain()
        for unit in self.reducer.resting:
            self._finish_unit(unit, None)
        self.reducer.drain()
        self._wait_for_copies_to_host()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """The step begins, without having been announced to the last backward. (Not in DeepSpeed 0.18.)"""
        self.set_gradient_accumulation_boundary(True)
        self._finish_resting()
        super().finalize_gradient_accumulation_boundary()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._running is not None:
            self._drop_backward()
        super().zero_grad(set_to_none)
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        """The next gradients take the place of those that have come. (DeepSpeed's step says so before it uses them.)"""
        self._written.clear()
        self._backwards = 0
        self._are_stale = self._order is None
        if self._sums_rest():
            self.reducer.forget_sums()

    @torch.no_grad()
    def _zero_stale(self) -> None:
        """Before the first gradient of a step: where none comes there are zeros, as in the fixed order.

        Stock has the last step's there.
        """
        self._are_stale = False
        self.grad_partitions_flat_buffer.zero_()
        for flat in self.fp32_partitioned_groups_flat if self.offload_optimizer else ():
            if flat.grad is not None:
                flat.grad.zero_()

    def _sums_rest(self) -> bool:
        """Whether there may be something that rests in the node."""
        return bool(self.session.sums_numel) and not self.parameter_offload.destroyed

    # -- a backward, from where it reaches the model to its end ------------------------------------------------------

    def enter_backward(self) -> None:
        """Leave out DeepSpeed's count: a loss of two forwards would enter twice, leave once, and never be reduced."""

    def queue_post_backward_callback(self) -> bool:
        """Leave out DeepSpeed's, which comes once a forward: autograd is asked for each backward."""
        return True

    def _module_reached(self, only_engine: bool) -> None:
        """A backward comes to a module of the model; the first begins it.

        Args:
            only_engine: no other engine has the model, whose loss it may be.

        Raises:
            RuntimeError: an exception has ended the last backward while gradients accumulate.
        """
        number = torch._C._current_graph_task_id()
        if number in (self._looked_at, self._passed_by) or self._is_under_way(number):
            return
        trained = (param for group in reversed(self.fp16_groups) for param in reversed(group))
        if any(map(is_still_to_come, trained)) or (only_engine and runs_to_its_leaves()):
            self._begin_backward()
        else:
            self._looked_at, self._passed_by = _NONE, number
            _Backward(self.parameter_offload.release_backward_leftovers)

    def _is_under_way(self, number: int) -> bool:
        """Whether the backward that runs now, with this number of autograd's, has begun, or is none of the user's."""
        if self._running is not None and not self._running.is_alive():
            self._forget_backward()
        self._looked_at = number
        # A loss in tiles goes backward inside of the forward: what comes then waits for the user's backward.
        return self._running is not None or self.parameter_offload.gatherer.module_depth > 0

    def _begin_backward(self) -> None:
        self.parameter_offload.gatherer.ownership.check_placement()
        self._running = _Backward(self._backward_has_run)
        if self._are_stale:
            self._zero_stale()
        if self._order is not None:
            self._order.begin()
        boundary = self.session.engine().is_gradient_accumulation_boundary()  # which DeepSpeed tells once a forward
        if hasattr(self, "set_gradient_accumulation_boundary"):
            self.set_gradient_accumulation_boundary(boundary)
        else:
            self.is_gradient_accumulation_boundary = boundary
        state = getattr(self, "_backward_hook_state", None)
        if state is not None:
            state.backward_active_depth = 0
            state.enter_backward()
            state.post_backward_callback_queued = True

    def _backward_has_run(self) -> None:
        """Let the engine end the backward, where no engine.backward() does so next."""
        self._running = None
        if hasattr(self, "run_grad_acc_post_hooks"):
            self.run_grad_acc_post_hooks()

    def end_backward(self) -> None:
        """The step begins: reduce what has come unnoticed, such as after a forward that an exception has ended.

        Raises:
            RuntimeError: an exception has ended the last backward.
        """
        if self._running is not None:
            self._drop_backward()
            raise RuntimeError(_ENDED_BY_EXCEPTION)
        if (self._order is not None and self._order.has_begun) or self._in_buckets:
            self.independent_gradient_partition_epilogue()

    def backward_epilogue(self) -> None:
        """A backward has ended. (DeepSpeed 0.18 does not say so, nor that a forward begins.)"""
        super().backward_epilogue()
        self.parameter_offload.release_backward_leftovers()  # as DeepSpeed has done since 0.19
        self._running = None

    def clear_backward_seen_flag(self) -> None:
        """A forward begins.

        Raises:
            RuntimeError: an exception has ended the last backward while gradients accumulate.
        """
        if self._running is not None and not self._running.is_alive():
            self._forget_backward()
        super().clear_backward_seen_flag()

    def _forget_backward(self) -> None:
        """Drop the gradients of a backward that an exception has ended, in which the next one would find its own."""
        self._drop_backward()
        if self._backwards or self._coalesce_grad_reduction:
            raise RuntimeError(_ENDED_BY_EXCEPTION)
        self._forget_gradients()

    def _drop_backward(self) -> None:
        self._running = None
        if hasattr(self, "_backward_hook_state"):
            self._backward_active_depth = 0
        if self._order is not None:
            self._order.start_again()
        self.parameter_offload.release_backward_leftovers()
        self.reducer.drain()
        for bucket in self.ipg_buckets.values():
            bucket.params.clear()
            bucket.elements = 0
        self._in_buckets.clear()
        for param in (param for group in self.fp16_groups for param in group):
            param.grad = None

    def independent_gradient_partition_epilogue(self) -> None:
        self._reduce_the_rest()
        self._running = None
        self._backwards += 1

    def _reduce_the_rest(self) -> None:
        """Bring what a backward has left to where the step finds it."""
        if self._order is not None:
            self._order.finish()
        quantizes = self.session.config.quantizes_gradients
        if quantizes:
            if self._at_boundary():
                self._finish_resting()  # what has come twice in an earlier backward
            self.reducer.drain()  # the current stream now waits for all results, so that the host need not
        if self._watch is not None:
            self._watch.backward_is_issued()
        if not quantizes:
            super().independent_gradient_partition_epilogue()
            return
        # There is DeepSpeed's own work on that stream where something has come into a bucket.
        with nullcontext() if self._in_buckets else Replaced(self, "reduce_and_partition_stream", _NoWait()):
            super().independent_gradient_partition_epilogue()
        self._wait_for_copies_to_host()

    def _wait_for_copies_to_host(self) -> None:
        """Offloaded gradients are copied on the current stream; the host looks at them next."""
        if self.offload_optimizer and self.session.device.type == "cuda":
            torch.cuda.current_stream(self.session.device).synchronize()

    def _count_gradients(self, numel: int, communication_data_type: torch.dtype | None, rounds: int) -> None:
        """DeepSpeed reduces `numel` elements by itself; `rounds` 2 when it is an all-reduce."""
        ledger = self.session.ledger
        with ledger.counting("gradients"):
            dtype = communication_data_type or self.communication_data_type
            ledger.sent_around_ring(numel * dtype.itemsize, rounds)
            ledger.stock_would_send(numel)

    def _avg_scatter_grads(self, params: list[Parameter], communication_data_type=None) -> list[Tensor]:
        """Mean gradient of a bucket, this rank's slices; DeepSpeed's own reduce-scatter when nothing is quantized."""
        session = self.session
        if not session.config.quantizes_gradients:
            numel = sum(p.ds_tensor.ds_numel for p in params) * session.topology.world_size
            self._count_gradients(numel, communication_data_type, rounds=1)
            stock = getattr(super(), AVG_SCATTER_GRADS)
            with timed_by_deepspeed(session.ledger, session.device.type == "cuda"):
                return stock(params) if communication_data_type is None else stock(params, communication_data_type)
        grads = [p.grad.view(p.ds_shape) for p in params]
        return self.reducer.reduce(self.reducer.unit_of(params), grads, self.gradient_accumulation_dtype)

    def _avg_scatter_contiguous_grads(self, buffer: Tensor, *communication_data_type: torch.dtype) -> list[Tensor]:
        """The same by an all-reduce of the whole bucket: `"reduce_scatter": false`, nothing is quantized then."""
        self._count_gradients(buffer.numel(), next(iter(communication_data_type), None), rounds=2)
        with timed_by_deepspeed(self.session.ledger, buffer.is_cuda):
            return getattr(super(), AVG_SCATTER_CONTIGUOUS_GRADS)(buffer, *communication_data_type)

    def _refuse_resting(self) -> None:
        """One rank alone cannot end a reduction.

        Raises:
            RuntimeError: something rests in the node.
        """
        if self._sums_rest() and self.reducer.resting:
            raise RuntimeError(
                "gradients of earlier micro-batches rest inside the node until the step, and one rank alone cannot "
                "finish them: look at them with safe_get_full_grad on all ranks, or set "
                f'"{SECTION}.gradients.accumulate_in": "world"'
            )


setattr(ReducingStage3, AVG_SCATTER_GRADS, ReducingStage3._avg_scatter_grads)
setattr(ReducingStage3, AVG_SCATTER_CONTIGUOUS_GRADS, ReducingStage3._avg_scatter_contiguous_grads)


def _preceded(name: str, before: Callable[[ReducingStage3], None]) -> Callable:
    """DeepSpeed's method of this name, with something done before."""

    def method(self, *args, **kwargs):
        before(self)
        return getattr(super(ReducingStage3, self), name)(*args, **kwargs)

    return method


# Of full gradients, which all ranks look at together, and of this rank's part.
for _name in ("get_fp32_grad_for_param", "set_fp32_grad_for_param", "update_fp32_grad_for_param_vectorized"):
    setattr(ReducingStage3, _name, _preceded(_name, ReducingStage3._finish_resting))
for _name in ("get_local_fp32_grad_for_param", "set_local_grad_for_param", "get_fp32_grad_partitions"):
    setattr(ReducingStage3, _name, _preceded(_name, ReducingStage3._refuse_resting))


class _Backward:
    """A backward that autograd runs, and `ended` when it has run; an exception ends it without a call.

    Autograd alone refers to what it is to call, so its end, whatever brings it, is the end of that.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        def call() -> None:
            ended()

        self._call = weakref.ref(call)
        torch.autograd.Variable._execution_engine.queue_callback(call)

    def is_alive(self) -> bool:
        """Whether autograd still runs it."""
        return self._call() is not None


class _NoWait:
    """Stands for a stream whose work the current stream waits for already."""

    def synchronize(self) -> None:
        """DeepSpeed stops the host here at the end of every backward."""
