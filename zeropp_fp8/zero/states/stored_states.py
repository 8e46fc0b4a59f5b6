"""Master weights and moments stored in low precision (FP8-LM, level O2), as a stage has them.

DeepSpeed's optimizer keeps 12 bytes of state per parameter; here master weights and moments are FP16 and FP8
(CompressedStates). safe_get_full_* and checkpoints get decoded fp32 numbers. A checkpoint resumes bit for bit, because
with power-of-two scales decoded numbers encode to themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.config import ConfigError
from zeropp_fp8.optim import StateFormats
from zeropp_fp8.optim.muon import NO_MATRIX
from zeropp_fp8.zero.as_deepspeed import Freed
from zeropp_fp8.zero.states.compressed import CompressedStates, checked_update
from zeropp_fp8.zero.states.groups import STAYS, as_partition


class StoredStates:
    """Takes the place of `FP32States`.

    Args:
        offload: the "offload_optimizer" section of DeepSpeed's.

    Attributes:
        update: the optimizer's; updates: of each of DeepSpeed's sub-groups.
        compressed: made with DeepSpeed's sub-groups.

    Raises:
        ConfigError: optimizer states are offloaded, or the optimizer has no update for such states.
    """

    stays = STAYS

    def __init__(self, stage, optimizer: torch.optim.Optimizer, offload) -> None:
        if offload is not None and offload.device != OffloadDeviceEnum.none:
            raise ConfigError(
                '"zero_optimization.offload_optimizer" keeps fp32 states on the CPU, where "zeropp_fp8.optimizer" '
                "keeps them in low precision on the device; remove one of the two"
            )
        whole = stage.session.config.partition == "whole_tensor"
        self.stage, self.update = stage, checked_update(optimizer, whole)
        self.compressed: CompressedStates | Freed | None = None

    def _create_fp32_partitions(self) -> None:
        stage, session = self.stage, self.stage.session
        for ids in stage.fp16_partitioned_groups_flat_id:
            # The optimizer's param_groups and DeepSpeed's lists want a tensor a sub-group; its numbers are elsewhere.
            empty = torch.empty(0, dtype=torch.float32, device=stage.device)
            empty.ds_id = f"{ids[0]}_{ids[-1]}"
            empty.requires_grad = True
            stage.fp32_partitioned_groups_flat.append(empty)
        self.updates = [self.update.of_group(self._param_group(i)) for i in range(len(stage.fp16_groups))]
        for group in (group for group in stage.state_groups if not group.matrices):
            if not self.updates[group.sub_group].takes_vectors:
                raise ConfigError(f"{tuple(sharded.shape(group.params[0]))} is no matrix; {NO_MATRIX}")
        formats = session.state_formats or StateFormats.of(vars(session.config.optimizer))  # fp32, of whole tensors
        self.compressed = CompressedStates(stage.state_groups, self.updates, formats)
        session.parts.append(self.compressed)
        for group in stage.optimizer.param_groups:
            group["params"] = []

    def _param_group(self, sub_group: int) -> dict:
        stage = self.stage
        return stage.optimizer.param_groups[stage.sub_group_to_group_id[sub_group]]

    def initialize_optimizer_states(self) -> None:
        """There is nothing to initialize."""

    # -- the step ----------------------------------------------------------------------------------------------------

    def _prepare_fp32_grad_for_sub_group(self, sub_group_id: int) -> None:
        """The fused step reads gradients where they are."""

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Tensor) -> None:
        stage = self.stage
        # In fp64, for a norm of fp32 numbers may be beyond fp32.
        scale = torch.full((1,), float(stage.loss_scale), dtype=torch.float64, device=stage.session.device)
        if stage.clip_grad > 0.0:
            norm = torch.as_tensor(total_norm, dtype=torch.float64, device=scale.device)
            scale = scale * ((norm / stage.loss_scale + 1e-6) / stage.clip_grad).clamp(min=1.0)
        self._grad_scale = (1.0 / scale).to(torch.float32)

    def _optimizer_step(self, sub_group_id: int) -> None:
        """Update all sub-groups at the first: a block's norms are in another one than its matrices."""
        stage = self.stage
        if sub_group_id == 0:
            options = [each.options(stage.optimizer, self._param_group(i)) for i, each in enumerate(self.updates)]
            stage.gatherer.step_writes(self.compressed.update(stage.gradients.of, options, self._grad_scale))

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        """The fused step has written the weights."""

    # -- looking at states, and changing them ------------------------------------------------------------------------

    def _get_fp32_opt_state_partition(self, param: Parameter, release_swap_buffers: bool, optim_state_key=None):
        stage = self.stage
        if optim_state_key is None:  # until a step has rounded them, master weights are the model's weights
            stage.gatherer.ownership.check_placement()
        own = self.compressed.read(param, optim_state_key)
        return as_partition(param, own), stage.grad_position[stage.get_param_id(param)][0]

    def write(self, param: Parameter, values: Tensor, key: str | None) -> None:
        self.compressed.write(param, values, key)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @contextmanager
    def expanded(self, takes_back: bool, with_states: bool = True) -> Iterator[None]:
        stage, states = self.stage, self.compressed
        empty = stage.fp32_partitioned_groups_flat
        counts_on_host = not isinstance(stage.optimizer, torch.optim.Adam)  # DeepSpeed's count in an int
        flats = []
        for i, sub_group in enumerate(stage.fp16_groups):
            parts = {
                k: [as_partition(p, states.read(p, k)).cpu() for p in sub_group]
                for k in (None, *self.updates[i].states)
            }
            flat = torch.cat(parts[None])
            flat.ds_id = empty[i].ds_id
            flat.requires_grad = True
            steps = states.steps[i]
            count = steps if counts_on_host else torch.tensor(float(steps), dtype=torch.float32, device="cpu")
            # By the names of Adam's moments, which are those that DeepSpeed's tools for checkpoints look for.
            moments = {moment: torch.cat(parts[key]) for key, moment in self.updates[i].states.items()}
            stage.optimizer.state[flat] = {"step": count, **moments}
            flats.append(flat)
        stage.fp32_partitioned_groups_flat = flats
        try:
            yield
            if takes_back:
                self._take_back(with_states)
        finally:
            for flat in stage.fp32_partitioned_groups_flat:
                stage.optimizer.state.pop(flat, None)
            stage.fp32_partitioned_groups_flat = empty

    @torch.no_grad()
    def _take_back(self, with_states: bool) -> None:
        """Encode what DeepSpeed's lists hold; once there are steps, the rounded master weights are the model's."""
        stage, states = self.stage, self.compressed
        for i, sub_group in enumerate(stage.fp16_groups):
            flat = stage.fp32_partitioned_groups_flat[i]
            # load_state_dict puts new dictionaries into the optimizer's state.
            state = stage.optimizer.state.get(flat, {})
            offset = 0
            for param in sub_group:
                own = slice(offset, offset + stage.session.own_numel(param))
                take = states.write if int(state.get("step", 0)) else states.take_values
                take(param, flat.detach()[own])
                for key, moment in self.updates[i].states.items() if with_states else ():
                    if moment in state:  # a checkpoint saved before the first step of stock's optimizer has none
                        states.write(param, state[moment][own], key)
                offset += param.partition_numel()
            states.steps[i] = int(state.get("step", 0))
        states.write_weights()

    def loaded(self) -> None:
        """Nothing is to be done."""

    def take_weights(self) -> None:
        self.compressed.take_weights()

    def free(self) -> None:
        self.compressed = Freed()
