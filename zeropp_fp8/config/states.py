"""Options of Adam that states in low precision have no place for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zeropp_fp8.config.sections import SECTION


def adam_refusals(options: Mapping[str, Any]) -> Iterator[str]:
    """A line for each option of Adam's that has no place in 6 bytes a parameter."""
    for option in ("amsgrad", "maximize"):
        if options.get(option):
            yield (
                f'"{option}" of Adam does not go with states in low precision ("{SECTION}.optimizer"); leave it out, '
                "or set the formats to fp32"
            )
