"""Placement of parameters' elements on ranks: DeepSpeed's equal slices. (owners/placement.py: whole tensors.)"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm.reduce_scatter import ReducePlan, ReduceScatterPlan, slice_numel

Range = tuple[int, int]  # (first element, number of elements) in the flat tensor


class Slices:
    """DeepSpeed's slices: rank r has elements [r S, (r + 1) S) of every parameter, S = ceil(numel / ranks).

    Ranks are those that share the parameter: all, or those with the same experts.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._own_numel: dict[int, int] = {}  # by sharded.key

    def slice_of(self, param: Parameter) -> Range:
        """This rank's slice, without padding at the end of the last slices."""
        group = sharded.experts_group(param)
        rank = self.rank if group is None else dist.get_rank(group)
        size = slice_numel(sharded.numel(param), self.world_size if group is None else dist.get_world_size(group))
        start = rank * size
        return start, min(size, max(0, sharded.numel(param) - start))

    def ranges(self, param: Parameter) -> list[Range]:
        """This rank's ranges of a parameter, in ascending order; they are consecutive in its shard."""
        start, numel = self.slice_of(param)
        return [(start, numel)] if numel else []

    def of_all_ranks(self, param: Parameter) -> object:
        """A parameter's placement on all ranks, the same on each of them; equal if two placements agree about it."""
        return slice_numel(sharded.numel(param), self.world_size)

    def own_numel(self, param: Parameter) -> int:
        """Elements that this rank has of a parameter, without padding."""
        known = self._own_numel.get(sharded.key(param))
        if known is None:
            known = self._own_numel[sharded.key(param)] = sum(numel for _, numel in self.ranges(param))
        return known

    def reduce_plan(self, params: Sequence[Parameter], *args) -> ReducePlan:
        """The plan that brings gradients to the ranks that keep them; `args` are those of `ReduceScatterPlan`."""
        return ReduceScatterPlan(*args)

    def own_part(self, param: Parameter, full: Tensor) -> Tensor:
        """This rank's elements of a full tensor, flat; a view if they are in one piece."""
        pieces = [full.reshape(-1)[start : start + numel] for start, numel in self.ranges(param)]
        if not pieces:
            return full.reshape(-1)[:0]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
