"""The MX formats (OCP Microscaling v1.0): 32 elements share a power of two.

value = X * P with the block's scale X in E8M0 (e8m0.py) and elements P in FP8, FP6, FP4 or INT8 (mini_float.py).

                 P                                        largest    NaN and Inf
    mxfp8_e4m3   1 sign, 4 exponent, 3 mantissa bits      448        become NaN, the block's other elements stay
    mxfp8_e5m2   1, 5, 2                                  57344      are kept
    mxfp6_e2m3   1, 2, 3                                  7.5        make the block's X, and so all of it, NaN
    mxfp6_e3m2   1, 3, 2                                  28         the same
    mxfp4        1, 2, 1                                  6          the same
    mxint8       two's complement / 64, without -128      127 / 64   the same

Payload of a row of n elements, nb = ceil(n / 32); the last block is filled up with zeros:

    [ nb scales | zeros up to a multiple of 16 | codes of nb * 32 elements | zeros up to a multiple of 16 ]

Decoding clamps X * P to the finite range of the target dtype; `mean_of_rows` does not. A matrix that is summed over
both axes is quantized along each. GPUs before Blackwell cannot multiply these formats: `round_trip` emulates it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zeropp_fp8.formats.base import KernelSpec, check_encodable
from zeropp_fp8.formats.block_scaled import BlockScaledFormat
from zeropp_fp8.formats.e8m0 import SCALE_MODES, E8M0Scale
from zeropp_fp8.formats.mini_float import FixedPointElement, MiniFloatElement

MX_BLOCK = 32

_ELEMENTS = {
    "mxfp8_e4m3": lambda: MiniFloatElement(4, 3, 448.0, special="nan"),
    "mxfp8_e5m2": lambda: MiniFloatElement(5, 2, 57344.0, special="ieee"),
    "mxfp6_e2m3": lambda: MiniFloatElement(2, 3, 7.5),
    "mxfp6_e3m2": lambda: MiniFloatElement(3, 2, 28.0),
    "mxfp4": lambda: MiniFloatElement(2, 1, 6.0),
    "mxint8": FixedPointElement,
}
MX_NAMES = tuple(_ELEMENTS)


class MXFormat(BlockScaledFormat):
    """An MX format: a wire format, and the rounding that computing with it needs.

    Args:
        name: one of MX_NAMES.
        scale_mode: "rceil" (nothing is clamped) or "floor" (the Microscaling paper's); see e8m0.py.
        block_size: 32, the only one there is.
        hadamard: False; there for the options of all formats to be the same.

    Raises:
        ValueError: an option value that does not exist.
    """

    def __init__(
        self, name: str, scale_mode: str = "rceil", block_size: int = MX_BLOCK, hadamard: bool = False
    ) -> None:
        if scale_mode not in SCALE_MODES:
            raise ValueError(f"{name}: scale_mode must be one of {SCALE_MODES}, got {scale_mode!r}")
        if type(block_size) is not int or block_size != MX_BLOCK:
            raise ValueError(f"{name}: block_size is {MX_BLOCK} in every MX format, got {block_size!r}")
        if hadamard:
            raise ValueError(f"{name}: MX formats have no rotation; leave hadamard out, or use int8 or int4")
        element = _ELEMENTS[name]()
        scale = E8M0Scale(element.largest, scale_mode, spoiled_by_special=not element.holds_special)
        super().__init__(name, element, MX_BLOCK, scale=scale)
        self.scale_mode = scale_mode

    def __repr__(self) -> str:
        return f"{self.name} ({self.scale_mode})"

    def options(self) -> dict[str, Any]:
        return {"name": self.name, "scale_mode": self.scale_mode}

    def kernel_spec(self) -> KernelSpec:
        return replace(super().kernel_spec(), scale=self.scale_mode)

    def code_count(self, numel: int) -> int:
        """Whole blocks, filled up with zeros."""
        return -(-numel // MX_BLOCK) * MX_BLOCK

    @torch.no_grad()
    def round_trip(self, tensor: Tensor, axis: int = -1) -> Tensor:
        """Encode and decode in blocks of 32 along `axis`; the last block is filled up with zeros.

        Args:
            tensor: fp32, bf16 or fp16 of any shape but a scalar's, also empty.

        Returns:
            a new contiguous tensor of the same shape and dtype.

        Raises:
            TypeError: another dtype.
            IndexError: an axis that the tensor does not have.
        """
        check_encodable(tensor, self.name)
        if not -tensor.dim() <= axis < tensor.dim():
            raise IndexError(f"axis {axis} of a tensor with {tensor.dim()} axes")
        moved = tensor.detach().movedim(axis, -1)
        matrix = moved.reshape(math.prod(moved.shape[:-1]), moved.shape[-1])
        payload = self.encode_rows(matrix)
        rounded = self.decode_rows(payload, matrix.shape[1], tensor.dtype)
        return rounded.view(moved.shape).movedim(-1, axis).contiguous()
