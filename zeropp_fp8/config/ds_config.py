"""Read a ds_config as DeepSpeed does, and DeepSpeed's own ZeRO++ keys."""

from __future__ import annotations

import base64
import copy
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hjson

from zeropp_fp8.config.sections import SECTION, InTreeKeys
from zeropp_fp8.config.words import ConfigError, at, match

RECIPE_VARIABLE = "ZEROPP_FP8_RECIPE"  # a recipe for ds_configs without any word of the plugin; children inherit it
# The four ZeRO++ keys of DeepSpeed itself, and the value that means "off". This project honours them and hides
# them from DeepSpeed, whose own implementation needs nvcc and is wrong for bf16 and fp32 gradients.
IN_TREE_KEYS = {name: field.default for name, field in InTreeKeys.model_fields.items()}


def load_ds_config(ds_config: Any) -> dict[str, Any]:
    """Load a ds_config in any form that DeepSpeed takes (a dict, a path, base64 of JSON), or JSON text, as a new dict.

    Raises:
        ConfigError: it has none of these forms, is no JSON, is no object, or is an object with a key twice.
    """
    if isinstance(ds_config, Mapping):
        return copy.deepcopy(dict(ds_config))
    if not isinstance(ds_config, (str, os.PathLike)):
        raise ConfigError(f"a ds_config is an object or the path of a file with one, got {ds_config!r}")
    name = f"the ds_config {os.fspath(ds_config)!r}"
    if os.path.exists(ds_config):
        try:
            text = Path(ds_config).read_text()
        except OSError as error:
            raise ConfigError(f"{name} cannot be read: {(error.strerror or str(error)).lower()}") from None
        except ValueError:
            raise ConfigError(f"{name} cannot be read: it is not UTF-8 text") from None
    elif str(ds_config).lstrip().startswith("{"):
        name, text = "the ds_config given as text", str(ds_config)
    else:
        try:
            text = base64.urlsafe_b64decode(str(ds_config)).decode()
            if not text:
                raise ValueError
        except ValueError:
            raise ConfigError(f"{name} is neither a file nor base64 of JSON") from None
    try:
        loaded = hjson.loads(text, object_pairs_hook=_without_duplicates)  # DeepSpeed reads Hjson too
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{name} holds a {type(loaded).__name__}; it must be an object, {{...}}")
    return loaded


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON. DeepSpeed refuses a duplicate key; taking the last one would hide a mistake."""
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"duplicate keys {', '.join(map(json.dumps, twice))}; leave one of each")
    return dict(pairs)


def in_tree_keys(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ZeRO++ keys that this ds_config sets, whatever their values."""
    zero = ds_config.get("zero_optimization")
    return {key: zero[key] for key in IN_TREE_KEYS if key in zero} if isinstance(zero, Mapping) else {}


def without_in_tree_keys(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the ds_config that DeepSpeed may see."""
    clean = copy.deepcopy(dict(ds_config))
    for key in in_tree_keys(clean):
        del clean["zero_optimization"][key]
    return clean


def asks_for_plugin(ds_config: Mapping[str, Any]) -> bool:
    """Whether a section or an in-tree key turns the plugin on (the section's `enabled: false` wins)."""
    section = ds_config.get(SECTION)
    if isinstance(section, Mapping) and section.get("enabled") is False:
        return False
    asked = any(value != IN_TREE_KEYS[key] for key, value in in_tree_keys(ds_config).items())
    return SECTION in ds_config or asked


def recipe_from_environment(ds_config: Mapping[str, Any]) -> str | None:
    """Return the recipe that ZEROPP_FP8_RECIPE names for this ds_config, or None if it does not apply.

    It applies to every stage-3 ds_config, except one that has a `zeropp_fp8` section (even one that switches the plugin
    off) or asks for something by a ZeRO++ key: a job's own configuration wins.
    """
    if at(ds_config, ("zero_optimization", "stage")) != 3 or SECTION in ds_config or asks_for_plugin(ds_config):
        return None
    return os.environ.get(RECIPE_VARIABLE) or None


def misnamed_sections(ds_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each key that is almost the section's name: DeepSpeed ignores keys that it does not know."""
    for key in ds_config:
        if key != SECTION and match(str(key).lower(), [SECTION], 0.6):
            yield (
                f'"{key}" means nothing in a ds_config (did you mean "{SECTION}"?); rename or remove it. A section '
                'with "enabled": false is stock DeepSpeed'
            )
