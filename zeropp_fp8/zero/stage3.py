"""DeepSpeedZeroOptimizer_Stage3 with quantized collectives: all of its methods that this project overrides.

The class has a method if the stage itself has something to do: gathers (through ZeroppOffload), the drop of
secondary shards when weights change, extra state in checkpoints. Objects of the stage answer the other methods
(ANSWERED): they reduce gradients, and store gradients, states and parts of parameters. If no object answers a method,
it is DeepSpeed's own.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import torch
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import logger

from zeropp_fp8.comm.ledger import OUTSIDE
from zeropp_fp8.optim import update_of
from zeropp_fp8.zero.as_deepspeed import GRAD_PARTITIONS, FP32States, Partitions, SliceLayout, replaced
from zeropp_fp8.zero.attachment import Attachment
from zeropp_fp8.zero.bound import StepWatch
from zeropp_fp8.zero.chunks import Ranges
from zeropp_fp8.zero.extra_state import ENTRY, extra_state, load_extra_state
from zeropp_fp8.zero.fall_back import FellBack
from zeropp_fp8.zero.looking import Looking
from zeropp_fp8.zero.offload import ZeroppOffload
from zeropp_fp8.zero.reduce.backwards import Backwards
from zeropp_fp8.zero.reduce.buckets import AVG_SCATTER_CONTIGUOUS_GRADS, AVG_SCATTER_GRADS, Buckets
from zeropp_fp8.zero.reduce.hooks import GradientHooks
from zeropp_fp8.zero.reduce.reduction import Reduction
from zeropp_fp8.zero.session import Session
from zeropp_fp8.zero.stage_part import StagePart
from zeropp_fp8.zero.telemetry import ProgressLine

_ENDED = (type(None), weakref.ProxyType)  # a parameter that no engine trains refers to one of these
# DeepSpeed's methods by the stage's attribute that answers them.
ANSWERED: dict[str, str] = {
    "hooks": "create_reduce_and_remove_grad_hooks reduce_ready_partitions_and_remove_grads",
    "backwards": """
        enter_backward queue_post_backward_callback should_refresh_expected_hook_count backward_epilogue
        clear_backward_seen_flag independent_gradient_partition_epilogue
    """,
    "reduction": "finalize_gradient_accumulation_boundary zero_grad",
    "buckets": f"partition_grads {AVG_SCATTER_GRADS} {AVG_SCATTER_CONTIGUOUS_GRADS}",
    "gradients": "_setup_for_real_optimizer get_grad_norm_direct _get_fp32_grad_state_partition",
    "states": """
        _create_fp32_partitions initialize_optimizer_states _prepare_fp32_grad_for_sub_group unscale_and_clip_grads
        _optimizer_step _reassign_or_swap_out_partitioned_parameters _get_fp32_opt_state_partition
    """,
    "layout": """
        _get_param_partition_rank _create_fp16_sub_groups _fp32_state_allgather load_hp_checkpoint_state
    """,
    "looking": """
        get_fp32_grad_for_param set_fp32_grad_for_param update_fp32_grad_for_param_vectorized
        get_local_fp32_grad_for_param set_local_grad_for_param get_fp32_grad_partitions
        set_full_hp_param set_local_hp_param
    """,
}


class ZeroppStage3(DeepSpeedZeroOptimizer_Stage3):
    """ZeRO stage 3 with quantized collectives.

    Attributes:
        stock: DeepSpeed's own methods of this stage.
        hooks, backwards, reduction, buckets: bring gradients from autograd to the rank that keeps them (reduce/).
        gradients: stores reduced gradients until the step.
        states: stores master weights and moments, and updates them.
        layout: converts ranks' parts of parameters to DeepSpeed's slices in checkpoints.
        looking: DeepSpeed's functions that read and change all of these.
    """

    _coalesce_grad_reduction = False  # DeepSpeedEngine.coalesce_grad_reduction() sets it; not in DeepSpeed 0.18

    def __init__(self, module, init_optimizer, param_names, *args, session: Session, **kwargs) -> None:
        self.session, self.stock = session, super()
        self.hooks, self.backwards = GradientHooks(self), Backwards(self)
        self.buckets, self.looking = Buckets(self), Looking(self)
        if session.config.reduces_gradients:
            kwargs["reduce_scatter"] = True
        if kwargs.get("reduce_scatter", True):
            # DeepSpeed would copy each gradient into a buffer (a gigabyte by default), and then read it tensor by
            # tensor all the same. A gradient that comes twice in one backward would be added to while it is copied.
            kwargs["contiguous_gradients"] = False
        dtype = kwargs.get("gradient_accumulation_dtype", torch.float32)
        self.reduction = Reduction(self, module.parameters(), dtype)
        offload = kwargs.get("offload_optimizer_config")
        self.gradients, self.states, self.layout = _where_numbers_rest(self, init_optimizer, offload)
        super().__init__(module, init_optimizer, param_names, *args, **kwargs)
        self.reduction.add_parts(list(module.parameters()))
        report = session.config.report
        session.parts.append(FellBack(self))
        session.parts.extend([StepWatch(session)] if report.diagnose else [])
        session.parts.extend([ProgressLine(session, report.every)] if report.every else [])
        self.gatherer.ownership.given_back = self._bring_shards_home

    def destroy(self) -> None:
        """Detach from the model, and free all memory that is not DeepSpeed's: a script may keep an ended engine."""
        if self.parameter_offload.destroyed:
            return
        super().destroy()
        for each in (self.gradients, self.states, self.reduction):
            each.free()
        # Parts with numbers stay, for telemetry.py; the others hold memory.
        self.session.parts[:] = [part for part in self.session.parts if type(part).metrics is not StagePart.metrics]
        self._linked.detach()
        for param in self.module.parameters():
            if type(param.__dict__.get("_z3_optimizer")) in _ENDED:  # else another engine has the model
                param._z3_optimizer = weakref.proxy(self)  # safe_get_full_fp32_param asks it, while the engine is kept

    def _link_all_hp_params(self) -> None:
        """Make safe_get_full_fp32_param ask this stage, until its engine ends."""
        self._linked = Attachment(self, self.module.parameters(), "zeropp_fp8_stages")
        self.session.on_model.callback(self._linked.detach)
        self._linked.attach()
        for param in self.module.parameters():
            self._linked.keep(param, "_z3_optimizer")
        super()._link_all_hp_params()

    @torch.no_grad()
    def _bring_shards_home(self) -> None:
        """Copy shards that a later engine has moved back to DeepSpeed's flat buffers, where it reads weights."""
        for flat, shards in zip(self.fp16_partitioned_groups_flat, self.fp16_partitioned_groups):
            for shard, home in zip(shards, flat.split([shard.numel() for shard in shards])):
                shard.data = home.copy_(shard.data.view(-1))

    # -- gathers ---------------------------------------------------------------------------------------------------

    def initialize_ds_offload(self, module, **kwargs) -> ZeroppOffload:
        return ZeroppOffload(module=module, session=self.session, trains=True, **kwargs)

    @property
    def gatherer(self):
        return self.parameter_offload.gatherer

    @property
    def reducer(self):
        return self.reduction.reducer

    @functools.cached_property
    def state_groups(self):
        """Parameters that share a flat buffer of stored gradients and states; known once DeepSpeed has sub-groups."""
        from zeropp_fp8.zero.states.groups import make_state_groups

        session = self.session
        return make_state_groups(self.fp16_groups, session.own_numel, session.device, session.topology.world_size)

    @functools.cached_property
    def ranges(self) -> list[Ranges]:
        """Where parameters' partitions lie in the flat tensors of each sub-group."""
        return [Ranges([param.partition_numel() for param in group]) for group in self.fp16_groups]

    def _post_step(self, timer_names) -> None:
        """After the weights changed, drop all that was derived from them, and fetch persistent parameters again."""
        # For all parameters of the optimizer: one that was frozen later still moves by momentum and weight decay.
        self.gatherer.step_wrote(list(itertools.chain.from_iterable(self.fp16_groups)))
        with self._persistent_parameters_gathered():
            super()._post_step(timer_names)

    def checkpoint_event_prologue(self) -> None:
        self.gatherer.ownership.check_placement()
        super().checkpoint_event_prologue()

    def checkpoint_event_epilogue(self) -> None:
        with self._persistent_parameters_gathered():
            super().checkpoint_event_epilogue()

    def _persistent_parameters_gathered(self):
        """Gather persistent parameters in the wire format; DeepSpeed would use their exact all_gather."""
        self.gatherer.gather_now(self.persistent_parameters)  # its bytes count in the step that uses the parameters
        return replaced(self, "persistent_parameters", [])

    # -- the step --------------------------------------------------------------------------------------------------

    def step(self, closure=None) -> None:
        self.gatherer.ownership.check_placement()
        loss_scale = self.loss_scale
        self.reduction.finish()
        for part in list(self.session.parts):
            part.gradients_ready()
        super().step(closure)
        self.reduction.forget_gradients()
        if self.overflow and self.session.config.quantizes and self.session.topology.rank == 0:
            # With fp16 DeepSpeed's loss scaler logs this too, but at a level that its logger hides.
            logger.warning("zeropp_fp8: a gradient is not finite on some rank: the step is skipped on all")
        for part in list(self.session.parts):
            part.step_ended(bool(self.overflow), float(self.loss_scale / loss_scale))
        self.session.ledger.end_step()
        for part in self.session.parts:
            part.step_counted()
        self.gradients.forget()

    def _get_norm_groups(self):
        with self.session.ledger.counting("other"):
            for _ in self.fp16_groups:
                self.session.ledger.sent_around_ring(8, rounds=2)  # an all-reduce of one fp64 number
        return self.gradients.norms()

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        with self.session.ledger.counting("other"):
            self.session.ledger.sent_around_ring(1, rounds=2)  # an all-reduce of one byte
        if self.session.device.type == "cuda":  # DeepSpeed reads gradients on that stream
            self.reduce_and_partition_stream.wait_stream(torch.cuda.current_stream(self.session.device))
        return self.gradients.has_overflow(partition_gradients)

    def offload_states(self, *args, **kwargs) -> None:
        """Offload states. DeepSpeed moves its own buffers only, and maps them by equal slices.

        Raises:
            RuntimeError: numbers lie in other buffers, or in another layout.
        """
        for each in (self.states, self.gradients, self.layout):
            if each.stays is not None:
                raise RuntimeError(f"zeropp_fp8: offload_states does not know {each.stays}")
        partitions = getattr(self, GRAD_PARTITIONS)
        super().offload_states(*args, **kwargs)
        setattr(self, GRAD_PARTITIONS, partitions)
        if OffloadStateTypeEnum.lp_grads in self.offloaded_states:
            partitions.move(self.grad_partitions_flat_buffer.device)

    def reload_states(self, non_blocking: bool = False) -> None:
        if OffloadStateTypeEnum.lp_grads in self.offloaded_states:  # DeepSpeed would look for them in its buffer
            self.offloaded_states.remove(OffloadStateTypeEnum.lp_grads)
            self.grad_partitions_flat_buffer.data = self.grad_partitions_flat_buffer.to(self.session.device)
            getattr(self, GRAD_PARTITIONS).move(self.session.device)
        super().reload_states(non_blocking)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _rigid_state_dict(self) -> dict:
        with self.states.expanded(takes_back=False):
            state_dict = self.layout.to_slices(super()._rigid_state_dict())
        entry = extra_state(self.session)
        return state_dict | ({ENTRY: entry} if entry else {})

    def _rigid_load_state_dict(self, state_dict: dict, load_optimizer_states: bool = True) -> None:
        with self.states.expanded(takes_back=True, with_states=load_optimizer_states):
            super()._rigid_load_state_dict(self.layout.to_parts(state_dict), load_optimizer_states)
        self.states.loaded()
        load_extra_state(self.session, state_dict.get(ENTRY))

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir) -> None:
        own = [dict(group) for group in self.optimizer.param_groups]
        with self.states.expanded(takes_back=True):
            super().load_hp_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir)
        # DeepSpeed gives every param group the options of the first one: weight decay to norms, Muon to embeddings.
        path = f"{checkpoint_dir}/zero/optimizer_state.pt"
        saved = torch.load(path, weights_only=False, mmap=True)[OPTIMIZER_STATE_DICT]["param_groups"]
        for group, options in zip(self.optimizer.param_groups, saved if len(saved) == len(own) else own):
            group.update((key, value) for key, value in options.items() if key != "params")
        # It gives every sub-group one tensor of steps, to which each of them would add.
        for state in (state for state in self.optimizer.state.values() if torch.is_tensor(state.get("step"))):
            state["step"] = state["step"].clone()
        self.states.loaded()

    def load_module_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir, load_from_fp32_weights) -> None:
        takes_back = self.states.expanded(takes_back=True, with_states=False)
        with takes_back if load_from_fp32_weights else nullcontext():
            super().load_module_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir, load_from_fp32_weights)

    def _restore_from_bit16_weights(self) -> None:
        self.states.take_weights()
        self.gatherer.weights_changed()  # low-precision master weights have rounded the weights

    def load_state_dict(self, *args, **kwargs) -> None:
        with self.session.ledger.counting(OUTSIDE):
            super().load_state_dict(*args, **kwargs)
        if kwargs.get("checkpoint_folder"):  # a universal checkpoint holds weights and optimizer state only
            load_extra_state(self.session, None)
        self.gatherer.weights_changed()
        for part in list(self.session.parts):
            part.weights_loaded()


def _answered(attribute: str, name: str, there: str) -> Callable:
    """A method that calls `there` of an attribute of the stage, or DeepSpeed's own method if `there` is missing."""

    def method(self, *args, **kwargs):
        own = getattr(getattr(self, attribute), there, None)
        return (own or getattr(self.stock, name))(*args, **kwargs)

    method.__name__ = name
    return method


for _attribute, _names in ANSWERED.items():
    for _name in _names.split():
        # Python prefixes names of double-underscore methods with the name of their class.
        _there = _name.removeprefix("_DeepSpeedZeroOptimizer_Stage3__")
        setattr(ZeroppStage3, _name, _answered(_attribute, _name, _there))


def _where_numbers_rest(stage: ZeroppStage3, optimizer: torch.optim.Optimizer, offload) -> tuple:
    """(gradients, states, layout) for the configuration; modules that stock does not need are imported on demand."""
    config, gradients, layout = stage.session.config, Partitions(stage), SliceLayout(stage)
    if config.gradients.store_format != "none":
        from zeropp_fp8.zero.states.stored_gradients import StoredGradients

        gradients = StoredGradients(stage)
    if config.partition == "whole_tensor":
        from zeropp_fp8.zero.owners.layout import OwnerLayout

        layout = OwnerLayout(stage)
    update = update_of(optimizer)
    if config.stores_states_in_low_precision or (update is not None and update.needs_whole):
        from zeropp_fp8.zero.states.stored_states import StoredStates

        return gradients, StoredStates(stage, optimizer, offload), layout
    return gradients, FP32States(stage, optimizer), layout
