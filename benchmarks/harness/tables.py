"""Cells of printed tables."""

from __future__ import annotations


def cell(value: float | None, digits: int = 1, unit: float = 1.0, width: int = 0) -> str:
    """A number in units, or "-" where there is none, right-aligned."""
    return f"{'-' if value is None else f'{value / unit:.{digits}f}':>{width}}"


def verdict(line: dict) -> str:
    """Return what became of the targets of a line, whose keys end with "met"."""
    verdicts = [value for key, value in line.items() if key.endswith("met")]
    return "" if not verdicts else "met" if all(verdicts) else "MISSED"


def link_of(settings: dict) -> str:
    """Return what is between the ranks."""
    gbit = settings["gbit"]
    if gbit is None:
        return "one node" if settings["nodes"] == 1 else f"{settings['nodes']} nodes on the links of one"
    return f"{settings['nodes']} nodes, {gbit:g} Gbit/s" if gbit else "link not shaped"
