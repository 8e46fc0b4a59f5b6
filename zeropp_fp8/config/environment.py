"""A recipe for ds_configs that say nothing about the plugin, from the environment, which child processes inherit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from zeropp_fp8.config.ds_config import asks_for_plugin
from zeropp_fp8.config.sections import SECTION

RECIPE_VARIABLE = "ZEROPP_FP8_RECIPE"


def recipe_from_environment(ds_config: Mapping[str, Any]) -> str | None:
    """The recipe that ZEROPP_FP8_RECIPE names for this ds_config, or None where it does not concern it.

    It concerns every stage-3 ds_config, but not one that has a `zeropp_fp8` section (also one that switches the plugin
    off) or that asks for something by a ZeRO++ key: what a job says of itself wins.
    """
    zero = ds_config.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    if stage != 3 or SECTION in ds_config or asks_for_plugin(ds_config):
        return None
    return os.environ.get(RECIPE_VARIABLE) or None
