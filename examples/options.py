"""Options of every command line here: types for argparse, and refusals of one line with status 2.

parser = Parser(description=__doc__)
parser.add_argument("--steps", type=whole(1))
with refusals():
    ...                                              # what can only be known together, or from files
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

PATIENCE = 10.0  # seconds in which a launcher has ended this rank, if rank 0 has refused too
ALL = -1  # of --keep_checkpoints


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number from `least` to `most`."""
    wanted = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < least or (most is not None and value > most):
            raise ArgumentTypeError(f"{text}: give {wanted}")
        return value

    return read


def finite(
    least: float = -math.inf, most: float = math.inf, above: float = -math.inf, below: float = math.inf
) -> Callable[[str], float]:
    """A finite number within all of these limits."""
    limits = {"of at least": least, "of at most": most, "above": above, "below": below}
    wanted = " and ".join(f"{name} {limit:g}" for name, limit in limits.items() if math.isfinite(limit))
    wanted = f"give a finite number {wanted}".rstrip()

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most and above < value < below):
            raise ArgumentTypeError(f"{text}: {wanted}")
        return value

    return read


generator_seed = whole(0, 2**32 - 1)  # generators take 64 bits, and seeds are multiplied by up to a million


def kept(text: str) -> int:
    """How many checkpoints stay: at least one, or ALL."""
    if text in ("all", str(ALL)):
        return ALL
    try:
        return whole(1)(text)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{error}, or all (or {ALL})") from None


def new_folder(text: str) -> str:
    """A path where a folder is or can be made."""
    place = Path(text).absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise ArgumentTypeError(f"{text}: give a folder; {place} is {'read-only' if place.is_dir() else 'a file'}")
    return text


def new_file(text: str) -> str:
    """A path where a file is or can be made."""
    if Path(text).is_dir():
        raise ArgumentTypeError(f"{text}: give a file; this is a folder")
    new_folder(str(Path(text).parent))
    return text


def several(read: Callable, separator: str = ",") -> Callable[[str], str]:
    """Values in one word, with `separator` between them, each as `read` takes it; the word stays as it is."""

    def read_all(text: str) -> str:
        for part in text.split(separator):
            read(part)
        return text

    return read_all


def model_config(option: str, name: str):
    """The configuration of a model in a folder or on the hub, from transformers.

    Raises:
        ValueError: there is none.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{option} {name}: neither a folder with a model nor a name of one that can be loaded: {error}"
        ) from error


def refuse(why: object) -> NoReturn:
    """End the process with status 2 and one line that says why. Of the ranks of a job one says it."""
    if int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0) > 0:
        time.sleep(PATIENCE)  # a rank that is still there then may be the only one to refuse
    print(f"{Path(sys.argv[0]).stem}: {' '.join(str(why).split())}", file=sys.stderr, flush=True)
    raise SystemExit(2)


@contextmanager
def refusals() -> Iterator[None]:
    """Refuse what options and files raise in this block: nothing has been done yet that could be lost."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        refuse(error)


class Parser(argparse.ArgumentParser):
    """argparse's, which refuses with one line instead of its usage and a line, on every rank."""

    def error(self, message: str) -> NoReturn:
        refuse(message)
