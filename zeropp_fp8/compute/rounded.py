"""MX operands where no hardware multiplies MX: the rounded values in the tensor's own 16 or 32 bits.

Every MX element has at most 8 significant bits and its scale is a power of two, so bf16 holds the values exactly, and a
bf16 GEMM with fp32 sums multiplies what an MX GEMM would multiply.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from zeropp_fp8.formats.mx import MXFormat


@torch.no_grad()
def rounded_operands(
    matrix: Tensor, mx: MXFormat, plain: bool, transposed: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(matrix [R, C] with blocks along C, its transpose [C, R] with blocks along R), each only if asked for."""
    if matrix.device.type == "cuda":
        from zeropp_fp8.kernels.casts.round_trip import round_trip

        return round_trip(matrix.contiguous(), mx, plain, transposed)
    return (
        mx.round_trip(matrix, axis=-1) if plain else None,
        mx.round_trip(matrix, axis=0).t().contiguous() if transposed else None,
    )
