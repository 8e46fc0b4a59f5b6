"""Rounding modes, shared by all formats.

nearest:    to the nearest grid point, ties to the even one (IEEE 754 roundTiesToEven)
half_away:  to the nearest grid point, ties away from zero
stochastic: up with a probability equal to the fractional part; the mean over draws is the value itself
"""

from __future__ import annotations

from torch import Tensor

ROUNDING_MODES = ("nearest", "half_away", "stochastic")


def round_to_integer_(values: Tensor, rounding: str, noise: Tensor | None = None) -> Tensor:
    """Round fp32 `values` to integers in place; `noise` in [0, 1), of the same shape, for stochastic rounding."""
    if rounding == "nearest":
        return values.round_()
    if rounding == "half_away":
        # Not floor(|v| + 0.5): in fp32 that sum rounds 0.49999997 up to 1.
        sign = values.sign()
        magnitude = values.abs_()
        whole = magnitude.floor()
        return values.copy_(whole.add_((magnitude - whole >= 0.5).to(values.dtype))).mul_(sign)
    if rounding == "stochastic":
        return values.add_(noise).floor_()
    raise ValueError(f"rounding must be one of {ROUNDING_MODES}, got {rounding!r}")
