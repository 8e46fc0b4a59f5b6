"""Rounding modes, shared by all formats.

nearest:    to the nearest grid point, ties to the even one (IEEE 754 roundTiesToEven)
stochastic: up with a probability equal to the fractional part; the mean over draws is the value itself
"""

from __future__ import annotations

from torch import Tensor

ROUNDING_MODES = ("nearest", "stochastic")


def round_to_integer_(values: Tensor, rounding: str, noise: Tensor | None = None) -> Tensor:
    """Round fp32 `values` to integers in place; `noise` in [0, 1), of the same shape, for stochastic rounding."""
    return values.add_(noise).floor_() if rounding == "stochastic" else values.round_()
