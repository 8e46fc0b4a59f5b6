"""Jobs of test_saving.py on ranks: checkpoints that are interrupted, damaged or do not fit."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import shutil
import signal
from pathlib import Path

import torch.distributed as dist
from models import batches, llama, section
from running import Spec, stepped

from zeropp_fp8.zero.checkpoint import commit as checkpoint_commit
from zeropp_fp8.zero.checkpoint import manifest as checkpoint_manifest


def engine_of(recipe="zeropp", verify=True, seed=0):
    fields = section(recipe, ranks_per_node=dist.get_world_size(), checkpoint={"verify": verify})
    return Spec(fields, model=functools.partial(llama, layers=1, vocab=64, seed=seed)).engine()


def step(engine):
    stepped(engine, next(batches(1, dist.get_rank(), vocab=64)))


def message_of(function, *arguments, **options):
    """Return what a call raises; None if it does not."""
    try:
        function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# -- a rank dies -----------------------------------------------------------------------------------------------------


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner, name, calls=1):
    """Let this process die before the call number `calls` of a function, counted from now."""
    original, left = getattr(owner, name), [calls]

    def replaced(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            die()
        return original(*args, **kwargs)

    setattr(owner, name, replaced)


def half_of_a_file(engine):
    """Die when half of a file has been written."""
    writer = engine.checkpoint_engine
    save = writer.save

    def save_half(states, path):
        save(states, path)
        os.truncate(path, os.path.getsize(path) // 2)
        die()

    writer.save = save_half


# What the rank is about to do when it dies.
STAGES = {
    "write model states": lambda engine: before(engine.checkpoint_engine, "save"),
    "write half of model states": half_of_a_file,
    "write optimizer states": lambda engine: before(engine.checkpoint_engine, "save", 2),
    "tell that all is written": lambda engine: before(checkpoint_commit, "gather_objects", 3),
    "say that names are given": lambda engine: before(checkpoint_commit, "write_manifest"),
    "give the first name": lambda engine: before(os, "replace"),
    "give the second name": lambda engine: before(os, "replace", 2),
    "tell that names are given": lambda engine: before(checkpoint_commit, "gather_objects", 5),
    "write the manifest": lambda engine: before(checkpoint_commit, "write_manifest", 2),
    "name the latest": lambda engine: before(checkpoint_commit, "replace_file"),
    "give latest its name": lambda engine: before(Path, "replace", 3),
    "tell that it is saved": lambda engine: before(checkpoint_commit, "gather_objects", 8),
}


def killed_while_saving(folder, stage, dying_rank):
    """A whole checkpoint `first`, then one during which a rank dies; what the others are told."""
    engine = engine_of()
    step(engine)
    engine.save_checkpoint(folder, tag="first")
    step(engine)
    if dist.get_rank() == dying_rank:
        STAGES[stage](engine)
    return message_of(engine.save_checkpoint, folder, tag="second")


def loads(folders, verify=True):
    """For each folder: what loading `latest` gives (its steps, or an error), and what loading `second` gives."""
    engine = engine_of(verify=verify, seed=1)

    def loaded(folder, tag=None):
        engine.global_steps = -1
        return message_of(engine.load_checkpoint, folder, tag=tag) or engine.global_steps

    return {folder: (loaded(folder), loaded(folder, "second")) for folder in folders}


# -- a rank cannot write ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_files(limit):
    """No file may grow beyond `limit` bytes: like a full disk, and nothing has to be mounted."""
    former, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (former, hard))


def one_rank_cannot_write(folder, recipe):
    """A save that fails on one rank, with a new name and over an old one; then training and saving go on."""
    engine = engine_of(recipe)
    step(engine)
    engine.save_checkpoint(folder, tag="first")
    messages = []
    for tag in ("second", "first"):
        step(engine)
        limit = small_files(20_000) if dist.get_rank() == 1 else contextlib.nullcontext()
        with limit:
            messages.append(message_of(engine.save_checkpoint, folder, tag=tag))
        dist.barrier()
    kept = sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())
    latest = Path(folder, "latest").read_text()
    again = engine_of(recipe, seed=1)
    again.load_checkpoint(folder)
    loaded = again.global_steps
    again.destroy()
    engine.save_checkpoint(folder, tag="third")
    return messages, kept, latest, loaded, Path(folder, "latest").read_text()


def full_disk(folder):
    """Saves until the file system is full; then everything is taken away but the last whole checkpoint."""
    engine = engine_of()
    step(engine)
    for number in range(100):
        message = message_of(engine.save_checkpoint, folder, tag=f"number{number}")
        if message is not None:
            break
    latest = Path(folder, "latest").read_text()
    whole = checkpoint_manifest.last_complete(Path(folder), "").name
    dist.barrier()
    if dist.get_rank() == 0:
        for path in Path(folder).iterdir():
            if path.is_dir() and path.name != latest:
                shutil.rmtree(path)
    dist.barrier()
    engine.load_checkpoint(folder)
    return message, number, latest, whole, message_of(engine.save_checkpoint, folder, tag="more")


def other_errors(folder):
    """Errors that are not a file's: of the arguments on all ranks, of the states and of the folder on one."""
    engine = engine_of()
    rank = dist.get_rank()
    states = {"hook": lambda: None} if rank == 1 else {}  # which cannot be pickled; each Python says that otherwise
    found = {"states": message_of(engine.save_checkpoint, folder, tag="a", client_state=states)}
    if rank == 0:
        Path(folder, "file").write_text("")
    found["folder"] = message_of(engine.save_checkpoint, str(Path(folder, "file")), tag="a")
    found["nowhere"] = message_of(engine.save_checkpoint, "", tag="a")
    if rank == 0:  # alone: another rank would read it while it is empty
        Path(folder, "latest").write_text("gone")
    dist.barrier()
    found["gone"] = message_of(engine.load_checkpoint, folder)
    found["left"] = sorted(path.name for path in Path(folder).rglob("*") if path.is_file())
    return found


# -- a file is damaged -----------------------------------------------------------------------------------------------

MODEL, OPTIMIZER = "zero_pp_rank_1_mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def overwrite(path, position, byte):
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(byte)


DAMAGES = {
    "cut": lambda d: os.truncate(d / OPTIMIZER, (d / OPTIMIZER).stat().st_size - 100),
    "longer": lambda d: (d / OPTIMIZER).write_bytes((d / OPTIMIZER).read_bytes() + b"x"),
    "empty": lambda d: (d / MODEL).write_bytes(b""),
    "removed": lambda d: (d / MODEL).unlink(),
    "0xff in states": lambda d: overwrite(d / OPTIMIZER, (d / OPTIMIZER).stat().st_size // 2, b"\xff" * 64),
    "0xff in weights": lambda d: overwrite(d / MODEL, (d / MODEL).stat().st_size // 2, b"\xff" * 64),
    "of another rank": lambda d: shutil.copy(d / OPTIMIZER.replace("rank_1", "rank_0"), d / OPTIMIZER),
    "of another checkpoint": lambda d: shutil.copy(d.parent / "first" / OPTIMIZER, d / OPTIMIZER),
    "manifest cut": lambda d: os.truncate(d / checkpoint_manifest.MANIFEST, 50),
    "manifest of something else": lambda d: (d / checkpoint_manifest.MANIFEST).write_text("[1]"),
}


def damaged(folder):
    """For each damage, what loading the checkpoint says on this rank; then without its manifest."""
    engine = engine_of()
    for tag in ("first", "second"):
        step(engine)
        engine.save_checkpoint(folder, tag=tag)
    second, kept = Path(folder, "second"), Path(folder, "kept")
    is_first = dist.get_rank() == 0
    if is_first:
        shutil.copytree(second, kept)
        (kept / checkpoint_manifest.MANIFEST).rename(Path(folder, "manifest"))  # the copy must not count
    found = {}
    for name, damage in DAMAGES.items():
        dist.barrier()
        if is_first:
            shutil.rmtree(second)
            shutil.copytree(kept, second)
            shutil.copy(Path(folder, "manifest"), second / checkpoint_manifest.MANIFEST)
            damage(second)
        dist.barrier()
        found[name] = message_of(engine.load_checkpoint, folder)
    dist.barrier()
    if is_first:
        (second / checkpoint_manifest.MANIFEST).unlink()
        shutil.copytree(kept, second, dirs_exist_ok=True)
    dist.barrier()
    found["without a manifest"] = message_of(engine.load_checkpoint, folder)
    return found


def unverified(folder):
    """A damaged checkpoint loads where it is not to be checked."""
    engine = engine_of(verify=False)
    engine.save_checkpoint(folder, tag="second")
    if dist.get_rank() == 0:
        DAMAGES["0xff in states"](Path(folder, "second"))
    dist.barrier()
    return message_of(engine.load_checkpoint, folder)
