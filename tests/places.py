"""Where the project is, and its tests."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
SYSTEM = TESTS / "system"
WITH_RANKS = (
    TESTS / "comm",
    SYSTEM,
    *sorted(p for p in SYSTEM.iterdir() if p.is_dir() and p.name[0] != "_"),
)  # of *_jobs.py
FOLDERS = (ROOT, TESTS, TESTS / "formats", *WITH_RANKS)


def python_path() -> str:
    """PYTHONPATH of a process that imports what tests do: pytest's own folders (setup.cfg), and those of today."""
    return os.pathsep.join([*map(str, FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])])
