"""Reduced gradients in FP8 with a scale a block, whatever format they travelled in.

Where GradientStore keeps the codes that ranks have added, here the last hop gives fp32 numbers, which are encoded on
the stream where they arrive: 1 byte an element and 1 a block, each block scaled by its own amax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8.optim import FP8Gradients, StateBuffer
from zeropp_fp8.zero.states.gradient_store import GradientStore
from zeropp_fp8.zero.states.groups import StateGroup


class BlockGradientStore(GradientStore):
    """This rank's parts of the mean gradients.

    Args:
        element: "fp8_e4m3" or "fp8_e5m2".
        block_size: elements that share a scale, a power of two from 16 to 1024.
        groups: the layout.
        dtype: of sums over micro-batches and of vectors.
    """

    def __init__(self, element: str, block_size: int, groups: Sequence[StateGroup], dtype: torch.dtype) -> None:
        self._lay_out(groups, dtype)
        self._buffers = {id(g): StateBuffer(g.segments, element, "block", block_size) for g in groups if g.matrices}
        self._on_the_way: dict[int, Tensor] = {}  # by ds_id: fp32 numbers that a reduction writes

    def view(self, param: Parameter) -> Tensor:
        group, segment = self._place[param.ds_id]
        if not group.matrices:
            return self._view(self._sums, param)
        return group.segments.view(self._buffers[id(group)].codes, segment)

    def _new_codes(self, param: Parameter) -> Tensor:
        group, segment = self._place[param.ds_id]
        numel, device = group.segments.numels[segment], group.segments.device
        return self._on_the_way.setdefault(param.ds_id, torch.empty(numel, device=device))

    @torch.no_grad()
    def arrived(self, params: Sequence[Parameter]) -> None:
        for param in params:
            values = self._on_the_way.pop(param.ds_id, None)
            if values is None:
                continue
            self._encode_one(param, values)
            if values.is_cuda:  # its memory belongs to the stream of backward, which may use it again at once
                values.record_stream(torch.cuda.current_stream(values.device))

    def _encode_one(self, param: Parameter, values: Tensor) -> None:
        group, segment = self._place[param.ds_id]
        self._buffers[id(group)].encode_(segment, values.reshape(-1).float())

    @torch.no_grad()
    def read(self, param: Parameter) -> Tensor:
        group, segment = self._place[param.ds_id]
        if not group.matrices or param.ds_id in self._summed:
            return self._view(self._sums, param).to(torch.float32, copy=True)
        return self._buffers[id(group)].decode(segment)

    @torch.no_grad()
    def close(self) -> None:
        for group in self.groups:
            for param in group.params if group.matrices else ():
                if param.ds_id in self._summed:
                    self._encode_one(param, self._view(self._sums, param))
        self._summed.clear()

    def of(self, group: StateGroup) -> FP8Gradients | list[Tensor]:
        if group.matrices:
            return FP8Gradients.of(self._buffers[id(group)])
        return [group.segments.view(self._sums[id(group)], k) for k in range(len(group.params))]

    @torch.no_grad()
    def square_sum(self, sub_group: int, counted: Callable[[Parameter], bool] | None = None) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.groups[0].segments.device)
        for group in self.groups:
            if group.sub_group == sub_group:
                for param in group.params:
                    if counted is None or counted(param):
                        total += torch.linalg.vector_norm(self.read(param), dtype=torch.float64).square()
        return total

    def num_bytes(self) -> int:
        sums = sum(buffer.numel() * buffer.element_size() for buffer in self._sums.values())
        return sums + sum(buffer.num_bytes() for buffer in self._buffers.values())
