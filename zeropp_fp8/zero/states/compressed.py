"""Master weights and moments of ZeRO-3's sub-groups in low precision: 5 bytes per parameter instead of 12.

FP8-LM (arXiv 2310.18313), section 2.2. The states of a sub-group lie in flat buffers, a segment for this rank's part of
each tensor, and one fused step (optim/adamw.py) decodes, updates and encodes them and writes the model's weights from
the rounded master weights. With a scale per tensor, "tensor" means this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.config import SECTION, ConfigError
from zeropp_fp8.optim import UPDATES, Owned, StateBuffer, StateFormats, Update, make_state_buffers, update_of
from zeropp_fp8.zero.stage_part import Row, StagePart
from zeropp_fp8.zero.states.groups import StateGroup


def checked_update(optimizer: torch.optim.Optimizer, whole: bool = False) -> Update:
    """The update of an optimizer whose states are stored in low precision.

    Args:
        whole: each tensor whose update needs all of it has one owner.

    Raises:
        ConfigError: it has none, one that needs whole tensors which there are not, or options that do not go with it.
    """
    update = update_of(optimizer)
    if update is None:
        raise ConfigError(
            f'"{SECTION}.optimizer": states in low precision are those of {", ".join(UPDATES)}, but the optimizer is '
            f'{type(optimizer).__name__}; use torch.optim.AdamW (or "torch_adam": true), or set the formats to fp32'
        )
    if update.needs_whole and not whole:
        raise ConfigError(
            f'"{SECTION}.partition": the update of {type(optimizer).__name__} is one of whole tensors; set partition '
            'to "whole_tensor"'
        )
    refused = list(dict.fromkeys(line for group in optimizer.param_groups for line in update.refusals(group)))
    if refused:
        raise ConfigError(*refused)
    return update


class CompressedStates(StagePart):
    """States of one engine.

    Args:
        groups: the layout.
        updates: of each sub-group.
        formats: of master weights and moments.
    """

    def __init__(self, groups: Sequence[StateGroup], updates: Sequence[Update], formats: StateFormats) -> None:
        self.groups = list(groups)
        self.updates, self.formats = updates, formats
        self._buffers: dict[int, dict[str, StateBuffer]] = {}
        for group in self.groups:
            states = updates[group.sub_group].states
            buffers = make_state_buffers(group.segments, formats, states.values())
            self._buffers[id(group)] = dict(zip(("master", *states), buffers))
        self._place = {sharded.key(p): (g, k) for g in self.groups for k, p in enumerate(g.params)}
        self.steps = dict.fromkeys((group.sub_group for group in self.groups), 0)  # updates of each sub-group
        self._unrounded: set[int] = set()  # ds_ids of parameters whose master weight is but a rounding of the weight
        self.take_weights()

    @staticmethod
    def _weights(group: StateGroup) -> list[Tensor]:
        """This rank's part of each weight, without padding: what the model computes with."""
        parts = zip(group.params, group.segments.numels)
        return [sharded.unpadded(param, numel) for param, numel in parts]

    @torch.no_grad()
    def take_weights(self) -> None:
        """The master weights become the model's weights, rounded, for example because only these were loaded.

        The model computes with its own until the first step writes the rounded ones: a reference model made of the same
        weights, whose engine has no optimizer, then gives the same numbers, and DPO begins with a margin of 0.
        """
        for group in self.groups:
            self._buffers[id(group)]["master"].encode_all_(self._weights(group))
        self._unrounded = set(self._place)

    @torch.no_grad()
    def take_values(self, param: Parameter, values: Tensor) -> None:
        """These values become a weight of the model and, rounded, its master weight, as before the first step."""
        self.write(param, values)
        self._weight(param).copy_(values)
        self._unrounded.add(sharded.key(param))

    @torch.no_grad()
    def write_weights(self) -> None:
        """The model's weights become the rounded master weights, but for those that no step has changed."""
        for group in self.groups:
            masters = self._buffers[id(group)]["master"].decode_all()
            for param, weight, master in zip(group.params, self._weights(group), masters):
                if sharded.key(param) not in self._unrounded:
                    weight.copy_(master)

    @torch.no_grad()
    def update(
        self, grads_of, options: Sequence[Mapping[str, Any]], grad_scale: Tensor
    ) -> Iterator[Sequence[Parameter]]:
        """One optimizer step, weights of the model included: vectors, then matrices in the order of the model.

        Yields the parameters of each group when they are written.

        Args:
            grads_of: gives a StateGroup's gradients: FP8Gradients, or a tensor per parameter.
            options: of the update of each sub-group.
            grad_scale: fp32 [1] on the device, multiplies the gradients.
        """
        for sub_group in self.steps:
            self.steps[sub_group] += 1
        for group in sorted(self.groups, key=lambda group: (group.matrices, sharded.key(group.params[0]))):
            self._unrounded.difference_update(sharded.key(param) for param in group.params)
            master, *states = self._buffers[id(group)].values()
            weights, shapes = self._weights(group), group.shapes()
            owned = Owned(group.segments, master, states, grads_of(group), weights, grad_scale, shapes)
            self.updates[group.sub_group].apply(owned, self.steps[group.sub_group], options[group.sub_group])
            yield group.params

    # -- looking and changing ------------------------------------------------------------------------------------------

    def _buffer(self, param: Parameter, key: str | None) -> tuple[StateBuffer, int]:
        group, segment = self._place[sharded.key(param)]
        states = self.updates[group.sub_group].states
        if key is not None and key not in states:
            raise KeyError(f"optimizer states are {', '.join(states)}, got {key!r}")
        return self._buffers[id(group)][key or "master"], segment

    def read(self, param: Parameter, key: str | None = None) -> Tensor:
        """fp32 [this rank's elements]: the master weight (None), or a state of the update."""
        buffer, segment = self._buffer(param, key)
        if key is None and sharded.key(param) in self._unrounded:
            return self._weight(param).float()
        return buffer.decode(segment)

    def _weight(self, param: Parameter) -> Tensor:
        group, segment = self._place[sharded.key(param)]
        return self._weights(group)[segment]

    def write(self, param: Parameter, values: Tensor, key: str | None = None) -> None:
        """Replace what `read` gives, rounded to its format."""
        buffer, segment = self._buffer(param, key)
        buffer.encode_(segment, values.to(device=buffer.codes.device, dtype=torch.float32))
        if key is None:
            self._unrounded.discard(sharded.key(param))

    def rows(self) -> list[Row]:
        formats = self.formats
        rows = []
        for states in dict.fromkeys(tuple(update.states.items()) for update in self.updates):
            names = ", ".join(getattr(formats, name) for name in ("master", *dict(states).values()))
            remark = f"master weights, {', '.join(dict(states))}; a scale per {formats.scales}"
            rows.append(("optimizer states", names, 0, remark))
        return rows

    def num_bytes(self) -> int:
        """Bytes of codes and scales, padding included."""
        return sum(b.num_bytes() for buffers in self._buffers.values() for b in buffers.values())
