"""Switches a running job to high precision: communication, reduced gradients, and the compute of linear layers.

Master weights, moments and stored weights stay in low precision: they are rounded already, and more bits would restore
nothing.
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from zeropp_fp8.comm import gather_objects
from zeropp_fp8.config import SECTION
from zeropp_fp8.zero.session import Session
from zeropp_fp8.zero.stage_part import StagePart


def what_falls_back(session: Session) -> str:
    """Describes in words which things go to 16 or 32 bits when a job falls back, and which keep their format."""
    config, several = session.config, session.topology.world_size > 1
    formats = session.formats
    weights = formats.weights
    hops = {"within nodes": formats.within, "between nodes": formats.between}
    levels = {"within nodes": session.topology.ranks_per_node, "between nodes": session.topology.nodes}
    gradients = [f"{one.name} {hop}" for hop, one in hops.items() if one is not None and levels[hop] > 1]
    named = [f"weights that are sent ({weights.name})"] if several and weights is not None else []
    named += [f"gradients that are sent ({', '.join(gradients)})"] if gradients else []
    named += [part.gives_up for part in reversed(session.parts) if part.gives_up]
    states, kept = session.state_formats, []
    if states is not None:
        kept.append(f"master weights and moments ({states.master}, {states.exp_avg}, {states.exp_avg_sq})")
    if config.frozen.format != "none":
        kept.append(f"frozen weights ({config.frozen.format})")
    said = f"{', '.join(named)}: 16 or 32 bits" if named else "nothing goes to 16 or 32 bits, as nothing is sent"
    return f"{said}; {', '.join(kept)}: as before" if kept else said


def fall_back(stage: DeepSpeedZeroOptimizer_Stage3) -> str:
    """Switch to high precision: sent weights and gradients, stored gradients, and the compute of linear layers.

    Call it between steps, on every rank. Collective.

    Returns:
        A text that says what has changed and what has not.

    Raises:
        RuntimeError: a rank has no memory for gradients in 16 or 32 bits; on every rank.
    """
    session, gatherer = stage.session, stage.gatherer
    said = what_falls_back(session)
    session.formats.fall_back()
    problem = None
    try:
        for part in list(session.parts):
            part.formats_changed()
    except RuntimeError as error:  # out of memory
        problem = f"rank {session.topology.rank}: {error}"
    for told in filter(None, gather_objects(problem, session.topology.group)):
        raise RuntimeError(f"falling back to high precision has failed on {told}")
    persistent = stage.persistent_parameters
    gatherer.formats_changed()
    with session.ledger.counting("other"):
        gatherer.gather_now(persistent)
    return said


class FellBack(StagePart):
    """Lets a resumed run go on in high precision if the run that saved did so, and if its section allows it."""

    def __init__(self, stage: DeepSpeedZeroOptimizer_Stage3) -> None:
        self.stage, self._saved = stage, False

    def extra_state(self) -> dict[str, Any]:
        return {"fell back": True} if self.stage.session.formats.fell_back else {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self._saved = "fell back" in state

    def weights_loaded(self) -> None:
        saved, self._saved = self._saved, False
        session, watch = self.stage.session, self.stage.session.config.numerics.watch
        if not saved:
            return
        if watch != "fall_back":
            says = (
                "the run that saved the checkpoint had fallen back to high precision; this one has the formats of its "
                f'section, as its "{SECTION}.numerics.watch" is "{watch}" ("fall_back" goes on in high precision)'
            )
        elif session.formats.fell_back:
            says = "as the run that saved the checkpoint, this one has fallen back to high precision"
        else:
            says = f"as in the run that saved the checkpoint, {fall_back(self.stage)}"
        if session.topology.rank == 0:
            print(f"zeropp_fp8: {says}", flush=True)
