"""Where the project is, and its tests."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
SYSTEM = TESTS / "system"
WITH_RANKS = (TESTS / "comm", SYSTEM, *sorted(path for path in SYSTEM.iterdir() if path.is_dir()))  # of *_jobs.py
