"""Rules inside the gradients and optimizer sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeropp_fp8.config.sections import (
    FP8_FORMATS,
    HALF_STEP_FORMATS,
    SECTION,
    STATE_BLOCKS,
    STATE_FORMATS,
    ConfigError,
    GradientsConfig,
    OptimizerConfig,
    nearest,
)


def check_gradients(gradients: GradientsConfig) -> None:
    """Rules inside the gradients section; the names of its formats have been checked.

    Raises:
        ConfigError: choices that cannot work together.
    """
    where = f"{SECTION}.gradients"
    hops = (gradients.intra_format, gradients.inter_format)
    if gradients.error_feedback and gradients.inter_format == "none":
        raise ConfigError(
            f'"{where}.error_feedback" corrects the quantization between nodes; '
            'set "gradients.inter_format" (e.g. "int4") or remove error_feedback'
        )
    if gradients.inter_format in HALF_STEP_FORMATS:
        name = gradients.inter_format
        if not gradients.error_feedback:
            raise ConfigError(
                f'"{where}.inter_format": "{name}" drops much of a gradient, which has to be sent again: set '
                '"error_feedback" to true, or use "int4"'
            )
        if gradients.rounding != "nearest":
            raise ConfigError(
                f'"{where}.rounding": "{gradients.rounding}" does not go with "{name}", whose levels are half steps; '
                'set it to "nearest"'
            )
        if gradients.block_size % 8:
            raise ConfigError(
                f'"{where}.block_size": {gradients.block_size} must be a multiple of 8 with "{name}"; use '
                f"{-(-gradients.block_size // 8) * 8}"
            )
    if gradients.accumulate_in == "node" and hops == ("none", "none"):
        raise ConfigError(
            f'"{where}.accumulate_in": "node" goes with quantized gradients, which the plugin reduces; set '
            '"gradients.intra_format" and "gradients.inter_format" (e.g. "int8" and "int4"), or leave it to "auto"'
        )
    if gradients.store_format not in ("none", *FP8_FORMATS):
        raise ConfigError(
            f'"{where}.store_format": {gradients.store_format!r}: reduced gradients are kept as "none" (16 or 32 bits) '
            f"or in one of {', '.join(FP8_FORMATS)}"
        )
    if gradients.scales == "tensor":
        if hops[0] != hops[1] or hops[0] not in FP8_FORMATS:
            raise ConfigError(
                f'"{where}.scales": "tensor" (one scale that all ranks share) goes with one FP8 format on both hops, '
                f'got intra_format "{hops[0]}" and inter_format "{hops[1]}"; set both to "fp8_e4m3", or scales to '
                '"block"'
            )
        for name, plain in (
            ("hadamard", False),
            ("rounding", "nearest"),
            ("error_feedback", False),
            ("block_size", 128),
            ("skip_modules", []),
        ):
            if name in gradients.model_fields_set and getattr(gradients, name) != plain:
                raise ConfigError(
                    f'"{where}.{name}" does not go with "scales": "tensor", whose codes are added as they are; remove '
                    'it, or set scales to "block"'
                )
        if gradients.store_format not in ("none", hops[0]):
            raise ConfigError(
                f'"{where}.store_format": "{gradients.store_format}" differs from the format "{hops[0]}" in which '
                "gradients with shared scales are added; use that one or none"
            )
        return
    for name in ("scale_policy", "amax_history"):
        if (
            name in gradients.model_fields_set
            and getattr(gradients, name) != GradientsConfig.model_fields[name].default
        ):
            raise ConfigError(f'"{where}.{name}" belongs to shared scales; set "scales": "tensor" or remove it')
    if gradients.reduction != "two_hop":
        raise ConfigError(
            f'"{where}.reduction": "{gradients.reduction}" adds codes, which needs scales that all ranks share; set '
            '"scales": "tensor" or "reduction": "two_hop"'
        )
    if gradients.store_format == "none":
        return
    if set(hops) == {"none"}:
        raise ConfigError(
            f'"{where}.store_format": "{gradients.store_format}" needs gradients that the plugin reduces; set '
            '"intra_format" and "inter_format", for example to it, or store_format to "none"'
        )
    if gradients.block_size not in STATE_BLOCKS:
        raise ConfigError(
            f'"{where}.block_size": {gradients.block_size} must be one of {", ".join(map(str, STATE_BLOCKS))} where '
            "reduced gradients are stored in FP8; change it, or set store_format to none"
        )


def check_optimizer(optimizer: OptimizerConfig) -> None:
    """Rules inside the optimizer section.

    Raises:
        ConfigError: an unknown format, or choices that cannot work together.
    """
    where = f"{SECTION}.optimizer"
    for name in ("master_format", "exp_avg_format", "exp_avg_sq_format"):
        value = getattr(optimizer, name)
        if value not in STATE_FORMATS:
            raise ConfigError(
                f'"{where}.{name}": there is no format {value!r}{nearest(value, STATE_FORMATS)} for optimizer states; '
                f"formats are {', '.join(STATE_FORMATS)}"
            )
    if optimizer.block_size not in STATE_BLOCKS:
        raise ConfigError(
            f'"{where}.block_size": {optimizer.block_size} must be one of {", ".join(map(str, STATE_BLOCKS))}'
        )
    if optimizer.scales == "tensor" and optimizer.block_size != 128:
        raise ConfigError(f'"{where}.block_size" belongs to blocks with scales; set "scales": "block" or remove it')
    moments = (optimizer.exp_avg_format, optimizer.exp_avg_sq_format)
    if optimizer.expand_range and not set(moments) & set(FP8_FORMATS):
        raise ConfigError(
            f'"{where}.expand_range" works on FP8 moments, but exp_avg_format is "{moments[0]}" and exp_avg_sq_format '
            f'"{moments[1]}"; store a moment in fp8_e4m3, or remove expand_range'
        )
    stored = (optimizer.master_format, *moments)
    if set(stored) == {"fp32"}:
        for name, plain in (("rounding", "nearest"), ("expand_range", False), ("scales", "tensor")):
            if getattr(optimizer, name) != plain:
                raise ConfigError(f'"{where}.{name}" does nothing while all states are fp32; remove it')


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
