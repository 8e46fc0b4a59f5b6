"""Result files: begun with what they were measured on, appended to by all ranks, finished, and read again.

They are kept as benchmarks/results/QUESTION/HARDWARE-RANKS-LINK[-VARIANT].json, for example
results/lora_step/h200-2-25gbit.json. The link is `local` for one rank, `nvlink`, `gloo`, a rate
between nodes, or `sockets` where ranks share a GPU.
"""

from __future__ import annotations

import fcntl
import json
import re
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"


class UnfinishedError(ValueError):
    """A result whose runs were cut short."""


def begin_result(path: str | Path, head: dict) -> None:
    """Write a result file without rows."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(dumped({**head, "finished": False, "rows": [], "failed": [], "started": []}))


def write_result(path: str | Path, result: dict) -> None:
    """Write a result of one process; "finished" says whether that was all."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(dumped(result))


def append_to(path: str | Path, key: str, entry: dict | str) -> None:
    """Append to a list of a result file, which several processes may write to; it is whole after every call."""
    with open(path, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        result = json.load(file)
        result.setdefault(key, []).append(entry)
        file.seek(0)
        file.write(dumped(result))
        file.truncate()


def end_result(path: str | Path, **more) -> dict:
    """Add the last parts to a result file, and take out what only served to go on; what it holds then."""
    result = read_result(path)
    result.pop("started", None)
    result |= {**more, "finished": True}
    Path(path).write_text(dumped(result))
    return result


def read_result(path: str | Path) -> dict:
    """A result file, finished or not, that `append_to` may be writing to."""
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        return json.load(file)


def finished_result(path: str | Path) -> dict:
    """A result file whose runs have all ended.

    Raises:
        UnfinishedError: they were cut short, or the file does not say.
    """
    result = read_result(path)
    if result.get("finished") is not True:
        raise UnfinishedError(f"{path}: its runs were cut short; measure again: {result.get('command')}")
    return result


def dumped(result: dict) -> str:
    """JSON, indented, but a list of numbers on one line: a series of 1,000 steps would be 1,000 lines."""
    numbers = r"\[\n\s*((?:-?[\d.]+(?:[eE][-+]?\d+)?|,|\s)+?)\s*\n\s*\]"  # no string holds a line feed
    text = json.dumps(result, indent=1)
    return re.sub(numbers, lambda match: "[" + " ".join(match[1].split()) + "]", text) + "\n"
