"""The plugin's entry in DeepSpeed's optimizer checkpoint: the extra state of all parts of a stage.

It holds all that training depends on beside weights and optimizer states: residuals, amax histories, gradient scales.
Stock DeepSpeed ignores the entry.
"""

from __future__ import annotations

from typing import Any

from deepspeed import comm as ds_comm
from deepspeed.utils import logger

from zeropp_fp8.zero.session import Session

ENTRY = "zeropp_fp8"
_WORLD = "world"


def extra_state(session: Session) -> dict[str, Any]:
    """The entry; empty if no part has extra state."""
    entry = {key: value for part in session.parts for key, value in part.extra_state().items()}
    return entry | {_WORLD: _world(session)} if entry else entry


def load_extra_state(session: Session, entry: dict[str, Any] | None) -> None:
    """Give each part its state. A part starts afresh if a checkpoint has none, or one that does not fit.

    `entry`: None if the checkpoint has no entry.
    """
    saved = entry or {}
    fits = tuple(saved.get(_WORLD, ())) == _world(session)
    for part in list(session.parts):
        try:
            part.load_extra_state(saved if fits or not part.of_topology else {})
        except ValueError as error:
            part.load_extra_state({})
            _warn(f"{error}; {part.if_lost}")
    if not fits and any(part.of_topology and part.if_lost for part in session.parts):
        nodes, per_node = _world(session)
        _warn(f"the checkpoint holds no residuals for this topology ({nodes} x {per_node} ranks); they start afresh")


def _warn(message: str) -> None:
    if ds_comm.get_rank() == 0:
        logger.warning(f"zeropp_fp8: {message}")


def _world(session: Session) -> tuple[int, int]:
    return session.topology.nodes, session.topology.ranks_per_node
