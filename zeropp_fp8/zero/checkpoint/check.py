"""All ranks name the faults of a checkpoint before one of them looks for a file that is not there."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from zeropp_fp8.comm import gather_objects
from zeropp_fp8.config import SECTION
from zeropp_fp8.zero.checkpoint.manifest import damage, last_complete, read_manifest
from zeropp_fp8.zero.frozen.saved_ranks import read_states
from zeropp_fp8.zero.session import Session


def check_ranks(session: Session, path: str, with_states: bool) -> None:
    """Refuse what this number of ranks cannot load. Collective.

    Fewer ranks can load weights alone, which DeepSpeed then puts together from all files; each needs one of its own.

    Args:
        path: this rank's file of model states.
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
    told = gather_objects((saved, problem), session.topology.group)
    for _, message in told:
        if message is not None:
            raise RuntimeError(message)
    numbers = {number for number, _ in told if number is not None}
    folder = os.path.dirname(path)
    if not numbers:
        raise RuntimeError(f"{folder} holds no checkpoint of ZeRO-3: no rank has its file there (here: {path})")
    ranks, saved = len(told), max(numbers)
    lacking = [rank for rank, (number, _) in enumerate(told) if number is None]
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


def check_files(load_dir: str, tag: str) -> None:
    """Refuse a checkpoint that is not complete, or whose files are not what was saved. Collective over all ranks.

    Each file is read by one rank: by the one that wrote it, where there are as many. A checkpoint without a manifest
    passes: DeepSpeed alone has saved it.

    Raises:
        RuntimeError: naming file and cause, and the last checkpoint that is complete.
    """
    folder = Path(load_dir, tag)
    told = gather_objects(_problem(folder))
    problems = [problem for problem in told if problem is not None]
    if not problems:
        return
    other = last_complete(Path(load_dir), tag)
    if other is None:
        remedy = "No complete one is beside it"
    else:
        remedy = f'The last complete one is {other}: load_checkpoint("{other.parent}", tag="{other.name}")'
        if other.parent == Path(load_dir).resolve():
            remedy += f", or `echo {other.name} > {other.parent / 'latest'}`"
    raise RuntimeError(
        f"the checkpoint {folder} cannot be loaded: {problems[0]}. {remedy}. To load it unchecked, set "
        f'"{SECTION}.checkpoint.verify" to false'
    )


def _problem(folder: Path) -> str | None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    try:
        manifest = read_manifest(folder)
        files = {} if manifest is None else manifest["files"]
        found = (damage(folder / name, saved) for name, saved in files.items() if saved["rank"] % ranks == rank)
        return next(filter(None, found), None)
    except (ValueError, OSError) as error:
        return str(error)
