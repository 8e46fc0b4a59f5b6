"""Options of Adam that states in low precision have no place for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeropp_fp8.config.sections import SECTION
from zeropp_fp8.config.words import ConfigError


def check_adam_options(options: Mapping[str, Any]) -> None:
    """Refuse an option of Adam's that has no place in 6 bytes a parameter.

    Raises:
        ConfigError: there is one.
    """
    for option in ("amsgrad", "maximize"):
        if options.get(option):
            raise ConfigError(
                f'"{SECTION}.optimizer": states in low precision do not support {option}; leave it out, or set '
                "the formats to fp32"
            )
