"""The plugin's own entry in DeepSpeed's optimizer checkpoint: what training depends on beside weights and states.

Residuals of error feedback, amax histories, gradient scales, what nodes hold of each other's weights, and
what observers remember. Stock DeepSpeed passes over the entry.
"""

from __future__ import annotations

from typing import Any

from deepspeed import comm as ds_comm
from deepspeed.utils import logger

from zeropp_fp8.zero.stage3_base import Stage3Base

ENTRY = "zeropp_fp8"
_HELD, _FELL_BACK, _WROTE_ALONE = "held weights", "fell back", "wrote alone"


def own_entry(stage: Stage3Base) -> dict[str, Any]:
    """The entry of a stage; empty where training depends on nothing more."""
    session, entry = stage.session, stage._own_states()
    if stage.scales is not None:
        entry["gradient_scales"] = stage.scales.state_dict()
    if stage.reducer.error_feedback is not None:
        entry["error_feedback"] = stage.reducer.error_feedback.state_dict()
    if session.conversion is not None and session.conversion.scaling.state_dict():
        entry["compute"] = session.conversion.scaling.state_dict()
    held = stage.gatherer.held_states(stage.param_names)
    if held:
        entry |= {_HELD: held, _WROTE_ALONE: stage.wrote_alone}
    observers = {type(one).__name__: one.state_dict() for one in session.observers if one.state_dict()}
    if observers:
        entry["observers"] = observers
    if session.fell_back:
        entry[_FELL_BACK] = True
    return entry | {"world": _world(stage)} if entry else entry


def load_own_entry(stage: Stage3Base, entry: dict[str, Any] | None) -> tuple[dict, bool]:
    """Take over residuals, amax histories and gradient scales.

    A checkpoint without them, or (histories and scales apart) of another world, resets them.

    Returns:
        What nodes held of the weights, to hold again once these are there; and whether the run had fallen back.
    """
    session, feedback, saved = stage.session, stage.reducer.error_feedback, entry or {}
    if session.conversion is not None:
        _load_or_start_afresh(session.conversion.scaling, saved.get("compute", {}), {}, "delayed scaling starts afresh")
    if stage.scales is not None:
        _load_or_start_afresh(stage.scales, saved.get("gradient_scales"), None, "gradient scales start afresh")
    stage._load_own_states(saved)
    for observer in session.observers:
        observer.load_state_dict(saved.get("observers", {}).get(type(observer).__name__, {}))
    if feedback is not None:
        feedback.reset()
    if entry is None or tuple(entry["world"]) != _world(stage):
        if feedback is not None and ds_comm.get_rank() == 0:
            nodes, per_node = _world(stage)
            logger.warning(
                f"zeropp_fp8: the checkpoint holds no residuals for this topology ({nodes} x {per_node} ranks); they "
                "start afresh"
            )
        return {}, _FELL_BACK in saved
    if feedback is not None and "error_feedback" in entry:
        _load_or_start_afresh(feedback, entry["error_feedback"], {}, "error feedback starts afresh")
    stage.wrote_alone = entry.get(_WROTE_ALONE, False)
    return entry.get(_HELD, {}), _FELL_BACK in saved


def _world(stage: Stage3Base) -> tuple[int, int]:
    topology = stage.session.topology
    return topology.nodes, topology.ranks_per_node


def _load_or_start_afresh(what, state, nothing, consequence: str) -> None:
    """Give `what` a saved state; one that does not fit this run is told of, and `nothing` takes its place."""
    try:
        what.load_state_dict(state)
    except ValueError as error:
        what.load_state_dict(nothing)
        if ds_comm.get_rank() == 0:
            logger.warning(f"zeropp_fp8: {error}; {consequence}")
