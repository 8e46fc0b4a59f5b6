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


def link_says(result: dict, num_bytes: float, step_ms: float, least_ms: float) -> str:
    """How much of the emulated link a host's TCP reached in a step of stock, and what the full rate would leave.

    Args:
        num_bytes, step_ms: of stock's step. least_ms: of the fastest run beside it.
    """
    gbit, full_ms = result["settings"]["gbit"], num_bytes * 8 / result["settings"]["gbit"] / 1e6
    return (
        f"stock's step reached {num_bytes * 8 / step_ms / 1e6:.0f} of the link's {gbit:.0f} Gbit/s on a slow host; "
        f"with all of them it would take at least {full_ms:,.0f} ms, {full_ms / least_ms:.1f} times the fastest step."
    )


def outcome(found: float, most: float) -> str:
    """Say whether a target is met."""
    return "met" if found <= most else "missed"
