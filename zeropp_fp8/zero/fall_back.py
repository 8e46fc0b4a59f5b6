"""Giving up low precision in a job that runs: what travels, and what linear layers compute in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeropp_fp8.config import SECTION

if TYPE_CHECKING:
    from zeropp_fp8.zero.stage3_base import Stage3Base

HIGH_PRECISION = "weights and gradients travel in 16 or 32 bits, and linear layers compute in them"


def fall_back(stage: Stage3Base) -> None:
    """Let weights and gradients travel, and linear layers compute, in high precision. Between steps, on every rank."""
    session, gatherer = stage.session, stage.gatherer
    session.fell_back = True
    session.weight_format = session.intra_format = session.inter_format = None
    stage.reducer.formats_changed()
    if session.conversion is not None:
        session.conversion.scaling.rests = True
    persistent = stage.persistent_parameters
    gatherer.partition(persistent)
    gatherer.formats_changed()
    with session.ledger.counting("other"):
        gatherer.gather_now(persistent)


def fall_back_as_saved(stage: Stage3Base) -> None:
    """A checkpoint of a run that had fallen back is loaded: go on so, where the section allows it; rank 0 says which.

    On every rank, when weights are loaded.
    """
    session, watch = stage.session, stage.session.config.numerics.watch
    says = f"as in the run that saved the checkpoint, {HIGH_PRECISION}"
    if watch != "fall_back":
        says = (
            "the run that saved the checkpoint had fallen back to high precision; this one has the formats of its "
            f'section, as its "{SECTION}.numerics.watch" is "{watch}" ("fall_back" goes on in high precision)'
        )
    elif not session.fell_back:
        fall_back(stage)
    if session.topology.rank == 0:
        print(f"zeropp_fp8: {says}", flush=True)
