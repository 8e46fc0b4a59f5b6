"""A checkpoint of another number of ranks: said on all, before one of them looks for a file that is not there."""

from __future__ import annotations

import os

from zeropp_fp8.zero.saved_ranks import read_states
from zeropp_fp8.zero.session import Session, told_by_all


def check_ranks(session: Session, path: str, with_states: bool) -> None:
    """Refuse what this number of ranks cannot load. Collective.

    Fewer ranks can load weights alone, which DeepSpeed then puts together from all files; each needs one of its own.

    Args:
        path: this rank's file of model states. Where no rank has one, DeepSpeed says so.
        with_states: whether optimizer states are to be loaded.

    Raises:
        RuntimeError: other ranks saved the checkpoint, or some rank's file is missing or cannot be read.
    """
    saved, problem = None, None
    try:
        if os.path.isfile(path):
            saved = read_states(path, trusted=True)["dp_world_size"]
    except Exception as error:  # raised below, on all ranks
        problem = f"{path} cannot be read: {type(error).__name__}: {error}"
    told = told_by_all((saved, problem), session.topology.group)
    for _, message in told:
        if message is not None:
            raise RuntimeError(message)
    numbers = {number for number, _ in told if number is not None}
    if not numbers:
        return
    ranks, saved = len(told), max(numbers)
    lacking = [rank for rank, (number, _) in enumerate(told) if number is None]
    folder = os.path.dirname(path)
    if saved < ranks or (saved != ranks and with_states):
        raise RuntimeError(
            f"the checkpoint {folder} was saved by {saved} ranks, and this job has {ranks}. Make a universal "
            f"checkpoint of it, which any number of ranks can load: `python -m deepspeed.checkpoint.ds_to_universal "
            f'--input_folder {folder} --output_folder {folder}_universal`, and load that with "checkpoint": '
            '{"load_universal": true} in the ds_config'
        )
    if lacking:
        raise RuntimeError(
            f"the checkpoint {folder} was saved by {saved} ranks, but rank {lacking[0]} has no file of it (here: "
            f"{path}): put the checkpoint where every rank can read it"
        )
