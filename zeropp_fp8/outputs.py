"""Common parts of the commands: options that say in one line what they take, and the destination of JSON.

Files are checked while options are read, so that a file that cannot be written is refused before a command begins.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
MOST = 10**9
STDOUT = "-"
LABEL = 14


class Parser(argparse.ArgumentParser):
    """A command-line parser that refuses wrong arguments in one line, with status 2."""

    def __init__(self, command: str, text: str | None) -> None:
        prog, formatter = f"python -m zeropp_fp8 {command}", argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=text, formatter_class=formatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog.split()[-1]}: {message}", file=sys.stderr)
        raise SystemExit(2)

    def add_engine(self) -> None:
        text = "which engine that trains, in the order of their making"
        self.add_argument("--engine", type=whole(0), default=0, help=text)

    def add_picture(self, text: str) -> None:
        self.add_argument("--picture", type=picture_to_draw, metavar="FILE", help=text)

    def add_json(self, read: Callable[[str], str] | None = None) -> None:
        text = "write JSON besides; without FILE it goes to stdout, and the text to stderr"
        self.add_argument("--json", nargs="?", const=STDOUT, type=read or file_to_write, metavar="FILE", help=text)


def whole(least: int = 1, most: int = MOST) -> Callable[[str], int]:
    """Make the type of an option that takes a whole number."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise ArgumentTypeError(f"{text}: give a whole number from {least} to {most}")
        return value

    return read


def number(
    least: float = -math.inf, above: float = -math.inf, most: float = 1e15, example: str = ""
) -> Callable[[str], float]:
    """Make the type of an option that takes a number within these limits; it may end in K, M, B or T."""
    limits = {"at least": least, "above": above, "at most": most}
    wanted = ", ".join(f"{name} {limit:g}" for name, limit in limits.items() if math.isfinite(limit)) + example

    def read(text: str) -> float:
        factor = _SUFFIXES.get(text[-1:].lower(), 1)
        try:
            value = float(text if factor == 1 else text[:-1]) * factor
        except ValueError:
            value = math.nan
        if not (least <= value <= most and value > above):
            raise ArgumentTypeError(f"{text}: give a number {wanted}")
        return value

    return read


def file_to_write(path: str) -> str:
    """Check the name of a file in an existing folder.

    Raises:
        ArgumentTypeError: the folder does not exist, or the name is a folder's.
    """
    if Path(path).is_dir():
        raise ArgumentTypeError(f"{path} is a folder; give a file")
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ArgumentTypeError(f"{path}: there is no folder {folder}; make it first")
    return path


def picture_to_draw(path: str) -> str:
    """Check the name of a picture in the same way; its ending gives the format.

    Raises:
        ArgumentTypeError: as above; or matplotlib cannot be imported, or cannot write that format.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ArgumentTypeError(f"a picture needs matplotlib ({error}): pip install matplotlib") from None
    formats = FigureCanvasAgg.filetypes
    if Path(path).suffix[1:].lower() not in formats:
        raise ArgumentTypeError(f"{path}: matplotlib writes {', '.join(sorted(formats))}; end the name with one")
    return file_to_write(path)


def table(rows: Sequence[Sequence[str]], words: Sequence[str] = ()) -> list[str]:
    """Lay out rows of cells as lines. The first row has the columns' names. Numbers are aligned at the right, and
    columns of `words` at the left."""
    columns = [f"{'<' if column[0] in words else '>'}{max(map(len, column))}" for column in zip(*rows)]
    return ["  ".join(map(format, row, columns)).rstrip() for row in rows]


def labelled(lines: Sequence[tuple[str, str]]) -> list[str]:
    """Lay out lines of (label, text), with the texts aligned."""
    width = max([LABEL, *(len(label) + 1 for label, _ in lines)])
    return [f"{label:<{width}}{text}" for label, text in lines]


def run_command(name: str, target: str | None, run: Callable[[dict[str, Any]], int | None], *refused: type) -> None:
    """Run a command; it puts its results into the dict that is written as JSON to `target`.

    Raises:
        SystemExit: with the status that it returns, if that is not 0; with 2 and one line for an error of a type in
            `refused`, or for a file that cannot be read or written.
    """
    try:
        with json_at(target) as found:
            status = run(found)
    except (*refused, OSError) as error:
        print(f"{name}: {said(error)}", file=sys.stderr)
        raise SystemExit(2) from None
    if status:
        raise SystemExit(status)


@contextmanager
def drawn(path: str, heights: Sequence[float], width: float = 10) -> Iterator[Sequence[Any]]:
    """Yield axes of panels below each other, of these heights in inches, and write the drawing at the end.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 1 + sum(heights)), layout="constrained")
    yield figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    figure.savefig(path, dpi=120)


@contextmanager
def json_at(target: str | None) -> Iterator[dict[str, Any]]:
    """Yield a dict and write it at the end as JSON: to a file, or to stdout, with nothing else on it.

    A dataclass becomes its fields and the properties that its class names in DERIVED.
    """
    found: dict[str, Any] = {}
    try:
        with redirect_stdout(sys.stderr) if target == STDOUT else nullcontext():
            yield found
    finally:
        if target is not None and found:
            text = json.dumps(plain(found), indent=1) + "\n"
            print(text, end="", flush=True) if target == STDOUT else Path(target).write_text(text)


def plain(value: Any) -> Any:
    """Convert a value for JSON. JSON has no numbers that are not finite: they become null."""
    if is_dataclass(value):
        names = [*(field.name for field in fields(value)), *getattr(value, "DERIVED", ())]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def said(error: Exception) -> str:
    """Say an error in one line; for an error of the system: the file, and what is wrong with it."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {(error.strerror or 'it cannot be read').lower()}"
    return str(error)
