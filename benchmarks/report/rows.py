"""Rows of results as the tables need them."""

from __future__ import annotations

GIB = 1 << 30


def by_run(*results: dict) -> dict[str, dict]:
    """Rows by the name of their run, of results that hold each run once."""
    rows = [row for result in results for row in result["rows"]]
    found = {row["run"]: row for row in rows}
    assert len(found) == len(rows), "a run is there more than once"
    return found


def fastest(result: dict, key: str) -> dict[str, dict]:
    """The row of each run's fastest round, by `key`."""
    return {row["run"]: row for row in sorted(result["rows"], key=lambda row: -row[key])}


def outcome(found: float, most: float) -> str:
    """Say whether a target is met."""
    return "met" if found <= most else "missed"
