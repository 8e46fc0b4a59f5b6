"""Where rows come from: JSONL, JSON and parquet files, folders of them, and Hugging Face data sets, as they stand."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = (".jsonl", ".json", ".parquet")
SHOWN_CHARACTERS = 80


class RowError(ValueError):
    """A fault of one row."""


Record = tuple[str, int, object]  # (source, line, the row or the RowError that says why it cannot be read)


def records(source: str, split: str) -> Iterator[Record]:
    """The rows of a source as they stand there."""
    path, chosen_split = Path(source).expanduser(), split
    if not path.exists() and "@" in source:
        place, _, chosen_split = source.rpartition("@")
        path = Path(place).expanduser()
        if path.is_file():
            raise ValueError(f"{source}: a file has no splits; name a folder, or the file alone")
    if path.is_dir():
        for file in files_of_split(path, chosen_split):
            yield from records_of_file(file)
    elif path.is_file():
        yield from records_of_file(path)
    elif source.startswith((".", "/", "~")) or path.suffix in SUFFIXES:
        raise FileNotFoundError(f"{source}: no such file or folder")
    else:
        yield from records_of_data_set(source, split)


def files_of_split(folder: Path, split: str) -> list[Path]:
    """The data files below a folder, sorted: those with the split in their paths ("train-0001.parquet"), else all.

    Raises:
        FileNotFoundError: there are none.
    """
    files = sorted(Path(at, name) for at, _, names in os.walk(folder) for name in names if name.endswith(SUFFIXES))
    if not files:
        raise FileNotFoundError(f"{folder}: no file there ends in {', '.join(SUFFIXES)}")
    named = re.compile(rf"(?:^|[-_./]){re.escape(split)}[-_./]")
    return [file for file in files if named.search(file.relative_to(folder).as_posix())] or files


def records_of_file(path: Path) -> Iterator[Record]:
    """The rows of one file, by its ending."""
    if path.suffix == ".parquet":
        yield from records_of_parquet(path)
    elif path.suffix in SUFFIXES:
        yield from records_of_json(path)
    else:
        raise ValueError(f"{path}: its name ends in none of {', '.join(SUFFIXES)}")


def records_of_json(path: Path) -> Iterator[Record]:
    """A JSON object a line, or (.json) one array of objects."""
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")  # the byte order mark that some editors write
    if path.suffix == ".json" and content.lstrip().startswith(b"["):
        try:
            rows = json.loads(content.decode())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not a JSON array: {error}") from error
        for number, row in enumerate(rows, 1):
            yield str(path), number, row
        return
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            yield str(path), number, parsed(line)


def parsed(line: bytes) -> object:
    """A line of JSON, or a RowError if it is not UTF-8 or not JSON."""
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        why = f"not UTF-8 at byte {error.start + 1} of the line"
    except (ValueError, RecursionError) as error:
        why = f"not JSON: {error}"
    return RowError(f"{why}: {line[:SHOWN_CHARACTERS]!r}")


def records_of_parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in rows_of_batch(batch))
            for number, row in enumerate(rows, 1):
                yield str(path), number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a parquet file that can be read: {error}") from error


def rows_of_batch(batch) -> list:
    """The rows of a pyarrow.RecordBatch; a RowError in place of one whose texts are not UTF-8."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [RowError(f"not UTF-8: {error.reason} at byte {error.start + 1} of a text")]
        return [row for number in range(batch.num_rows) for row in rows_of_batch(batch.slice(number, 1))]


def records_of_data_set(source: str, split: str) -> Iterator[Record]:
    """The rows of NAME[:CONFIGURATION][@SPLIT] of Hugging Face."""
    from datasets import load_dataset

    name, _, named_split = source.partition("@")
    name, _, configuration = name.partition(":")
    try:
        data_set = load_dataset(name, configuration or None, split=named_split or split)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{source}: neither a file or folder here nor a data set that can be loaded "
            f"(as NAME[:CONFIGURATION][@SPLIT]): {error}"
        ) from error
    for number, row in enumerate(data_set, 1):
        yield source, number, row
