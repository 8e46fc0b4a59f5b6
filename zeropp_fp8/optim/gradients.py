"""FP8 gradients as the optimizer takes them: codes in one flat buffer, laid out like the state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp_fp8.formats.e8m0 import E8M0Scale
from zeropp_fp8.optim.segments import Segments
from zeropp_fp8.optim.state_buffer import StateBuffer
from zeropp_fp8.optim.state_formats import check_scales, storage_of

_ANY_SCALE = E8M0Scale(448.0, "rceil", spoiled_by_special=True)


@dataclass(frozen=True)
class FP8Gradients:
    """gradient = code * multiplier of its segment, or code * 2^(byte - 127) of its block.

    Args:
        codes: uint8 or float8 [segments.padded_numel], contiguous; what the padding holds does not matter.
        element: "fp8_e4m3" or "fp8_e5m2".
        multipliers: fp32 [segments] on the codes' device; with FP8-LM's value = code / s these are 1 / s.
        block_scales: uint8 E8M0 bytes [padded_numel / block_size], 255 for NaN. Exactly one of the two is given.
        block_size: elements of a block, a power of two from 16 to 1024.

    Raises:
        ValueError: both or none of the two, or an element that is not FP8.
    """

    codes: Tensor
    element: str
    multipliers: Tensor | None = None
    block_scales: Tensor | None = None
    block_size: int = 128

    def __post_init__(self) -> None:
        if not storage_of(self.element, "element of gradients").is_float8:
            raise ValueError(f"gradients come as tensors or in fp8_e4m3 or fp8_e5m2, got {self.element!r}")
        if (self.multipliers is None) == (self.block_scales is None):
            raise ValueError("give FP8 gradients either multipliers, one a segment, or block_scales")
        if self.codes.element_size() != 1:
            raise ValueError(f"codes must be uint8 or float8, got {self.codes.dtype}")
        check_scales("block" if self.multipliers is None else "tensor", self.block_size)

    @classmethod
    def of(cls, buffer: StateBuffer) -> FP8Gradients:
        """The numbers of an FP8 state buffer as gradients; its codes are not copied."""
        if buffer.per_block:
            scales = {"block_scales": buffer.scales, "block_size": buffer.block_size}
        else:
            scales = {"multipliers": _ANY_SCALE.decode(buffer.scales)}
        return cls(buffer.codes, buffer.storage.name, **scales)

    def check(self, segments: Segments) -> None:
        """Refuse codes and scales that are not laid out by these segments.

        Raises:
            ValueError: a wrong size.
        """
        if self.codes.numel() != segments.padded_numel or not self.codes.is_contiguous():
            raise ValueError(f"gradient codes: {self.codes.numel()} of them, the segments have {segments.padded_numel}")
        if self.multipliers is not None:
            if self.multipliers.numel() != len(segments) or self.multipliers.dtype != torch.float32:
                raise ValueError(f"multipliers must be fp32 [{len(segments)}], one a segment")
        elif self.block_scales.numel() != segments.padded_numel // self.block_size:
            raise ValueError(f"block_scales must be uint8 [{segments.padded_numel // self.block_size}], one a block")

    def decode(self, segments: Segments, segment: int) -> Tensor:
        """fp32 [numel] of a segment, a copy."""
        storage = storage_of(self.element)
        if self.multipliers is not None:
            numbers = storage.numbers_of(segments.view(self.codes.view(torch.uint8), segment))
            return numbers * self.multipliers[segment]
        numel = segments.numels[segment]
        first = segments.starts[segment] // self.block_size
        units = slice(first, first + -(-numel // self.block_size))
        numbers = storage.numbers_of(self.codes.view(torch.uint8).view(-1, self.block_size)[units])
        return (numbers * _ANY_SCALE.decode(self.block_scales[units]).unsqueeze(-1)).view(-1)[:numel]
