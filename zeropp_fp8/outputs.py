"""Files that a command writes when it is done: types of argparse, so that what cannot be is said before it begins."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path


def file_to_write(path: str) -> str:
    """A file's name, in a folder that is there.

    Raises:
        ArgumentTypeError: it is not there, or the name is a folder's.
    """
    if Path(path).is_dir():
        raise ArgumentTypeError(f"{path} is a folder; give a file")
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ArgumentTypeError(f"{path}: there is no folder {folder}; make it first")
    return path


def picture_to_draw(path: str) -> str:
    """The same of a picture; its ending says the format.

    Raises:
        ArgumentTypeError: as above; matplotlib cannot be imported, or does not write that format.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ArgumentTypeError(f"a picture needs matplotlib ({error}): pip install matplotlib") from None
    formats = FigureCanvasAgg.filetypes
    if Path(path).suffix[1:].lower() not in formats:
        raise ArgumentTypeError(f"{path}: matplotlib writes {', '.join(sorted(formats))}; end the name with one")
    return file_to_write(path)
