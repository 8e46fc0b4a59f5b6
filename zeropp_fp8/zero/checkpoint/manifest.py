"""The manifest beside a checkpoint: which files there are and what is in them, so that a damaged one is known as such.

A JSON file in the checkpoint's folder, of which DeepSpeed knows nothing:

    {"complete": true, "global_steps": 20, "files": {NAME: {"bytes": 1234, "crc32": "0123abcd", "rank": 0}, ...}}

CRC-32 finds what disks, file systems and copies do to a file. It does not find what somebody changes on purpose: see
--trust of `zeropp_fp8.export` for files of others.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # typing's, which pydantic takes from Python 3.12 on

MANIFEST = "zeropp_fp8_manifest.json"
PARTIAL = ".partial"  # what the name of a file ends in until all ranks have written theirs
_CHUNK = 1 << 24


class SavedFile(TypedDict):
    """`rank`: the one that wrote it."""

    bytes: int
    crc32: str
    rank: int


class Manifest(TypedDict):
    """`files`: by name; none where `complete` is false."""

    complete: bool
    global_steps: int
    files: dict[str, SavedFile]


_MANIFEST = TypeAdapter(Manifest)


def describe_file(path: str | os.PathLike, rank: int) -> SavedFile:
    """The entry of a file in a manifest; reads the file."""
    checksum = size = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            checksum, size = zlib.crc32(chunk, checksum), size + len(chunk)
    return {"bytes": size, "crc32": f"{checksum:08x}", "rank": rank}


def write_manifest(folder: Path, files: dict[str, SavedFile] | None, global_steps: int) -> None:
    """Say of a checkpoint what it consists of; with `files` None, that it is not complete."""
    found: Manifest = {"complete": files is not None, "global_steps": global_steps, "files": files or {}}
    replace_file(folder / MANIFEST, json.dumps(found, indent=1))


def replace_file(path: Path, text: str) -> None:
    """Write a file that is there in full or not at all, also after a crash of the host."""
    partial = path.with_name(path.name + PARTIAL)
    partial.write_text(text)
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def sync(path: str | os.PathLike) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; None where it has none: DeepSpeed alone has saved it.

    Raises:
        ValueError: the checkpoint is not complete, or the manifest itself is damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        if any(folder.glob("*" + PARTIAL)):
            raise ValueError("the job that saved it ended before all ranks had written their files")
        return None
    try:
        found = _MANIFEST.validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ValueError(f"{path} cannot be read: {where}: {first['msg']}") from None
    if not found["complete"]:
        raise ValueError("the job that saved it ended before all ranks had written their files")
    return found


def damage(path: Path, saved: SavedFile, contents: bool = True) -> str | None:
    """The fault of a file of a checkpoint; None if it has none. Only with `contents` is it read."""
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if size != saved["bytes"]:
        return f"{path} has {size} bytes, and had {saved['bytes']} when it was saved"
    if contents and (found := describe_file(path, saved["rank"])["crc32"]) != saved["crc32"]:
        return f"{path} is not what was saved: its CRC-32 is {found}, and was {saved['crc32']}"
    return None


def last_complete(load_dir: Path, but: str) -> Path | None:
    """The newest checkpoint that has a manifest and all files of it in full size.

    It is one in `load_dir` other than `but`, or else one beside `load_dir` where that is a folder of Hugging Face's
    Trainer, which makes one for each. Other folders may be of other jobs.
    """
    load_dir = load_dir.resolve()
    beside = "checkpoint-*" if load_dir.name.startswith("checkpoint-") else load_dir.name
    for manifests in (load_dir.glob(f"*/{MANIFEST}"), load_dir.parent.glob(f"{beside}/*/{MANIFEST}")):
        folders = [manifest.parent for manifest in manifests]
        found = [(_steps_if_complete(folder), folder) for folder in folders if folder != load_dir / but]
        found = [
            (steps, (folder / MANIFEST).stat().st_mtime_ns, folder) for steps, folder in found if steps is not None
        ]
        if found:
            return max(found)[-1]
    return None


def _steps_if_complete(folder: Path) -> int | None:
    try:
        manifest = read_manifest(folder)
    except (ValueError, OSError):  # it is no candidate then
        return None
    is_damaged = any(damage(folder / name, saved, contents=False) for name, saved in manifest["files"].items())
    return None if is_damaged else manifest["global_steps"]
