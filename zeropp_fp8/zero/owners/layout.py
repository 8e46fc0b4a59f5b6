"""ZeRO-3 whose parameters have owners: what DeepSpeed's optimizer assumes about equal slices, put right.

FP8-LM (arXiv 2310.18313), section 2.3. A rank's part of a parameter may be all of it, some rows, or nothing.
Checkpoints are stock's all the same: they hold equal slices, so zero_to_fp32, the universal checkpoint and a run
without the plugin can read them, and every load gives the numbers to their owners again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm.reduce_scatter import slice_numel
from zeropp_fp8.zero.owners.slices import gather_parts, part_of_slices, slice_of_parts

# The keys of DeepSpeed's checkpoints.
FP32_FLAT_GROUPS = "fp32_flat_groups"
OPTIMIZER_STATE_DICT = "optimizer_state_dict"


class OwnerLayout:
    """Takes the place of `SliceLayout`."""

    stays = '"partition": "whole_tensor"; leave the call out, or set partition to "slice"'

    def __init__(self, stage) -> None:
        self.stage = stage

    def _get_param_partition_rank(self, param: Parameter) -> int:
        # What a rank has of a parameter begins where its shard begins; DeepSpeed would skip what lies beyond the end.
        return 0

    def _create_fp16_sub_groups(self, params_group: list[Parameter]) -> list[list[Parameter]]:
        """Cut by what the parameters have on average: every rank must cut at the same places."""
        world, limit = self.stage.session.topology.world_size, self.stage.sub_group_size
        sub_groups, numel = [[]], 0
        for param in params_group:
            if limit is not None and numel >= limit:
                sub_groups.append([])
                numel = 0
            sub_groups[-1].append(param)
            numel += slice_numel(sharded.numel(param), world)
        return sub_groups

    def _fp32_state_allgather(self, param: Parameter, fp32_state_partition: Tensor) -> Tensor:
        return gather_parts(self.stage.session, param, fp32_state_partition.data).view(sharded.shape(param))

    # -- checkpoints: equal slices -----------------------------------------------------------------------------------

    def _flat_of(self, sub_group: int, flat: Tensor, convert, numel_of) -> Tensor:
        """A sub-group's flat tensor with every parameter's piece converted."""
        pieces, offset = [], 0
        for param in self.stage.fp16_groups[sub_group]:
            pieces.append(convert(self.stage.session, param, flat.detach()[offset : offset + numel_of(param)]))
            offset += numel_of(param)
        return torch.cat(pieces)

    def _converted(self, state_dict: dict, to_slices: bool) -> dict:
        """A rigid state dict with all flat tensors as slices, or as owners' parts."""
        session = self.stage.session

        def sliced_numel(param: Parameter) -> int:
            return slice_numel(sharded.numel(param), session.topology.world_size)

        convert, numel_of = (slice_of_parts, session.own_numel) if to_slices else (part_of_slices, sliced_numel)
        flats = state_dict[FP32_FLAT_GROUPS]
        optimizer_state = state_dict[OPTIMIZER_STATE_DICT]
        order = self._sub_groups_of_states(optimizer_state)
        states: dict[Any, dict] = {}
        for key, values in optimizer_state["state"].items():
            sub_group = order[key]
            numel = sum(numel_of(p) for p in self.stage.fp16_groups[sub_group])
            states[key] = {
                name: self._flat_of(sub_group, value, convert, numel_of)
                # Counters of steps are scalars; everything that is as long as the weights is theirs.
                if torch.is_tensor(value) and value.dim() == 1 and value.numel() == numel
                else value
                for name, value in values.items()
            }
            if "exp_avg" in states[key]:  # ds_to_universal wants a second moment of every tensor; saved once, by torch
                states[key].setdefault("exp_avg_sq", states[key]["exp_avg"])
        return {
            **state_dict,
            FP32_FLAT_GROUPS: [self._flat_of(i, flat, convert, numel_of) for i, flat in enumerate(flats)],
            OPTIMIZER_STATE_DICT: {**optimizer_state, "state": states},
        }

    def _sub_groups_of_states(self, optimizer_state: dict) -> dict[Any, int]:
        """Which sub-group each entry of an optimizer's state belongs to: group by group, as they were appended."""
        order = sorted(range(len(self.stage.fp16_groups)), key=self.stage.sub_group_to_group_id.__getitem__)
        keys = [key for group in optimizer_state["param_groups"] for key in group["params"]]
        return dict(zip(keys, order, strict=True))

    def to_slices(self, state_dict: dict) -> dict:
        return self._converted(state_dict, to_slices=True)

    def to_parts(self, state_dict: dict) -> dict:
        return self._converted(state_dict, to_slices=False)

    def load_hp_checkpoint_state(self, folder, key, param: Parameter) -> Tensor:
        one_slice = self.stage.stock.load_hp_checkpoint_state(folder, key, param)
        return part_of_slices(self.stage.session, param, one_slice)
