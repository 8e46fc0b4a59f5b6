"""Saving a checkpoint in two phases: it counts when every rank's files are on the disk, or not at all.

1. Every rank writes its files beside their names. If one could not, all raise, and what was there before is unchanged.
2. The files get their names, the manifest is written, and `latest` names the checkpoint.

A job that dies in phase 1 leaves `*.partial` files and no manifest; one that dies in phase 2, a manifest that says that
the checkpoint is not complete. Loading refuses both.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from zeropp_fp8.comm import gather_objects
from zeropp_fp8.zero.checkpoint.manifest import PARTIAL, SavedFile, describe_file, replace_file, sync, write_manifest


def save_in_two_phases(engine, stock: Callable, save_dir: str, tag: str | None, save_latest: bool) -> bool:
    """DeepSpeed's `save_checkpoint` (`stock`), all ranks or none. Collective over all ranks.

    DeepSpeed's writers for NVMe and DataStates go on writing after they have returned: with them it stays DeepSpeed's.

    Raises:
        RuntimeError: a rank could not write; on every rank, naming it and the file. A rank that could not for another
            reason than a file's raises that.
    """
    writer, rank = engine.checkpoint_engine, dist.get_rank()
    if not isinstance(writer, TorchCheckpointEngine):
        if rank == 0:
            print(f"zeropp_fp8: {type(writer).__name__} saves checkpoints by itself: they get no manifest", flush=True)
        return stock(save_dir, tag, save_latest=save_latest)
    if not save_dir:
        return stock(save_dir, tag)  # which says so
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    folder = Path(save_dir, tag)
    # Ranks see one folder, or with node-local storage (or tags of their own) several: the first that sees it writes its
    # manifest.
    place = (str(folder), socket.gethostname() if engine.use_node_local_storage() else None)
    places = gather_objects(place)
    is_first = places.index(place) == rank

    writing = PartialFiles(writer, rank)
    with _on_all_ranks(folder):
        if is_first:
            folder.mkdir(parents=True, exist_ok=True)
    with writing.in_place_of_writer(engine):
        stock(save_dir, tag, save_latest=False)  # collective: what it raises beside `error` goes its way
    with _on_all_ranks(folder, writing.remove):
        if writing.error is not None:
            raise writing.error
    with _on_all_ranks(folder):
        if is_first:
            write_manifest(folder, None, engine.global_steps)
    with _on_all_ranks(folder):
        writing.give_names()
    of_all = gather_objects(writing.files)
    with _on_all_ranks(folder):
        if is_first:
            files = {name: saved for theirs, of in zip(places, of_all) if theirs == place for name, saved in of.items()}
            write_manifest(folder, files, engine.global_steps)
    with _on_all_ranks(folder):
        if save_latest and rank == 0:
            replace_file(Path(save_dir, "latest"), tag)
    return True


class PartialFiles:
    """Stands in for DeepSpeed's checkpoint engine while one checkpoint is saved: files do not get their names yet.

    `files`: what has been written, by name.
    `error`: the first one, kept until all ranks can be told, which would wait for this one in vain.
    """

    def __init__(self, writer, rank: int) -> None:
        self._writer, self._rank = writer, rank
        self._paths: list[str] = []
        self.files: dict[str, SavedFile] = {}
        self.error: Exception | None = None

    def __getattr__(self, name: str):
        return getattr(self._writer, name)

    @contextmanager
    def in_place_of_writer(self, engine) -> Iterator[None]:
        engine.checkpoint_engine = self
        try:
            yield
        finally:
            engine.checkpoint_engine = self._writer

    @contextmanager
    def keeping_error(self) -> Iterator[None]:
        """Around what ranks do by themselves."""
        try:
            yield
        except Exception as error:
            self.error = self.error or error

    def save(self, state_dict: dict, path: str) -> None:
        self._paths.append(path)
        try:
            self._writer.save(state_dict, path + PARTIAL)
            sync(path + PARTIAL)
            self.files[os.path.basename(path)] = describe_file(path + PARTIAL, self._rank)
        except Exception as error:
            # Of a full disk torch says only that a position is not the expected one.
            free = shutil.disk_usage(os.path.dirname(path)).free
            message = f"{path} cannot be written ({free} bytes are free): {type(error).__name__}: {error}"
            raise RuntimeError(message) from error

    def give_names(self) -> None:
        for path in self._paths:
            os.replace(path + PARTIAL, path)
        for folder in {os.path.dirname(path) for path in self._paths}:
            sync(folder)

    def remove(self) -> None:
        """Leave nothing of this checkpoint."""
        for path in self._paths:
            with suppress(FileNotFoundError):
                os.remove(path + PARTIAL)


@contextmanager
def _on_all_ranks(folder: Path, undo: Callable[[], None] | None = None) -> Iterator[None]:
    """Raise on every rank where one of them raises in the block, which must not wait for others. Collective."""
    problem = None
    try:
        yield
    except Exception as error:
        problem = error
    told = gather_objects(None if problem is None else f"{type(problem).__name__}: {problem}")
    failed = [rank for rank, message in enumerate(told) if message is not None]
    if not failed:
        return
    if undo is not None:
        undo()
    if problem is not None:
        raise problem
    raise RuntimeError(f"the checkpoint {folder} was not saved: rank {failed[0]}: {told[failed[0]]}")
