"""Subclass of DeepSpeedZeroOptimizer_Stage3.

What it changes: gathers (through ZeroppOffload), the reduction of gradients (stage3_reduction.py), the drop of
secondary shards when weights change, and an entry of its own in checkpoints where training depends on more than
weights and optimizer state. Everything else, the optimizer and the checkpoint layout included, is DeepSpeed's.
"""

from __future__ import annotations

import weakref

import torch
from deepspeed import comm as ds_comm
from deepspeed.utils import logger
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8.comm.ledger import OUTSIDE
from zeropp_fp8.zero.extra_state import ENTRY, extra_state, load_extra_state
from zeropp_fp8.zero.fall_back import FellBack
from zeropp_fp8.zero.fused_update import use_fused_update
from zeropp_fp8.zero.held_weights import HeldWeights
from zeropp_fp8.zero.offload import ZeroppOffload
from zeropp_fp8.zero.report import print_progress_line
from zeropp_fp8.zero.session import Session
from zeropp_fp8.zero.stage3_base import Replaced
from zeropp_fp8.zero.stage3_reduction import ReducingStage3
from zeropp_fp8.zero.stage_part import StagePart
from zeropp_fp8.zero.turns import Turn

_ENDED = (type(None), weakref.ProxyType)  # what a parameter refers to that no engine trains


class ZeroppStage3(ReducingStage3):
    """ZeRO stage 3 with quantized collectives."""

    def __init__(self, module, init_optimizer, param_names, *args, session: Session, **kwargs) -> None:
        config = session.config
        keeps_optimizer = session.state_formats is None
        if config.quantizes and keeps_optimizer and use_fused_update(init_optimizer) and session.topology.rank == 0:
            print("zeropp_fp8: the optimizer leaves the choice to torch: its fused update is used", flush=True)
        super().__init__(module, init_optimizer, param_names, *args, session=session, **kwargs)
        self._held = HeldWeights(session, self.gatherer, self.param_names)
        session.parts += [FellBack(self), self._held]
        self.gatherer.ownership.given_back = self._bring_shards_home

    def destroy(self) -> None:
        """Give the model back, and the memory of all that is not DeepSpeed's: an engine may be kept after its end."""
        if self.parameter_offload.destroyed:
            return
        super().destroy()
        # What became of gradients may still be asked for (wire_report); the others hold memory.
        self.session.parts[:] = [part for part in self.session.parts if type(part).report is not StagePart.report]
        self._linked.end()
        for param in self.module.parameters():
            if type(param.__dict__.get("_z3_optimizer")) in _ENDED:  # else another engine has the model
                param._z3_optimizer = weakref.proxy(self)  # safe_get_full_fp32_param asks it, while the engine is kept

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
        self.gatherer.ownership.check_placement()
        super().checkpoint_event_prologue()

    def checkpoint_event_epilogue(self) -> None:
        with self._persistent_parameters_gathered():
            super().checkpoint_event_epilogue()

    def _persistent_parameters_gathered(self):
        """DeepSpeed gathers persistent parameters through their exact all_gather; do it in the wire format instead."""
        self.gatherer.gather_now(self.persistent_parameters)  # which counts as sent in the step that uses them
        return Replaced(self, "persistent_parameters", [])

    def set_local_hp_param(self, value: Tensor, param: Parameter, optim_state_key=None) -> None:
        super().set_local_hp_param(value, param, optim_state_key)
        self._held.wrote_alone |= optim_state_key is None

    def set_full_hp_param(self, value: Tensor, param: Parameter, optim_state_key=None) -> None:
        super().set_full_hp_param(value, param, optim_state_key)
        if optim_state_key is None:  # a master weight, which the next step writes to the shards
            self.gatherer.expect_large_step([param])

    # -- the step --------------------------------------------------------------------------------------------------

    def step(self, closure=None) -> None:
        self.gatherer.ownership.check_placement()
        loss_scale = self.loss_scale
        self.end_backward()
        self._finish_resting()
        self._drop_gradients_of_frozen()
        for part in list(self.session.parts):
            part.gradients_ready()
        super().step(closure)
        self._forget_gradients()
        if self.overflow and self.session.config.quantizes and ds_comm.get_rank() == 0:
            # DeepSpeed's loss scaler says so too with fp16, but not at the level that its logger shows.
            logger.warning("zeropp_fp8: a gradient is not finite on some rank: the step is skipped on all")
        for part in list(self.session.parts):
            part.step_ended(bool(self.overflow), float(self.loss_scale / loss_scale))
        self.session.ledger.end_step()
        if self._watch is not None:
            self._watch.end_step()
        print_progress_line(self.session)

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
        entry = extra_state(self.session)
        return super()._rigid_state_dict() | ({ENTRY: entry} if entry else {})

    def _rigid_load_state_dict(self, state_dict: dict, load_optimizer_states: bool = True) -> None:
        super()._rigid_load_state_dict(state_dict, load_optimizer_states)
        if self.session.config.quantizes and self.session.state_formats is None:
            use_fused_update(self.optimizer, self.fp32_partitioned_groups_flat)
        load_extra_state(self.session, state_dict.get(ENTRY))

    def _restore_from_bit16_weights(self) -> None:
        super()._restore_from_bit16_weights()
        self.gatherer.weights_changed()  # master weights in low precision have rounded them

    def load_state_dict(self, *args, **kwargs) -> None:
        with self.session.ledger.counting(OUTSIDE):
            super().load_state_dict(*args, **kwargs)
        if kwargs.get("checkpoint_folder"):  # a universal checkpoint holds weights and optimizer state only
            load_extra_state(self.session, None)
        self.gatherer.weights_changed()
        for part in list(self.session.parts):
            part.weights_loaded()
