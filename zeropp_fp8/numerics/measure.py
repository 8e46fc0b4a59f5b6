"""How well numbers survive a format: sums that add up over tensors and ranks, and what they mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SUMS = ("count", "signal", "noise", "underflow", "overflow", "non_finite")
# More than half a step of any format with a bit of mantissa, so that rounding to the largest code is no overflow.
CUT = 1.125


@torch.no_grad()
def measure(exact: Tensor, decoded: Tensor) -> tuple[Tensor, Tensor]:
    """The errors of `decoded`, which a format has made of `exact`; shapes are alike, dtypes need not be.

    Returns:
        (fp64 [6], sums by the names of SUMS; fp64 [], the largest finite magnitude of `exact`).
        signal is the sum of squares of `exact`, noise that of the difference, over elements where both are finite;
        underflow counts what became zero and was not, overflow what is an eighth or more beyond the largest magnitude
        in `decoded` (a scale that was too small has cut it off), non_finite what is not finite in either.
    """
    exact, decoded = exact.detach().reshape(-1).float(), decoded.detach().reshape(-1).float()
    finite = exact.isfinite() & decoded.isfinite()
    exact, decoded = exact.where(finite, 0.0), decoded.where(finite, 0.0)
    if not exact.numel():
        return exact.new_zeros(len(SUMS), dtype=torch.float64), exact.new_zeros((), dtype=torch.float64)
    magnitudes, kept = exact.abs(), decoded != 0
    sums = (
        torch.full((), exact.numel(), device=exact.device),
        torch.linalg.vector_norm(exact, dtype=torch.float64).square(),
        torch.linalg.vector_norm(exact - decoded, dtype=torch.float64).square(),
        ((magnitudes > 0) & ~kept).sum(),
        ((magnitudes > CUT * decoded.abs().amax()) & kept).sum(),
        (~finite).sum(),
    )
    return torch.stack([one.double() for one in sums]), magnitudes.amax().double()


def meaning(sums: Sequence[float], amax: float) -> dict[str, float | None]:
    """{"snr_db", "amax", "underflow", "overflow", "non_finite"} of what `measure` gave, added up; shares of elements.

    snr_db = 10 log10(signal / noise), and no less than -300; None where nothing was lost of what is finite.
    """
    found = dict(zip(SUMS, sums))
    shares = {name: found[name] / max(1.0, found["count"]) for name in ("underflow", "overflow", "non_finite")}
    snr_db = 10 * math.log10(max(found["signal"] / found["noise"], 1e-30)) if found["noise"] > 0 else None
    return {"snr_db": snr_db, "amax": amax, **shares}
