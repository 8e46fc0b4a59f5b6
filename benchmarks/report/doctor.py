"""The doctor: what it prints."""

from __future__ import annotations

from benchmarks.report.blocks import Block


def doctor(result: dict) -> str:
    """All of it."""
    return "\n".join(["```", *result["printed"], "```"])


BLOCKS = {"doctor": Block(doctor, ("doctor/h100-2-nvlink",))}
