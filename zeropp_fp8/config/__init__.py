"""The `zeropp_fp8` section of a DeepSpeed configuration: fields, recipes, and every rule across fields.

`resolve()` is the one entry. It reads a ds_config and returns None (this job does not ask for the plugin) or a
`PluginConfig` that is complete and consistent. It raises ConfigError for everything that cannot be honoured, before any
collective, with the key and the remedy in the message.
"""

from zeropp_fp8.config.compute import high_precision_gemms, operand_formats, patterns_of_gemms
from zeropp_fp8.config.ds_config import (
    IN_TREE_KEYS,
    RECIPE_VARIABLE,
    asks_for_plugin,
    in_tree_keys,
    load_ds_config,
    without_in_tree_keys,
)
from zeropp_fp8.config.nodes import Place, check_topology, find_ranks_per_node, place_of, secondary_ranks
from zeropp_fp8.config.recipes import RECIPES
from zeropp_fp8.config.resolve import resolve, with_differences
from zeropp_fp8.config.rules import checked_compute
from zeropp_fp8.config.sections import (
    FIXED_BLOCKS,
    FROZEN_FORMATS,
    GEMMS,
    MX_FORMATS,
    SECTION,
    WIRE_FORMATS,
    ComputeConfig,
    FrozenConfig,
    GradientsConfig,
    OptimizerConfig,
    PluginConfig,
    WeightsConfig,
    difference_bits,
)
from zeropp_fp8.config.trial import SKIPPED_IN, TRIAL_VARIABLE, Trial, pieces_of, trial_from_environment
from zeropp_fp8.config.words import ConfigError

__all__ = [
    "FIXED_BLOCKS",
    "FROZEN_FORMATS",
    "GEMMS",
    "IN_TREE_KEYS",
    "MX_FORMATS",
    "RECIPES",
    "RECIPE_VARIABLE",
    "SECTION",
    "SKIPPED_IN",
    "TRIAL_VARIABLE",
    "WIRE_FORMATS",
    "ComputeConfig",
    "ConfigError",
    "FrozenConfig",
    "GradientsConfig",
    "OptimizerConfig",
    "Place",
    "PluginConfig",
    "Trial",
    "WeightsConfig",
    "asks_for_plugin",
    "check_topology",
    "checked_compute",
    "difference_bits",
    "find_ranks_per_node",
    "high_precision_gemms",
    "in_tree_keys",
    "load_ds_config",
    "operand_formats",
    "patterns_of_gemms",
    "pieces_of",
    "place_of",
    "resolve",
    "secondary_ranks",
    "trial_from_environment",
    "with_differences",
    "without_in_tree_keys",
]
