"""A ds_config -> a complete, checked PluginConfig."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from zeropp_fp8.config.compute import completed_compute
from zeropp_fp8.config.ds_config import asks_for_plugin, check_names, in_tree_keys
from zeropp_fp8.config.environment import RECIPE_VARIABLE, recipe_from_environment
from zeropp_fp8.config.recipes import RECIPES
from zeropp_fp8.config.rules import check_fields, check_host, check_in_tree_keys, check_in_tree_types
from zeropp_fp8.config.sections import MX_BLOCK_SIZE, MX_FORMATS, SECTION, ConfigError, PluginConfig, nearest
from zeropp_fp8.config.trial import trial_from_environment


def resolve(ds_config: Mapping[str, Any], *, hybrid_engine: bool = False) -> PluginConfig | None:
    """The plugin's configuration out of a ds_config, or None where it does not ask for the plugin.

    A stage-3 ds_config that says nothing about the plugin gets the recipe of ZEROPP_FP8_RECIPE, if that is set.

    Raises:
        ConfigError: wrong type, unknown key, misspelt name of the section, or a combination that cannot be honoured.
    """
    check_names(ds_config)
    recipe = recipe_from_environment(ds_config)
    if recipe is None:
        return _resolve(ds_config, hybrid_engine) if asks_for_plugin(ds_config) else None
    try:
        config = _resolve({**ds_config, SECTION: {"recipe": recipe}}, hybrid_engine)
    except ConfigError as error:  # about a section that the ds_config does not have
        raise ConfigError(f"{RECIPE_VARIABLE}={recipe}: {error}") from None
    return config.named_by(RECIPE_VARIABLE)


def _resolve(ds_config: Mapping[str, Any], hybrid_engine: bool) -> PluginConfig:
    """The configuration out of a ds_config that asks for the plugin."""
    section = ds_config.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise ConfigError(
            f'"{SECTION}" must be an object such as {{"recipe": "zeropp"}}, or {{"enabled": false}} for stock '
            f"DeepSpeed; got {json.dumps(section, default=repr)}"
        )
    keys = in_tree_keys(ds_config)
    check_in_tree_types(keys)
    config = _completed(_parse(_merge(section, keys)))
    check_in_tree_keys(config, section, keys)
    check_fields(config)
    trial = trial_from_environment()
    if trial is not None:
        config = trial.applied(config)
        check_fields(config)
    check_host(config, ds_config, hybrid_engine)
    return config


def _merge(section: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """recipe (or: lossless plus what the in-tree keys ask), overridden by the fields set by hand."""
    recipe = section.get("recipe")
    hpz_size = keys.get("zero_hpz_partition_size", 1)
    if recipe is None:
        base = copy.deepcopy(RECIPES["lossless"])
        if keys.get("zero_quantized_weights"):
            base["weights"] = copy.deepcopy(RECIPES["zeropp"]["weights"])
        if keys.get("zero_quantized_gradients"):
            base["gradients"] = copy.deepcopy(RECIPES["zeropp"]["gradients"])
        if keys.get("zero_quantized_nontrainable_weights"):
            base["frozen"] = {"format": "int8", "block_size": 256, "modules": "frozen"}
        if hpz_size != 1:
            base["secondary"] = {"scope": hpz_size}
    elif not isinstance(recipe, str):
        raise ConfigError(f'"{SECTION}.recipe" must be a name, one of {", ".join(sorted(RECIPES))}; got {recipe!r}')
    elif recipe in RECIPES:
        base = copy.deepcopy(RECIPES[recipe])
        if hpz_size != 1 and base.get("secondary", {}).get("scope") == "node":
            base["secondary"]["scope"] = hpz_size  # the key says how many ranks of the node share a copy
    else:
        raise ConfigError(
            f'"{SECTION}.recipe": there is no recipe {recipe!r}{nearest(str(recipe), RECIPES)}; '
            f"recipes are {', '.join(sorted(RECIPES))}"
        )
    return _overridden(base, section)


def _overridden(base: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `by`, part by part."""
    result = copy.deepcopy({**base, **by})
    for key, value in by.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            result[key] = _overridden(base[key], value)
    return result


def _field_names(location: tuple) -> list[str]:
    """The names allowed where a pydantic error happened."""
    model: Any = PluginConfig
    for part in location[:-1]:
        field = model.model_fields.get(part) if isinstance(model, type) and issubclass(model, BaseModel) else None
        model = field.annotation if field is not None else None
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _location(location: tuple) -> list[str]:
    """The keys of a pydantic location. What follows a leaf field (union members, list indices) is pydantic's own."""
    keys: list[str] = []
    model: Any = PluginConfig
    for part in location:
        keys.append(str(part))
        field = model.model_fields.get(part)
        model = field.annotation if field is not None else None
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            break
    return keys


def _parse(section: dict[str, Any]) -> PluginConfig:
    try:
        return PluginConfig(**section)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            where = ".".join((SECTION, *_location(problem["loc"])))
            if problem["type"] == "extra_forbidden":
                names = _field_names(problem["loc"])
                hint = nearest(str(problem["loc"][-1]), names)
                lines.append(f'"{where}": unknown key{hint}; keys here are {", ".join(names)}')
            else:
                lines.append(f'"{where}": {problem["msg"]}, got {problem["input"]!r}')
        raise ConfigError("; ".join(dict.fromkeys(lines))) from None


def _completed(config: PluginConfig) -> PluginConfig:
    """Defaults that depend on other fields: what MX formats and shared scales fix, where the user did not."""
    changes: dict[str, Any] = {"compute": completed_compute(config.compute)}
    gradients = config.gradients
    for name, formats in (
        ("weights", {config.weights.format}),
        ("gradients", {gradients.intra_format, gradients.inter_format} - {"none"}),
        ("frozen", {config.frozen.format}),
    ):
        section = getattr(config, name)
        if formats and formats <= set(MX_FORMATS):
            fixed = {"block_size": MX_BLOCK_SIZE, "hadamard": False}
            update = {
                k: v for k, v in fixed.items() if k in type(section).model_fields and k not in section.model_fields_set
            }
            changes[name] = section.model_copy(update=update)
    if gradients.scales == "tensor" and "hadamard" not in gradients.model_fields_set:
        changes["gradients"] = gradients.model_copy(update={"hadamard": False})
    return config.model_copy(update=changes)
