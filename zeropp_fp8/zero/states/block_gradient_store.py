"""Reduced gradients in FP8 with a scale per block, whatever format they were sent in.

Where GradientStore keeps the codes that ranks have added, here the last hop gives fp32 numbers, which are encoded on
the stream where they arrive: 1 byte per element and 1 per block, each block scaled by its own amax.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.optim import StateBuffer
from zeropp_fp8.zero.states.gradient_store import GradientStore
from zeropp_fp8.zero.states.groups import StateGroup


@dataclass(frozen=True)
class _Arriving:
    """Where a reduction writes the numbers of matrices of one group.

    Attributes:
        values: fp32, one segment after the other, padded; `views` of it, by segment.
    """

    group: StateGroup
    values: Tensor
    views: dict[int, Tensor]

    @classmethod
    def at(cls, group: StateGroup, segments: list[int]) -> _Arriving:
        """Room for these segments."""
        laid_out = group.segments
        padded = [laid_out.padded(k) for k in segments]
        values = torch.empty(sum(padded), dtype=torch.float32, device=laid_out.device)
        rows = values.split(padded)
        return cls(group, values, {k: row[: laid_out.numels[k]] for k, row in zip(segments, rows)})


class BlockGradientStore(GradientStore):
    """This rank's parts of the mean gradients.

    Args:
        element: "fp8_e4m3" or "fp8_e5m2".
        block_size: elements that share a scale, a power of two from 16 to 1024.
        groups: the layout.
        dtype: of sums over micro-batches and of vectors.
    """

    def __init__(self, element: str, block_size: int, groups: Sequence[StateGroup], dtype: torch.dtype) -> None:
        self.element = element
        self._lay_out(groups, dtype)
        self._codes = {id(g): StateBuffer(g.segments, element, "block", block_size) for g in groups if g.matrices}
        self._on_the_way: dict[int, _Arriving] = {}  # by sharded.key

    def view(self, param: Parameter) -> Tensor:
        group, segment = self._place[sharded.key(param)]
        if not self._in_codes(group):
            return self._view(self._sums, param)
        return group.segments.view(self._codes[id(group)].codes, segment)

    def destinations(
        self, params: Sequence[Parameter], last_micro_batch: bool, again: bool, headroom: float = 1.0
    ) -> list[Tensor]:
        if last_micro_batch and not again:
            for group, segments in self._by_group(params):
                arriving = _Arriving.at(group, segments)
                self._on_the_way.update((sharded.key(group.params[k]), arriving) for k in segments)
        return super().destinations(params, last_micro_batch, again, headroom)

    def _by_group(self, params: Iterable[Parameter]) -> list[tuple[StateGroup, list[int]]]:
        """The matrices among parameters: their groups, and in ascending order their segments there."""
        found: dict[int, tuple[StateGroup, list[int]]] = {}
        for group, segment in (self._place[sharded.key(p)] for p in params):
            if self._in_codes(group):
                found.setdefault(id(group), (group, []))[1].append(segment)
        return [(group, sorted(segments)) for group, segments in found.values()]

    def _new_codes(self, param: Parameter) -> Tensor:
        return self._on_the_way[sharded.key(param)].views[self._place[sharded.key(param)][1]]

    @torch.no_grad()
    def arrived(self, params: Sequence[Parameter]) -> None:
        come = {id(a): a for a in (self._on_the_way.pop(sharded.key(p), None) for p in params) if a is not None}
        for arriving in come.values():
            values = arriving.values
            self._codes[id(arriving.group)].encode_several_(list(arriving.views), values)
            if values.is_cuda:  # its memory belongs to the stream of backward, which may use it again at once
                values.record_stream(torch.cuda.current_stream(values.device))

    @torch.no_grad()
    def close(self) -> None:
        for group in self.groups:
            members = enumerate(group.params) if self._in_codes(group) else ()
            summed = [k for k, p in members if sharded.key(p) in self._summed]
            if summed:
                self._codes[id(group)].encode_several_(summed, self._sums[id(group)], in_place=True)
        self._summed.clear()

    def of(self, group: StateGroup) -> StateBuffer | list[Tensor]:
        if self._in_codes(group):
            return self._codes[id(group)]
        return [group.segments.view(self._sums[id(group)], k) for k in range(len(group.params))]

    def _decoded(self, group: StateGroup, start: int, stop: int) -> Tensor:
        return self._codes[id(group)].decode_range(start, stop)

    def _codes_squared(self, group: StateGroup, members: list[int]) -> Tensor:
        return self._codes[id(group)].square_sum(members)

    def num_bytes(self) -> int:
        sums = sum(buffer.numel() * buffer.element_size() for buffer in self._sums.values())
        return sums + sum(buffer.num_bytes() for buffer in self._codes.values())
