"""Subclass of DeepSpeedZeroOptimizer_Stage3.

What it changes: gathers (through ZeroppOffload), the reduction of gradient buckets (qgZ) and its order, the drop of
secondary shards when weights change, and an entry of its own in checkpoints where training depends on more than
weights and optimizer state. Everything else, the optimizer and the checkpoint layout included, is DeepSpeed's.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from deepspeed import comm as ds_comm
from deepspeed.utils import logger, z3_leaf_module
from torch import Tensor, nn
from torch.nn import Parameter

from zeropp_fp8.comm.issue import all_reduce, timed_by_deepspeed
from zeropp_fp8.comm.ledger import OUTSIDE
from zeropp_fp8.config import SECTION
from zeropp_fp8.zero.bound import StepWatch
from zeropp_fp8.zero.fall_back import fall_back_as_saved
from zeropp_fp8.zero.fused_update import use_fused_update
from zeropp_fp8.zero.offload import ZeroppOffload
from zeropp_fp8.zero.own_entry import ENTRY, load_own_entry, own_entry
from zeropp_fp8.zero.reduce.gradient_scales import GradientScales
from zeropp_fp8.zero.reduce.node_sums import numel_of_sums
from zeropp_fp8.zero.reduce.order import FixedOrder, reduction_units
from zeropp_fp8.zero.reduce.reducer import GradientReducer
from zeropp_fp8.zero.report import print_progress_line
from zeropp_fp8.zero.session import Session
from zeropp_fp8.zero.stage3_base import Freed, Stage3Base
from zeropp_fp8.zero.turns import Turn

_LEAF = "ds_z3_leaf_module"
_ENDED = (type(None), weakref.ProxyType)  # what a parameter refers to that no engine trains
# The double-underscore methods of DeepSpeed's class, by the names under which Python stores them.
AVG_SCATTER_GRADS = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
AVG_SCATTER_CONTIGUOUS_GRADS = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads"


class ZeroppStage3(Stage3Base):
    """ZeRO stage 3 with quantized collectives."""

    _coalesce_grad_reduction = False  # DeepSpeedEngine.coalesce_grad_reduction() sets it; DeepSpeed 0.18 has no such

    def __init__(self, module, init_optimizer, param_names, *args, session: Session, **kwargs) -> None:
        self._reducer: GradientReducer | None = None
        self._order: FixedOrder | None = None
        self._reduced: set[int] = set()  # ds_id of what this backward has reduced already
        self._written: set[int] = set()  # ds_id of what has a mean gradient since the last step, with sums in the node
        self._in_backward = False  # it has reached the model, and has not ended
        self._seen_backward = -1  # autograd's number of the last one that brought a gradient
        if session.config.quantizes_gradients:
            kwargs["reduce_scatter"] = True
            kwargs["contiguous_gradients"] = False  # DeepSpeed's bucket, a gigabyte by default, would not be used
        dtype = kwargs.get("gradient_accumulation_dtype", torch.float32)
        session.sums_numel = numel_of_sums(session, module.parameters(), dtype)
        config = session.config
        self._watch = StepWatch(session) if config.report.diagnose else None
        keeps_optimizer = session.state_formats is None
        if config.quantizes and keeps_optimizer and use_fused_update(init_optimizer) and session.topology.rank == 0:
            print("zeropp_fp8: the optimizer leaves the choice to torch: its fused update is used", flush=True)
        super().__init__(module, init_optimizer, param_names, *args, session=session, **kwargs)
        self.gatherer.given_back = self._bring_shards_home
        session.residual_bytes = self.reducer.residual_bytes(module.parameters())
        session.bytes_to_come = session.residual_bytes + session.sums_numel * dtype.itemsize

    @property
    def reducer(self) -> GradientReducer:
        """Made on first use: DeepSpeed's constructor makes the stream, and already needs the reducer before it ends."""
        if self._reducer is None:
            self._reducer = GradientReducer(self.session, self.reduce_and_partition_stream)
        return self._reducer

    def destroy(self) -> None:
        """Give the model back, and the memory of all that is not DeepSpeed's: an engine may be kept after its end."""
        if self.parameter_offload.destroyed:
            return
        super().destroy()
        self._linked.end()
        for param in self.module.parameters():
            if type(param.__dict__.get("_z3_optimizer")) in _ENDED:  # else another engine has the model
                param._z3_optimizer = weakref.proxy(self)  # safe_get_full_fp32_param asks it, while the engine is kept
        self._reducer = Freed() if self.reducer.error_feedback else None

    def _link_all_hp_params(self) -> None:
        """Be whom safe_get_full_fp32_param asks, until this engine ends."""
        self._linked = Turn(self, self.module.parameters(), "zeropp_fp8_stages")
        self.session.on_model.callback(self._linked.end)
        self._linked.begin()
        for param in self.module.parameters():
            self._linked.keep(param, "_z3_optimizer")
        super()._link_all_hp_params()

    @torch.no_grad()
    def _bring_shards_home(self) -> None:
        """Let shards, which a later engine has moved, lie in DeepSpeed's flat buffers again: it reads weights there."""
        for flat, shards in zip(self.fp16_partitioned_groups_flat, self.fp16_partitioned_groups):
            for shard, home in zip(shards, flat.split([shard.numel() for shard in shards])):
                shard.data = home.copy_(shard.data.view(-1))

    def _remove_gradient_hooks(self) -> None:
        for hook in (*self._grad_acc_hooks, *self._leaf_module_hooks):
            hook.remove()

    # -- gathers ---------------------------------------------------------------------------------------------------

    def initialize_ds_offload(self, module, **kwargs) -> ZeroppOffload:
        return ZeroppOffload(module=module, session=self.session, trains=True, **kwargs)

    @property
    def gatherer(self):
        return self.parameter_offload.gatherer

    def _post_step(self, timer_names) -> None:
        """After the weights changed: drop what was derived from them, fetch the persistent parameters again."""
        # Of all that it holds: a parameter that was frozen since goes on moving, by momentum and weight decay.
        self.gatherer.weights_changed((p for group in self.fp16_groups for p in group), by_step=True)
        with self._persistent_parameters_gathered():
            super()._post_step(timer_names)

    def checkpoint_event_prologue(self) -> None:
        self.gatherer.check_placement()
        super().checkpoint_event_prologue()

    def checkpoint_event_epilogue(self) -> None:
        with self._persistent_parameters_gathered():
            super().checkpoint_event_epilogue()

    def _persistent_parameters_gathered(self):
        """DeepSpeed gathers persistent parameters through their exact all_gather; do it in the wire format instead."""
        with self.session.ledger.counting("weights_forward"):
            self.gatherer.gather_now(self.persistent_parameters)
        return _Replaced(self, "persistent_parameters", [])

    # -- gradients -------------------------------------------------------------------------------------------------

    def create_reduce_and_remove_grad_hooks(self) -> None:
        """Reduce every parameter from its own gradient hook, blocks (z3 leaf modules) included.

        DeepSpeed reduces a leaf module from a full backward hook of the module, which fires before the gradients
        exist when no input of the block needs one (a frozen embedding under LoRA). The unit order below keeps blocks
        together without it, and gives the same buckets as stock's leaf modules.
        """
        self.session.on_model.callback(self._remove_gradient_hooks)
        trainable = [param for group in self.fp16_groups for param in group]
        self._names = {param.ds_id: self.param_names.get(param, str(param.ds_id)) for param in trainable}
        self.parameter_offload.before_backward = self._begin_backward
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
                    self.scales = self.reducer.scales = GradientScales(self.session, params, names)
                self._order_is_known(params)
            self._users = Counter(id(p) for module in self.module.modules() for p in module.parameters(recurse=False))
            self._used_by_only: dict[tuple[int, bool], list[Parameter]] = {}
            self.parameter_offload.after_backward_of = self._module_ended
            leaf_of = {param: param.__dict__.pop(_LEAF) for param in trainable if _LEAF in param.__dict__}
            super().create_reduce_and_remove_grad_hooks()
            for param, leaf in leaf_of.items():
                setattr(param, _LEAF, leaf)
            for param, handle in zip((p for p in trainable if p.requires_grad), self._grad_acc_hooks, strict=True):
                hooks = handle.hooks_dict_ref()
                hooks[handle.id] = self._gradient_hook(param, hooks[handle.id])
        else:
            super().create_reduce_and_remove_grad_hooks()

    def _gradient_hook(self, param: Parameter, stock_hook: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """What is called when a gradient is there: DeepSpeed's hook for the first of a backward, whose end it sees to.

        For all others it would do that again, which takes 30 calls in Python a parameter.
        """

        def gradient_is_there(tensor: Tensor) -> None:
            running = torch._C._current_graph_task_id()
            if running == self._seen_backward:
                self.reduce_ready_partitions_and_remove_grads(param)
            else:
                self._seen_backward = running
                stock_hook(tensor)

        return gradient_is_there

    def should_refresh_expected_hook_count(self) -> bool:
        """Never: the end of a backward is told by autograd, not by a count of DeepSpeed's hooks."""
        return False

    def _uses_fixed_order(self) -> bool:
        """Always, except that `lossless` at module granularity promises stock's buckets, filled as gradients come."""
        return self.session.config.quantizes or self.session.config.gather_granularity == "block"

    def reduce_ready_partitions_and_remove_grads(self, param: Parameter) -> None:
        if self._coalesce_grad_reduction or self._order is None:
            super().reduce_ready_partitions_and_remove_grads(param)
        elif getattr(param, "ds_grad_is_ready", True):  # not while a tiled computation goes on adding to it
            self._order.is_ready(param)

    def _module_ended(self, module: nn.Module) -> None:
        """Of a module whose backward is over: gradients of parameters that no other module has come no more."""
        leaf = z3_leaf_module(module)  # another engine over the model may have it so
        params = self._used_by_only.get((id(module), leaf))
        if params is None:
            params = [p for p in module.parameters(recurse=leaf) if self._users[id(p)] == 1]
            self._used_by_only[id(module), leaf] = params
        if params and not self._coalesce_grad_reduction:
            self._order.module_ended(params)

    def _put_into_bucket(self, params: list[Parameter]) -> None:
        """Stock's way, where gradients are not quantized."""
        for param in params:
            super().reduce_ready_partitions_and_remove_grads(param)

    @torch.no_grad()
    def _reduce_unit(self, params: list[Parameter]) -> None:
        """Quantize the gradients of a unit, send them, and let the result arrive in the gradient partitions."""
        for param in params:
            if param.grad is None:
                raise RuntimeError(
                    f"the gradient of {self.param_names.get(param, param.ds_id)} is gone: another engine over the same "
                    "model has taken it; call destroy() on that engine before the next one is made"
                )
            if param.grad.numel() != param.ds_numel:
                raise RuntimeError(
                    f"the gradient of {self.param_names.get(param, param.ds_id)} has {param.grad.numel()} elements, "
                    f"its parameter {param.ds_numel}"
                )
        grads = [param.grad.contiguous() for param in params]
        names = [self._names[p.ds_id] for p in params]
        if self.session.sums_numel and not self._at_boundary():
            self.reducer.sum_in_node(params, grads, names, self.gradient_accumulation_dtype)
            self._reduced.update([p.ds_id for p in params])
        else:
            self._finish_unit(params, names, grads)
        for param in params:
            # Encoding was the last use, on this stream: the memory may be used again at once.
            param.grad = None

    def formats_changed(self) -> None:
        self.reducer.formats_changed()
        self.scales = None
        super().formats_changed()

    def _finish_unit(self, params: Sequence[Parameter], names: list[str], grads: list[Tensor] | None) -> None:
        """Let the mean of a unit's gradients, those that rest in the node too, arrive in the gradient partitions."""
        # A parameter whose gradient comes twice in one backward adds to what it has reduced before.
        twice = params[0].ds_id in (self._written if self.session.sums_numel else self._reduced)
        again = twice or (self.micro_step_id > 0 and not self.session.sums_numel)
        ids = [p.ds_id for p in params]
        self._reduced.update(ids)
        self._written.update(ids)
        if self.offload_optimizer:
            slices = self.reducer.reduce(params, grads, names, self.gradient_accumulation_dtype)
            self._partition_grads(params, slices, again)
            return
        headroom = self.reducer.headroom(params, more=int(grads is not None))
        results, arrived = self._gradient_results(params, again, twice, headroom or 1.0)
        if grads is None:
            self.reducer.spread(params, names, results, again, arrived)
        else:
            self.reducer.start(params, grads, names, results, again, arrived)

    def partition_grads(self, params_to_release: list[Parameter], grad_partitions: list[Tensor]):
        """What DeepSpeed has reduced by itself, when it is told to put that off: the first of a step is no addition."""
        if not self.session.sums_numel:
            return super().partition_grads(params_to_release, grad_partitions)
        buffers = []
        for param, part in zip(params_to_release, grad_partitions):
            buffers += self._partition_grads([param], [part], param.ds_id in self._written)
            self._written.add(param.ds_id)
        return buffers

    def _partition_grads(self, params: Sequence[Parameter], parts: list[Tensor], again: bool) -> list[Tensor]:
        with _Replaced(self, "micro_step_id", int(again)):  # DeepSpeed adds from 1 on
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
        for params in self.reducer.resting:
            self._finish_unit(params, [self._names[p.ds_id] for p in params], None)
        self.reducer.drain()
        self._wait_for_copies_to_host()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """The step begins, without having been announced to the last backward. (Not in DeepSpeed 0.18.)"""
        self.set_gradient_accumulation_boundary(True)
        self._finish_resting()
        super().finalize_gradient_accumulation_boundary()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._forget_resting()

    def _forget_resting(self) -> None:
        self._written.clear()
        if self._sums_rest():
            self.reducer.forget_sums()

    def _sums_rest(self) -> bool:
        """Whether there may be something that rests in the node."""
        return bool(self.session.sums_numel) and not self.parameter_offload.destroyed

    def _begin_backward(self) -> None:
        self.gatherer.check_placement()
        self._in_backward = True
        if self._order is not None:
            self._order.begin()

    def backward_epilogue(self) -> None:
        """A backward has ended. (DeepSpeed 0.18 does not say so, nor that a forward begins.)"""
        super().backward_epilogue()
        self._in_backward = False

    def clear_backward_seen_flag(self) -> None:
        """A forward begins.

        Raises:
            RuntimeError: an exception has ended the last backward while gradients accumulate.
        """
        inside_of_one = torch._C._current_graph_task_id() != -1  # which runs the model again
        if self._in_backward and self._backward_active_depth > 0 and not inside_of_one:
            self._forget_backward()
        super().clear_backward_seen_flag()

    def _forget_backward(self) -> None:
        """Drop the gradients of a backward that an exception has ended, in which the next one would find its own."""
        self._in_backward = False
        self._backward_active_depth = 0
        if self._order is not None:
            self._order.start_again()
        self._reduced.clear()
        self.reducer.drain()
        if self.micro_step_id == 0:
            self._forget_resting()
        for bucket in self.ipg_buckets.values():
            bucket.params.clear()
            bucket.elements = 0
        for param in (param for group in self.fp16_groups for param in group):
            param.grad = None
        # In a first micro-batch the next gradients take the place of those that have been reduced.
        if self.micro_step_id > 0 or self._coalesce_grad_reduction:
            raise RuntimeError(
                "an exception has ended the last backward after some of its gradients may have been added to those of "
                "earlier micro-batches; call engine.optimizer.zero_grad() and begin the step again"
            )

    def independent_gradient_partition_epilogue(self) -> None:
        if self._order is not None:
            self._order.finish()
        self._reduced.clear()
        self._in_backward = False
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
        waits = any(bucket.params for bucket in self.ipg_buckets.values())
        with nullcontext() if waits else _Replaced(self, "reduce_and_partition_stream", _NoWait()):
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
        names = [self._names[p.ds_id] for p in params]
        grads = [p.grad.view(p.ds_shape) for p in params]
        return self.reducer.reduce(params, grads, names, self.gradient_accumulation_dtype)

    def _avg_scatter_contiguous_grads(self, buffer: Tensor, *communication_data_type: torch.dtype) -> list[Tensor]:
        """The same by an all-reduce of the whole bucket: `"reduce_scatter": false`, nothing is quantized then."""
        self._count_gradients(buffer.numel(), next(iter(communication_data_type), None), rounds=2)
        with timed_by_deepspeed(self.session.ledger, buffer.is_cuda):
            return getattr(super(), AVG_SCATTER_CONTIGUOUS_GRADS)(buffer, *communication_data_type)

    def get_fp32_grad_for_param(self, param: Parameter) -> Tensor | None:
        self._finish_resting()
        return super().get_fp32_grad_for_param(param)

    def set_fp32_grad_for_param(self, value: Tensor, param: Parameter) -> None:
        self._finish_resting()
        super().set_fp32_grad_for_param(value, param)

    def update_fp32_grad_for_param_vectorized(self, update_func, param_list) -> None:
        self._finish_resting()
        super().update_fp32_grad_for_param_vectorized(update_func, param_list)

    def get_local_fp32_grad_for_param(self, param: Parameter) -> Tensor | None:
        self._refuse_resting()
        return super().get_local_fp32_grad_for_param(param)

    def set_local_grad_for_param(self, value: Tensor, param: Parameter) -> None:
        self._refuse_resting()
        super().set_local_grad_for_param(value, param)

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        self._refuse_resting()
        return super().get_fp32_grad_partitions()

    def set_full_hp_param(self, value: Tensor, param: Parameter, optim_state_key=None) -> None:
        super().set_full_hp_param(value, param, optim_state_key)
        if optim_state_key is None:  # a master weight, which the next step writes to the shards
            for unit in self.gatherer.units_with(param):
                unit.expect_large_step()

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

    # -- the step --------------------------------------------------------------------------------------------------

    def step(self, closure=None) -> None:
        self.gatherer.check_placement()
        loss_scale = self.loss_scale
        self._finish_resting()
        self._drop_gradients_of_frozen()
        for observer in self.session.observers:
            observer.gradients_are_there()
        super().step(closure)
        self._forget_resting()
        residuals = self.reducer.error_feedback
        if residuals and (self.overflow or self.loss_scale != loss_scale):
            residuals.reset()
        if self.scales is not None:
            with self.session.ledger.counting("other"):
                self.scales.end_step(bool(self.overflow), float(self.loss_scale / loss_scale))
        if self.overflow and self.session.config.quantizes and ds_comm.get_rank() == 0:
            # DeepSpeed's loss scaler says so too with fp16, but not at the level that its logger shows.
            logger.warning("zeropp_fp8: a gradient is not finite on some rank: the step is skipped on all")
        if self.session.conversion is not None:
            self._end_compute_step(self.loss_scale / loss_scale)
        for observer in self.session.observers:
            observer.step_ended()
        self.session.ledger.end_step()
        if self._watch is not None:
            self._watch.end_step()
        print_progress_line(self.session, self.scales)

    def _end_compute_step(self, loss_scale_change: float) -> None:
        """Take over the amax that the step has shown, in one collective."""
        session = self.session

        def largest_of_all(amax: Tensor) -> None:
            all_reduce(amax, dist.ReduceOp.MAX, session.topology.group, session.ledger)

        with session.ledger.counting("other"):
            several = largest_of_all if session.topology.world_size > 1 else None
            session.conversion.scaling.end_step(several, session.device, bool(self.overflow), float(loss_scale_change))

    def get_grad_norm_direct(self, gradients, params, norm_type=2):
        """The global 2-norm in one multi-tensor pass and one all-reduce; DeepSpeed takes one pass a parameter.

        In fp64 as there: squares of numbers above 1.8e19 are beyond fp32, those of 1e-23 vanish in it. Unquantized
        gradients keep DeepSpeed's, whose bits `lossless` promises.
        """
        plain = float(norm_type) == 2.0 and self.model_parallel_group is None and gradients
        if not (plain and self.session.config.quantizes_gradients):
            return super().get_grad_norm_direct(gradients, params, norm_type)
        own = [g for g in gradients if g.numel()]
        total = torch.zeros((), dtype=torch.float64, device=self.session.device)
        if own:  # a rank may own nothing
            total = torch.stack(torch._foreach_norm(own, 2, dtype=torch.float64)).square().sum()
        ds_comm.all_reduce(total, op=ds_comm.ReduceOp.SUM, group=self.session.topology.group)
        norm = total.sqrt()
        # DeepSpeed's mark for a norm that is not finite.
        return torch.where(norm.isfinite(), norm, torch.full_like(norm, -1.0))

    def _get_norm_groups(self):
        with self.session.ledger.counting("other"):
            for _ in self.fp16_groups:
                self.session.ledger.sent_around_ring(8, rounds=2)  # an all-reduce of one fp64 number
        return super()._get_norm_groups()

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        with self.session.ledger.counting("other"):
            self.session.ledger.sent_around_ring(1, rounds=2)  # an all-reduce of one byte
        if self.session.device.type == "cuda":  # DeepSpeed looks at gradients there
            self.reduce_and_partition_stream.wait_stream(torch.cuda.current_stream(self.session.device))
        return super().has_overflow(partition_gradients)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _rigid_state_dict(self) -> dict:
        entry = own_entry(self)
        return super()._rigid_state_dict() | ({ENTRY: entry} if entry else {})

    def _rigid_load_state_dict(self, state_dict: dict, load_optimizer_states: bool = True) -> None:
        super()._rigid_load_state_dict(state_dict, load_optimizer_states)
        if self.session.config.quantizes and self.session.state_formats is None:
            use_fused_update(self.optimizer, self.fp32_partitioned_groups_flat)
        self._held_before, self._fell_back_before = load_own_entry(self, state_dict.get(ENTRY))

    def _restore_from_bit16_weights(self) -> None:
        super()._restore_from_bit16_weights()
        self.gatherer.weights_changed()  # master weights in low precision have rounded them

    def load_state_dict(self, *args, **kwargs) -> None:
        self._held_before, self._fell_back_before = {}, False
        with self.session.ledger.counting(OUTSIDE):
            super().load_state_dict(*args, **kwargs)
        if kwargs.get("checkpoint_folder"):  # a universal checkpoint holds weights and optimizer state only
            self._held_before, self._fell_back_before = load_own_entry(self, None)
        self.gatherer.weights_changed()
        if self._fell_back_before:
            fall_back_as_saved(self)
        self.gatherer.hold_again(self._held_before, self.param_names)


setattr(ZeroppStage3, AVG_SCATTER_GRADS, ZeroppStage3._avg_scatter_grads)
setattr(ZeroppStage3, AVG_SCATTER_CONTIGUOUS_GRADS, ZeroppStage3._avg_scatter_contiguous_grads)


class _NoWait:
    """Stands for a stream whose work the current stream waits for already."""

    def synchronize(self) -> None:
        """DeepSpeed stops the host here at the end of every backward."""


class _Replaced:
    """Context in which an attribute of an object has another value."""

    def __init__(self, owner: object, name: str, value: object) -> None:
        self._owner, self._name, self._value = owner, name, value

    def __enter__(self) -> None:
        self._before = getattr(self._owner, self._name)
        setattr(self._owner, self._name, self._value)

    def __exit__(self, *exc) -> None:
        setattr(self._owner, self._name, self._before)
