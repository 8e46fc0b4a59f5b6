"""A script of the RLHF examples as the pipeline runs it, on ranks."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main_of(script, words):
    """Do what `python SCRIPT WORDS` does."""
    sys.argv = [str(script), *words]
    importlib.import_module(Path(script).stem).main()
