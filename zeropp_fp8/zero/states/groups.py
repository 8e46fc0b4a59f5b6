"""Which slices share a flat buffer of gradients and optimizer states: those of a part of a ZeRO-3 sub-group, by kind.

Matrices can be kept in FP8 with a scale each; vectors (norms, biases) arrive exactly and stay in 16 or 32 bits until
the step, so they have buffers of their own. A sub-group is DeepSpeed's and as large as a model of a billion parameters;
a part is a few blocks, whose weights can be sent while those of the next part are updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.formats.shapes import is_vector
from zeropp_fp8.optim import Segments

STAYS = (
    "gradients and states in low precision; they take 6 bytes per parameter instead of 16. Leave the call out, or set "
    "gradients.store_format to none and the optimizer's formats to fp32"
)


_PART = 1 << 25  # elements of a part at least, of one rank on average: eight matrices of 2048 x 2048


@dataclass(eq=False)
class StateGroup:
    """Parameters of a part of one of DeepSpeed's sub-groups, all matrices or all vectors.

    Attributes:
        sub_group: DeepSpeed's index.
        params: in the sub-group's order.
        segments: where this rank's part of each lies; without the padding of the last slices, which nobody writes.
    """

    sub_group: int
    params: list[Parameter]
    segments: Segments
    matrices: bool

    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of this rank's part of each: its own where that is all of it, else flat."""
        parts = zip(self.params, self.segments.numels)
        return [tuple(sharded.shape(p)) if numel == sharded.numel(p) else (numel,) for p, numel in parts]


def make_state_groups(
    sub_groups: Sequence[Sequence[Parameter]],
    own_numel: Callable[[Parameter], int],
    device: torch.device,
    world_size: int = 1,
) -> list[StateGroup]:
    """The state groups of all sub-groups, in their order, matrices first. The same on all ranks."""
    groups = []
    for index, params in enumerate(sub_groups):
        for matrices in (True, False):
            of_kind = [p for p in params if is_vector(sharded.shape(p)) is not matrices]
            for members in _parts(of_kind, _PART * world_size):
                segments = Segments([own_numel(p) for p in members], device)
                groups.append(StateGroup(index, members, segments, matrices))
    return groups


def _parts(params: Sequence[Parameter], least: int) -> Iterator[Sequence[Parameter]]:
    """Consecutive parameters, of at least so many elements together."""
    first = numel = 0
    for last, param in enumerate(params, start=1):
        numel += sharded.numel(param)
        if numel >= least or last == len(params):
            yield params[first:last]
            first, numel = last, 0


def as_partition(param: Parameter, own: Tensor) -> Tensor:
    """A slice as DeepSpeed has it: zeros beyond the tensor's end."""
    return nn.functional.pad(own, (0, param.partition_numel() - own.numel()))
