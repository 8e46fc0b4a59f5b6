"""Turn a ds_config into a complete, checked PluginConfig."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from zeropp_fp8.config.compute import completed_compute
from zeropp_fp8.config.ds_config import (
    RECIPE_VARIABLE,
    asks_for_plugin,
    in_tree_keys,
    misnamed_sections,
    recipe_from_environment,
)
from zeropp_fp8.config.recipes import RECIPES
from zeropp_fp8.config.rules import DIFFERENCES, FIELDS, HOST, broken, in_tree_rules
from zeropp_fp8.config.sections import FIXED_BLOCKS, SECTION, InTreeKeys, PluginConfig, formats_of
from zeropp_fp8.config.trial import trial_from_environment
from zeropp_fp8.config.words import ConfigError, Keys, at, nearest, once, parse, shown


def resolve(ds_config: Mapping[str, Any], *, hybrid_engine: bool = False) -> PluginConfig | None:
    """Return the plugin's configuration for a ds_config, or None if the ds_config does not ask for the plugin.

    A stage-3 ds_config without any word of the plugin gets the recipe of ZEROPP_FP8_RECIPE, if that is set.

    Raises:
        ConfigError: one line for every wrong type, unknown key and combination that cannot be honoured.
    """
    misnamed = list(misnamed_sections(ds_config))
    recipe = recipe_from_environment(ds_config)
    if recipe is None:
        config, lines = _resolve(ds_config, hybrid_engine) if asks_for_plugin(ds_config) else (None, [])
    else:
        config, lines = _resolve({**ds_config, SECTION: {"recipe": recipe}}, hybrid_engine)
        config = config.named_by(RECIPE_VARIABLE)
        # The lines are about a section that the ds_config does not have.
        lines = [f"{RECIPE_VARIABLE}={recipe}: {line}" for line in lines]
    if misnamed or lines:
        raise ConfigError(*once([*misnamed, *lines]))
    return config


def is_asked(ds_config: Mapping[str, Any]) -> bool:
    """Whether `resolve` returns anything but None: a configuration, or faults."""
    asked = asks_for_plugin(ds_config) or recipe_from_environment(ds_config) is not None
    return asked or any(misnamed_sections(ds_config))


def _resolve(ds_config: Mapping[str, Any], hybrid_engine: bool) -> tuple[PluginConfig, list[str]]:
    """Return the configuration for a ds_config that asks for the plugin, and its faults."""
    section, keys = ds_config.get(SECTION, {}), in_tree_keys(ds_config)
    if not isinstance(section, Mapping):
        return PluginConfig(), [
            f'"{SECTION}" must be an object such as {{"recipe": "zeropp"}}, or {{"enabled": false}} for stock '
            f"DeepSpeed; got {shown(section)}"
        ]
    _, wrong, lines = parse(InTreeKeys, keys, "zero_optimization")
    keys = {key: value for key, value in keys.items() if (key,) not in wrong}
    recipe = section.get("recipe")
    known_recipe = recipe is None or (isinstance(recipe, str) and recipe in RECIPES)
    if not known_recipe:
        lines.append(
            f'"{SECTION}.recipe": there is no recipe {shown(recipe)}{nearest(recipe, RECIPES)}; '
            f"recipes are {', '.join(sorted(RECIPES))}"
        )
        section = {**section, "recipe": None}
    config, refused, wrong_fields = parse(PluginConfig, _merge(section, keys), SECTION)
    config = _completed(config, section)
    if not known_recipe:  # the recipe fills all fields that are not set by hand
        refused |= {path for path in _all_fields(config) if at(section, path) is None}
    lines += wrong_fields
    lines += broken(in_tree_rules(section, keys) | FIELDS, config, ds_config, refused)
    trial = trial_from_environment()
    if trial is not None and not lines:
        config = trial.applied(config)
        lines += broken(FIELDS, config)
    config = with_differences(config, ds_config)
    if hybrid_engine:
        ds_config = {**ds_config, "hybrid_engine": {"enabled": True}}
    return config, [*lines, *broken(HOST, config, ds_config, refused)]


def with_differences(config: PluginConfig, ds_config: Mapping[str, Any]) -> PluginConfig:
    """Return the configuration with "exact" or "none" where its weights' difference is "auto"."""
    if config.weights.difference != "auto":
        return config
    none, exact = (
        config.model_copy(update={"weights": config.weights.model_copy(update={"difference": choice})})
        for choice in ("none", "exact")
    )
    return none if any(broken(DIFFERENCES, exact, ds_config)) else exact


def _merge(section: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the recipe (or lossless plus what the in-tree keys ask for) with the fields set by hand, which win."""
    recipe = section.get("recipe")
    hpz_size = keys.get("zero_hpz_partition_size", 1)
    base = copy.deepcopy(RECIPES[recipe or "lossless"])
    if recipe is None:
        if keys.get("zero_quantized_weights"):
            base["weights"] = copy.deepcopy(RECIPES["zeropp"]["weights"])
        if keys.get("zero_quantized_gradients"):
            base["gradients"] = copy.deepcopy(RECIPES["zeropp"]["gradients"])
        if keys.get("zero_quantized_nontrainable_weights"):
            base["frozen"] = {"format": "int8", "block_size": 256, "modules": "frozen"}
        if hpz_size != 1:
            base["secondary"] = {"scope": hpz_size}
    elif hpz_size != 1 and base.get("secondary", {}).get("scope") == "node":
        base["secondary"]["scope"] = hpz_size  # the key gives how many ranks of the node share a copy
    return _overridden(base, section)


def _overridden(base: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `by`, part by part."""
    result = copy.deepcopy({**base, **by})
    for key, value in by.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            result[key] = _overridden(base[key], value)
    return result


def _all_fields(config: BaseModel, within: Keys = ()) -> Iterator[Keys]:
    for name, value in config:
        yield from _all_fields(value, (*within, name)) if isinstance(value, BaseModel) else [(*within, name)]


def _completed(config: PluginConfig, section: Mapping[str, Any]) -> PluginConfig:
    """Fill in what MX formats and shared scales fix, where the section leaves it out, whatever its recipe has there."""
    changes: dict[str, Any] = {"compute": completed_compute(config.compute)}
    gradients = config.gradients
    for name in ("weights", "gradients", "frozen"):
        part, formats = getattr(config, name), formats_of(getattr(config, name))
        if formats and formats <= FIXED_BLOCKS.keys():
            fixed = {"block_size": max(map(FIXED_BLOCKS.get, formats)), "hadamard": False, "double_quantize": False}
            known = {k: v for k, v in fixed.items() if k in type(part).model_fields and at(section, (name, k)) is None}
            changes[name] = part.model_copy(update=known)
    if gradients.scales == "tensor" and at(section, ("gradients", "hadamard")) is None:
        changes["gradients"] = gradients.model_copy(update={"hadamard": False})
    return config.model_copy(update=changes)
