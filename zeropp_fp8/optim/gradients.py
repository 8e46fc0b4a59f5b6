"""FP8 gradients with a multiplier per tensor: codes in one flat buffer, laid out like the state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp_fp8.optim.segments import Segments
from zeropp_fp8.optim.state_formats import storage_of


@dataclass(frozen=True)
class FP8Gradients:
    """gradient = code * multiplier of its segment. (With scales that are powers of two they are a `StateBuffer`.)

    Args:
        segments: the layout.
        codes: uint8 or float8 [segments.padded_numel], contiguous; what the padding holds does not matter.
        element: "fp8_e4m3" or "fp8_e5m2".
        multipliers: fp32 [segments] on the codes' device; with FP8-LM's value = code / s these are 1 / s.

    Raises:
        ValueError: an element that is not FP8, or a wrong size or dtype.
    """

    segments: Segments
    codes: Tensor
    element: str
    multipliers: Tensor

    def __post_init__(self) -> None:
        segments, codes, multipliers = self.segments, self.codes, self.multipliers
        if not storage_of(self.element, "element of gradients").is_float8:
            raise ValueError(f"gradients come as tensors or in fp8_e4m3 or fp8_e5m2, got {self.element!r}")
        if codes.element_size() != 1:
            raise ValueError(f"codes must be uint8 or float8, got {codes.dtype}")
        if codes.numel() != segments.padded_numel or not codes.is_contiguous():
            raise ValueError(f"gradient codes: {codes.numel()} of them, the segments have {segments.padded_numel}")
        if multipliers.numel() != len(segments) or multipliers.dtype != torch.float32:
            raise ValueError(f"multipliers must be fp32 [{len(segments)}], one a segment")

    def decode(self, segment: int) -> Tensor:
        """fp32 [numel] of a segment, a copy."""
        codes = self.segments.view(self.codes.view(torch.uint8), segment)
        return storage_of(self.element).numbers_of(codes) * self.multipliers[segment]
