"""Every rule across fields, with its remedy.

Those inside the compute section are in compute.py, those inside the gradients and optimizer sections in states.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zeropp_fp8.config.compute import check_compute
from zeropp_fp8.config.ds_config import IN_TREE_KEYS
from zeropp_fp8.config.sections import (
    BETWEEN_NODES_FORMATS,
    DIFFERENCE_FORMATS,
    ELSEWHERE,
    FROZEN_FORMATS,
    HADAMARD_GROUP,
    MX_BLOCK_SIZE,
    MX_FORMATS,
    SECTION,
    WIRE_FORMATS,
    ConfigError,
    DifferenceConfig,
    FrozenConfig,
    PluginConfig,
    nearest,
)
from zeropp_fp8.config.states import check_gradients, check_optimizer


def check_in_tree_types(keys: Mapping[str, Any]) -> None:
    for key, value in keys.items():
        off = IN_TREE_KEYS[key]
        valid = isinstance(value, bool) if isinstance(off, bool) else type(value) is int and value >= 1
        if not valid:
            kind = "true or false" if isinstance(off, bool) else "a number of ranks, at least 1"
            raise ConfigError(f'"zero_optimization.{key}" must be {kind}, got {value!r}')


def check_in_tree_keys(config: PluginConfig, section: Mapping[str, Any], keys: Mapping[str, Any]) -> None:
    """The in-tree keys must not contradict the section."""
    weights, difference = config.weights.format, config.weights.difference.format
    chosen = {
        "zero_quantized_weights": ("weights.format", weights if difference == "none" else difference),
        "zero_quantized_gradients": ("gradients.inter_format", _gradient_summary(config)),
        "zero_quantized_nontrainable_weights": ("frozen.format", config.frozen.format),
        "zero_hpz_partition_size": ("secondary.scope", config.secondary.scope),
    }
    for key, value in keys.items():
        field, choice = chosen[key]
        agree = (value != IN_TREE_KEYS[key]) == (choice != "none")
        if agree and (key != "zero_hpz_partition_size" or choice in ("none", value)):
            continue
        raise ConfigError(
            f'"zero_optimization.{key}": {json.dumps(value)} contradicts "{SECTION}.{field}" = "{choice}"'
            f"{_origin(section)}; remove one of the two"
        )


def _gradient_summary(config: PluginConfig) -> str:
    return config.gradients.inter_format if config.gradients.inter_format != "none" else config.gradients.intra_format


def _origin(section: Mapping[str, Any]) -> str:
    return f' (from recipe "{section["recipe"]}")' if section.get("recipe") else ""


def _check_format(field: str, value: str, known: tuple[str, ...] = WIRE_FORMATS) -> None:
    if value in known:
        return
    if value in ELSEWHERE:
        raise ConfigError(
            f'"{SECTION}.{field}": "{value}" is not available there, {ELSEWHERE[value]}; use one of {", ".join(known)}'
        )
    raise ConfigError(
        f'"{SECTION}.{field}": there is no format {value!r}{nearest(value, known)}; formats are {", ".join(known)}'
    )


def check_fields(config: PluginConfig) -> None:
    """Rules inside the section."""
    _check_format("weights.format", config.weights.format)
    _check_format("gradients.intra_format", config.gradients.intra_format)
    _check_format("gradients.inter_format", config.gradients.inter_format, BETWEEN_NODES_FORMATS)
    _check_format("frozen.format", config.frozen.format, FROZEN_FORMATS)
    for name, section in (("weights", config.weights), ("gradients", config.gradients)):
        if section.hadamard and section.block_size % HADAMARD_GROUP:
            raise ConfigError(
                f'"{SECTION}.{name}.block_size": {section.block_size} must be a multiple of {HADAMARD_GROUP} '
                f'with "hadamard": true; use {-(-section.block_size // HADAMARD_GROUP) * HADAMARD_GROUP}'
            )
        if section.block_size % 2:
            raise ConfigError(f'"{SECTION}.{name}.block_size": must be even, got {section.block_size}')
    _check_usable(config.frozen)
    _check_mx_blocks(config)
    check_compute(config.compute)
    check_gradients(config.gradients)
    check_optimizer(config.optimizer)
    _check_secondary(config)
    _check_difference(config)
    _check_partition(config)
    _check_compile(config)
    _check_watch(config)


def _check_usable(frozen: FrozenConfig) -> None:
    if frozen.double_quantize and (frozen.format == "none" or frozen.format in MX_FORMATS):
        why = "there are no scales" if frozen.format == "none" else "their scales have 8 bits already"
        raise ConfigError(
            f'"{SECTION}.frozen.double_quantize": true does not go with "format": "{frozen.format}" ({why}); set it to '
            "false, or use int4, int8, nf4 or fp8_e4m3"
        )
    if isinstance(frozen.modules, list) and frozen.format == "none":
        raise ConfigError(
            f'"{SECTION}.frozen.modules" names what is stored, and "frozen.format" is "none": set a format such as '
            '"int4", or remove the names'
        )
    if frozen.scales == "tensor":
        _check_tensor_scales(frozen)
    if frozen.block_size % 2:
        raise ConfigError(f'"{SECTION}.frozen.block_size": must be even, got {frozen.block_size}')


def _check_tensor_scales(frozen: FrozenConfig) -> None:
    where = f'"{SECTION}.frozen.scales": "tensor"'
    if frozen.format != "fp8_e4m3":
        raise ConfigError(
            f'{where} does not go with "format": "{frozen.format}"; set it to "fp8_e4m3", or scales to "block"'
        )
    for name in ("block_size", "double_quantize"):
        if getattr(frozen, name) != FrozenConfig.model_fields[name].default:
            raise ConfigError(
                f'"{SECTION}.frozen.{name}" belongs to scales of blocks; remove it, or set "scales": "block"'
            )


def _check_secondary(config: PluginConfig) -> None:
    if config.secondary.scope == "none" and config.secondary.memory_gb != "all":
        limit = json.dumps(config.secondary.memory_gb)
        raise ConfigError(
            f'"{SECTION}.secondary.memory_gb": {limit} bounds a copy of the codes, and there is none: set '
            '"secondary.scope" to "node" or "rank", or remove it'
        )


def _check_difference(config: PluginConfig) -> None:
    """Differences are added to a copy that each node keeps, and that is finer than they are."""
    weights, difference = config.weights, config.weights.difference
    where = f"{SECTION}.weights.difference"
    if difference.format == "none":
        if difference != DifferenceConfig():
            raise ConfigError(
                f'"{where}.format" is "none", and other fields say how differences travel: set it, for example to '
                '"int4", or remove them'
            )
        return
    _check_format("weights.difference.format", difference.format, DIFFERENCE_FORMATS)
    multiple = HADAMARD_GROUP if difference.hadamard else 8
    if difference.block_size % multiple:
        raise ConfigError(
            f'"{where}.block_size": {difference.block_size} must be a multiple of {multiple}'
            f"{' with hadamard' if difference.hadamard else ''}; use {-(-difference.block_size // multiple) * multiple}"
        )
    if config.secondary.scope == "none":
        raise ConfigError(
            f'"{where}" adds to a copy of the weights in each node, and there is none: set "secondary.scope" to "node" '
            'or "rank", or remove it'
        )
    if weights.format not in ("none", "int8"):
        raise ConfigError(
            f'"{where}" does not go with "weights.format": "{weights.format}", in which what differences are added to '
            'would rest: set that to "none" (2 bytes a parameter and node) or "int8" (1.01), which layers that compute '
            "in FP8 or MX cast as it arrives"
        )
    if weights.format != "none" and weights.rounding == "stochastic":
        raise ConfigError(
            f'"{where}" does not go with "weights.rounding": "stochastic": each rank rounds what it has added to, and '
            'all must get the same; set it to "nearest"'
        )


def _check_compile(config: PluginConfig) -> None:
    """Inside a compiled block there is nothing to gather."""
    if config.compile == "blocks" and config.gather_granularity != "block":
        raise ConfigError(
            f'"{SECTION}.compile": "blocks" does not go with "gather_granularity": "{config.gather_granularity}": its '
            'hooks stand inside of blocks; use "block"'
        )


def _check_watch(config: PluginConfig) -> None:
    """A job that falls back has something to give up: what travels, gradients until the step, products."""
    gradients, weights = config.gradients, config.weights
    falls_back = (
        config.quantizes_gradients
        or gradients.store_format != "none"
        or weights.format != "none"
        or weights.difference.format != "none"
        or config.computes_in_low_precision
        or config.activations.wire_format != "none"
    )
    if config.numerics.watch == "fall_back" and not falls_back:
        resting = {"optimizer": config.stores_states_in_low_precision, "frozen": config.frozen.format != "none"}
        rests = [f'"{name}"' for name, is_set in resting.items() if is_set]
        why = "what rests, as " + " and ".join(rests) + ", stays rounded" if rests else "nothing is in low precision"
        raise ConfigError(
            f'"{SECTION}.numerics.watch": "fall_back" has nothing to fall back from: {why}; use "stop", or set formats '
            'that can be given up (of "weights", "gradients" or "compute")'
        )


def _check_partition(config: PluginConfig) -> None:
    """Tensors with owners are reduced to them by this project's own reduction."""
    if config.partition == "slice":
        if config.partition_split != "balance":
            raise ConfigError(f'"{SECTION}.partition_split" belongs to "partition": "whole_tensor"; remove it')
        return
    where = f'"{SECTION}.partition": "whole_tensor"'
    if not config.quantizes_gradients:
        raise ConfigError(
            f"{where} needs gradients that the plugin reduces (DeepSpeed reduces to equal slices); set "
            '"gradients.intra_format" and "gradients.inter_format", for example to "fp8_e4m3"'
        )
    if config.gradients.error_feedback:
        raise ConfigError(f'{where} does not go with "gradients.error_feedback"; remove one of the two')
    if config.gradients.reduction == "nccl":
        raise ConfigError(
            f'{where} does not go with "gradients.reduction": "nccl", which adds equal slices; use "two_hop"'
        )


def _check_mx_blocks(config: PluginConfig) -> None:
    """An MX block is 32 elements, unrotated."""
    used = (
        ("weights", config.weights.format, config.weights),
        ("gradients", config.gradients.intra_format, config.gradients),
        ("gradients", config.gradients.inter_format, config.gradients),
        ("frozen", config.frozen.format, config.frozen),
    )
    for name, wire_format, section in used:
        if wire_format not in MX_FORMATS:
            continue
        others = {config.gradients.intra_format, config.gradients.inter_format} - {"none", *MX_FORMATS}
        if name == "gradients" and others:
            continue  # block size and rotation are the other hop's
        if section.block_size != MX_BLOCK_SIZE:
            raise ConfigError(
                f'"{SECTION}.{name}.block_size": {section.block_size} does not go with {wire_format}, whose blocks are '
                f"{MX_BLOCK_SIZE} elements; remove it"
            )
        if getattr(section, "hadamard", False):
            raise ConfigError(
                f'"{SECTION}.{name}.hadamard": MX blocks are not rotated; set it to false, or use int4 or int8'
            )


def _get(ds_config: Mapping[str, Any], path: str) -> Any:
    value: Any = ds_config
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


# Keys of zero_optimization that DeepSpeed takes under another name too: what they are called here, and are set to.
_OTHER_NAMES = {
    "cpu_offload": ("offload_optimizer", {"device": "cpu"}),
    "cpu_offload_param": ("offload_param", {"device": "cpu"}),
    "stage3_use_all_reduce_for_fetch_params": ("use_all_reduce_for_fetch_params", True),
}


def _by_one_name(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    zero = ds_config.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return dict(ds_config)
    meant = dict(value for name, value in _OTHER_NAMES.items() if zero.get(name))
    return {**ds_config, "zero_optimization": {**zero, **meant}}


# What replaces parts of ZeRO-3 that the plugin replaces too.
_CONFLICTS = (
    "zero_optimization.zenflow",
    "zero_optimization.offload_optimizer.super_offload",
    "compile.deepcompile",
    "hybrid_engine.enabled",
    "zero_optimization.use_all_reduce_for_fetch_params",
    "zero_optimization.mics_shard_size",
)


def check_host(config: PluginConfig, ds_config: Mapping[str, Any], hybrid_engine: bool) -> None:
    """Rules across the section and the rest of the ds_config."""
    ds_config = _by_one_name(ds_config)
    stage = _get(ds_config, "zero_optimization.stage")
    if stage != 3:
        raise ConfigError(
            f'"zero_optimization.stage" is {json.dumps(stage)}; the plugin works with stage 3 only: set it to 3, '
            f'or remove "{SECTION}" and the ZeRO++ keys'
        )
    offloads = {
        key: _get(ds_config, f"zero_optimization.{key}.device") for key in ("offload_param", "offload_optimizer")
    }
    for key, device in offloads.items():
        if device == "nvme":
            raise ConfigError(f'"zero_optimization.{key}.device" is "nvme"; the plugin supports "cpu" and "none" there')
    for key in _CONFLICTS:
        value = _get(ds_config, key)
        asked = value not in (None, False)
        if key == "zero_optimization.mics_shard_size":
            asked = value not in (None, -1)
        if asked or (hybrid_engine and key == "hybrid_engine.enabled"):
            raise ConfigError(f'"{key}" replaces parts of ZeRO-3 that the plugin replaces too; remove one of the two')
    if _get(ds_config, "expert_parallel.enabled"):
        raise ConfigError(
            '"expert_parallel.enabled" (AutoEP) partitions experts over other ranks than the rest of the model, and '
            f'the plugin needs one group; set it to false, or remove "{SECTION}" and the ZeRO++ keys'
        )
    if config.computes_in_low_precision and not config.compute.allow_fp16 and _get(ds_config, "fp16.enabled"):
        raise ConfigError(
            f'"{SECTION}.compute.format" with "fp16.enabled": weights and gradients that FP8 scales hold may leave the '
            f'range of fp16; use "bf16", or set "{SECTION}.compute.allow_fp16" to true'
        )
    if config.stores_states_in_low_precision or config.gradients.store_format != "none":
        field = "optimizer" if config.stores_states_in_low_precision else "gradients.store_format"
        if offloads["offload_optimizer"] not in (None, "none"):
            raise ConfigError(
                f'"zero_optimization.offload_optimizer" keeps fp32 states on the CPU, where "{SECTION}.{field}" keeps '
                "them in low precision on the device; remove one of the two"
            )
    autotp_size = _get(ds_config, "tensor_parallel.autotp_size")
    if config.activations.wire_format == "fp8" and isinstance(autotp_size, int) and autotp_size > 1:
        raise ConfigError(
            f'"{SECTION}.activations.wire_format": "fp8" does not reach "tensor_parallel.autotp_size", whose layers '
            'all-reduce activations that every rank has whole: there is no sequence-parallel region; set it to "none", '
            "or use sequence parallelism (Ulysses) instead of autotp_size"
        )
    if config.partition == "whole_tensor":
        for key, device in offloads.items():
            if device not in (None, "none"):
                raise ConfigError(
                    f'"zero_optimization.{key}" does not go with "{SECTION}.partition": "whole_tensor"; remove one of '
                    "the two"
                )
    if config.quantizes_gradients:
        if _get(ds_config, "zero_optimization.reduce_scatter") is False:
            raise ConfigError(
                '"zero_optimization.reduce_scatter": false cannot go with quantized gradients, which are '
                f'reduce-scattered; remove the key or set it to true, or (Muon needs it) set "{SECTION}.gradients" to '
                '{"intra_format": "none", "inter_format": "none"}'
            )
        if _get(ds_config, "prescale_gradients") or (_get(ds_config, "gradient_predivide_factor") or 1.0) != 1.0:
            raise ConfigError(
                '"prescale_gradients"/"gradient_predivide_factor" cannot go with quantized gradients, whose mean '
                "is exact in fp32; remove them"
            )
