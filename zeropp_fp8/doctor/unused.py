"""Fields that a section sets and that do nothing beside the others, without contradicting them, which is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zeropp_fp8.config import SECTION, PluginConfig


def unused_fields(section: Mapping[str, Any], config: PluginConfig) -> Iterator[str]:
    """A sentence for each field that is set by hand and changes nothing."""
    written = list(_written(section))
    for fields, why in _idle(config):
        yield from (f'"{SECTION}.{name}" changes nothing: {why}' for name in written if name in fields)


def _written(section: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in section.items():
        if isinstance(value, Mapping) and f"{prefix}{key}" not in ("compute.format", "compute.high_precision_gemms"):
            yield from _written(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _fields(part: str, config: PluginConfig, *others: str) -> set[str]:
    """All fields of a part, without those in `others`."""
    model = getattr(config, part)
    return {f"{part}.{name}" for name in type(model).model_fields if name not in others}


def _idle(config: PluginConfig) -> Iterator[tuple[set[str], str]]:
    """(fields, why they do nothing) for what this configuration does not do."""
    weights = config.weights
    if weights.format == "none":
        yield _fields("weights", config, "format", "difference"), '"weights.format" is "none"'
    if not config.reduces_gradients:
        others = ("intra_format", "inter_format", "store_format", "scales")
        yield _fields("gradients", config, *others), "gradients are reduced by DeepSpeed, in 16 or 32 bits"
    if not config.computes_in_low_precision:
        yield _fields("compute", config, "format"), '"compute.format" is "none"'
    if config.frozen.format == "none":
        yield _fields("frozen", config, "format"), '"frozen.format" is "none"'
    if not config.numerics.every:
        yield {"numerics.parts", "numerics.file"}, '"numerics.every" is 0'
    if config.numerics.watch == "none":
        yield {"numerics.spike"}, '"numerics.watch" is "none"'
