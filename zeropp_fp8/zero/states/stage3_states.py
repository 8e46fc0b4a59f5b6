"""Master weights and moments that rest in low precision (FP8-LM, level O2), inside DeepSpeed's stage 3.

DeepSpeed's optimizer keeps 12 bytes of state a parameter; here master weights and moments are FP16 and FP8
(CompressedStates). Everything that looks into them (safe_get_full_*, checkpoints) is answered with decoded numbers; a
checkpoint holds fp32 as stock's does, and resumes bit for bit, because with power-of-two scales decoded numbers encode
to themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8.config import ConfigError
from zeropp_fp8.optim import FP8AdamW
from zeropp_fp8.zero.stage3_base import Freed
from zeropp_fp8.zero.states.compressed import CompressedStates, decouples_weight_decay
from zeropp_fp8.zero.states.stage3_at_rest import AtRestStage3


class CompressedStatesStage3(AtRestStage3):
    """The part of a stage whose master weights and moments rest in low precision."""

    def __init__(self, *args, **kwargs) -> None:
        offload = kwargs.get("offload_optimizer_config")
        if offload is not None and offload.device != OffloadDeviceEnum.none:
            raise ConfigError(
                '"zero_optimization.offload_optimizer" keeps fp32 states on the CPU, where FP8AdamW keeps them in low '
                "precision on the device; remove one of the two"
            )
        super().__init__(*args, **kwargs)

    # -- construction ------------------------------------------------------------------------------------------------

    def _create_fp32_partitions(self) -> None:
        for ids in self.fp16_partitioned_groups_flat_id:
            # The optimizer's param_groups and DeepSpeed's lists want a tensor a sub-group; its numbers are elsewhere.
            empty = torch.empty(0, dtype=torch.float32, device=self.device)
            empty.ds_id = f"{ids[0]}_{ids[-1]}"
            empty.requires_grad = True
            self.fp32_partitioned_groups_flat.append(empty)
        session = self.session
        seed = (session.config.seed, session.topology.rank)
        self.states = CompressedStates(self.state_groups, session.state_formats, seed)
        session.parts.append(self.states)
        for group in self.optimizer.param_groups:
            group["params"] = []

    def initialize_optimizer_states(self) -> None:
        """There is nothing to initialize."""

    def destroy(self) -> None:
        super().destroy()
        self.states = Freed()

    # -- the step ----------------------------------------------------------------------------------------------------

    def _prepare_fp32_grad_for_sub_group(self, sub_group_id: int) -> None:
        """The fused step reads gradients where they are."""

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Tensor) -> None:
        # In fp64, for a norm of fp32 numbers may be beyond fp32.
        scale = torch.full((1,), float(self.loss_scale), dtype=torch.float64, device=self.session.device)
        if self.clip_grad > 0.0:
            norm = torch.as_tensor(total_norm, dtype=torch.float64, device=scale.device)
            scale = scale * ((norm / self.loss_scale + 1e-6) / self.clip_grad).clamp(min=1.0)
        self._grad_scale = (1.0 / scale).to(torch.float32)

    def _optimizer_step(self, sub_group_id: int) -> None:
        group = self.optimizer.param_groups[self.sub_group_to_group_id[sub_group_id]]
        beta1, beta2 = group["betas"]
        hyper = {
            "lr": float(group["lr"]),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]),
            "decoupled": decouples_weight_decay(self.optimizer, group),
            "bias_correction": bool(group.get("bias_correction", True)),
        }
        self.states.update(sub_group_id, self._gradients_of, hyper, self._grad_scale)

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        """The fused step has written the weights."""

    # -- looking at states, and changing them ------------------------------------------------------------------------

    def _get_fp32_opt_state_partition(self, param: Parameter, release_swap_buffers: bool, optim_state_key=None):
        if optim_state_key is None:  # until a step has rounded them, master weights are the model's weights
            self.gatherer.ownership.check_placement()
        own = self.states.read(param, optim_state_key)
        return self._padded(param, own), self.grad_position[self.get_param_id(param)][0]

    def set_full_hp_param(self, value: Tensor, param: Parameter, optim_state_key=None) -> None:
        if param.requires_grad:
            if value.numel() != param.ds_numel:
                raise ValueError(f"the parameter has {param.ds_numel} elements, the value {value.numel()}")
            self.states.write(param, self._own_part(param, value), optim_state_key)

    def set_local_hp_param(self, value: Tensor, param: Parameter, optim_state_key=None) -> None:
        if param.requires_grad:
            self.states.write(param, self._own_part_of_local(param, value), optim_state_key)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @contextmanager
    def _expanded(self, write_back: bool) -> Iterator[None]:
        """While it lasts, DeepSpeed's lists hold fp32 states, on the CPU; `write_back`: take over what they become."""
        empty = self.fp32_partitioned_groups_flat
        counts_on_host = not isinstance(self.optimizer, torch.optim.Adam)  # DeepSpeed's optimizers count in an int
        flats = []
        for i, sub_group in enumerate(self.fp16_groups):
            parts = {key: [self._padded(p, self.states.read(p, key)).cpu() for p in sub_group] for key in _STATE_KEYS}
            flat = torch.cat(parts[None])
            flat.ds_id = empty[i].ds_id
            flat.requires_grad = True
            steps = self.states.steps[i]
            state = {"step": steps if counts_on_host else torch.tensor(float(steps), dtype=torch.float32, device="cpu")}
            state |= {key: torch.cat(parts[key]) for key in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[flat] = state
            flats.append(flat)
        self.fp32_partitioned_groups_flat = flats
        try:
            yield
            if write_back:
                self._take_back()
        finally:
            for flat in self.fp32_partitioned_groups_flat:
                self.optimizer.state.pop(flat, None)
            self.fp32_partitioned_groups_flat = empty

    @torch.no_grad()
    def _take_back(self) -> None:
        """Encode what DeepSpeed's lists hold; once there are steps, the rounded master weights are the model's."""
        for i, sub_group in enumerate(self.fp16_groups):
            flat = self.fp32_partitioned_groups_flat[i]
            # load_state_dict puts new dictionaries into the optimizer's state.
            state = self.optimizer.state.get(flat, {})
            offset = 0
            for param in sub_group:
                own = slice(offset, offset + self.session.own_numel(param))
                take = self.states.write if int(state.get("step", 0)) else self.states.take_values
                take(param, flat.detach()[own])
                for key in ("exp_avg", "exp_avg_sq") if self.states.loads_states else ():
                    if key in state:  # a checkpoint saved before the first step of stock's optimizer has none
                        self.states.write(param, state[key][own], key)
                offset += param.partition_numel()
            self.states.steps[i] = int(state.get("step", 0))
        self.states.write_weights()

    def _rigid_state_dict(self) -> dict:
        with self._expanded(write_back=False):
            return super()._rigid_state_dict()

    @contextmanager
    def _plain_optimizer(self) -> Iterator[None]:
        """While it lasts, FP8AdamW is represented by an optimizer that loads fp32 states as they are."""
        given = self.optimizer
        if not isinstance(given, FP8AdamW):
            yield
            return
        self.optimizer = _AnyStates([dict(group) for group in given.param_groups], {})
        try:
            yield
            for group, loaded in zip(given.param_groups, self.optimizer.param_groups):
                group.update((name, value) for name, value in loaded.items() if name != "params")
        finally:
            self.optimizer = given

    def _rigid_load_state_dict(self, state_dict: dict, load_optimizer_states: bool = True) -> None:
        self.states.loads_states = load_optimizer_states
        with self._plain_optimizer(), self._expanded(write_back=True):
            super()._rigid_load_state_dict(state_dict, load_optimizer_states)

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir) -> None:
        self.states.loads_states = True
        with self._expanded(write_back=True):
            super().load_hp_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir)

    def load_module_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir, load_from_fp32_weights) -> None:
        self.states.loads_states = False
        with self._expanded(write_back=True) if load_from_fp32_weights else nullcontext():
            super().load_module_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir, load_from_fp32_weights)

    def _restore_from_bit16_weights(self) -> None:
        self.states.take_weights()


_STATE_KEYS = (None, "exp_avg", "exp_avg_sq")


class _AnyStates(torch.optim.Optimizer):
    """Holds states and options."""
