"""Updates through files: for engines in another region, which a trainer does not reach, and which come and go.

A folder has a safetensors file per update that has tensors, VERSION-NUMBER.safetensors, with whole weights under their
names, and VERSION.json, written last, with the headers of all updates: a version that is listed is complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from safetensors.torch import load, save

from zeropp_fp8.zero.handover.receiver import MissedUpdate, Receiver
from zeropp_fp8.zero.handover.update import Header, Update, sent_tensors

WANTED = "wanted"  # a file by which an engine asks for all weights


def listed(folder: Path) -> list[int]:
    """The versions in a folder, in their order."""
    return sorted(int(path.stem) for path in folder.glob("*.json") if path.stem.isdigit())


def headers_of(folder: Path, version: int) -> list[Header]:
    return [Header(**header) for header in json.loads(_list(folder, version).read_text())]


def _list(folder: Path, version: int) -> Path:
    return folder / f"{version:08d}.json"


def is_whole(headers: list[Header]) -> bool:
    """Whether a version follows no other."""
    return all(header.after is None for header in headers)


def _file(folder: Path, header: Header) -> Path:
    return folder / f"{header.version:08d}-{header.number:05d}.safetensors"


def _write(path: Path, content: bytes) -> None:
    """Let a file be there with all of its content, or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def write_version(folder: Path, updates: Iterable[Update]) -> list[Header]:
    """Write the files of a version's updates, and last their headers, which it returns."""
    headers = []
    for header, tensors in updates:
        headers.append(header)
        if tensors:
            _write(_file(folder, header), save({name: each.contiguous() for name, each in tensors.items()}))
    _write(_list(folder, headers[0].version), json.dumps([vars(header) for header in headers]).encode())
    return headers


def delete(folder: Path, version: int) -> None:
    headers = headers_of(folder, version)
    _list(folder, version).unlink()  # first, so that no listed version lacks a file
    for header in headers:
        _file(folder, header).unlink(missing_ok=True)


def _way(folder: Path, receiver: Receiver) -> list[list[Header]] | None:
    """The versions to apply in order to have the newest one: from the last whole one, or the one that is here, on."""
    versions, way, here = listed(folder), [], receiver.version
    version = max(versions, default=0)
    if version == here and [header.checksum for header in headers_of(folder, here)] != receiver.checksums:
        here = None  # another trainer's, in a folder made anew
    while version not in (0, here):
        if version not in versions:
            return None
        way.insert(0, headers_of(folder, version))
        if is_whole(way[0]):
            break
        version -= 1
    return way


def catch_up(folder: Path | str, receiver: Receiver) -> int | None:
    """Apply what a folder has beyond a receiver's version: differences where they follow it, else all weights first.

    Returns:
        The receiver's version then; None where there is none yet.

    Raises:
        MissedUpdate: no versions lead to the newest one, or the weights do not come out as the trainer's. All weights
            are asked for then, and come with the next version.
        FileNotFoundError: the trainer has deleted what was being read; call it again.
    """
    folder = Path(folder) if isinstance(folder, str) else folder
    way = _way(folder, receiver)
    try:
        if way is None:
            raise MissedUpdate(f"{folder} does not lead from version {receiver.version} to {listed(folder)[-1]}")
        for header in chain.from_iterable(way):
            has_file = bool(sent_tensors(header))
            receiver.apply(Update(header, load(_file(folder, header).read_bytes()) if has_file else {}))
    except MissedUpdate:
        (folder / WANTED).touch()
        raise
    return receiver.version
