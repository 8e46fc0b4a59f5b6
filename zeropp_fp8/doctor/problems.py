"""Problems, and what to do about them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Something that makes training wrong or impossible; or, where it is not `serious`, slower than it need be."""

    what: str
    remedy: str = ""
    serious: bool = True

    @property
    def text(self) -> str:
        return f"{self.what}: {self.remedy}" if self.remedy else self.what


def problem_lines(problems: list[Problem]) -> list[str]:
    """The end of a report: remarks, then a numbered list of problems, or that there is none."""
    lines = [f"note: {each.text}" for each in problems if not each.serious]
    serious = [each.text for each in problems if each.serious]
    if not serious:
        return [*lines, "no problem found"]
    return [*lines, f"{len(serious)} problem(s):", *(f"  {place}. {text}" for place, text in enumerate(serious, 1))]


def exit_status(problems: list[Problem]) -> int:
    """1 where something is serious, else 0."""
    return int(any(each.serious for each in problems))
