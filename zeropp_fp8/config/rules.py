"""Rules across fields, and with the rest of the ds_config, as tables: {line: condition that breaks the rule}.

A rule reads the configuration as `c`, and the ds_config's keys by `c.ds("a.b")`. The result of the condition replaces
{it} in the line, the section's name replaces {S}. A rule that reads a refused field yields nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial, reduce
from math import gcd
from typing import Any

from pydantic import BaseModel

from zeropp_fp8.config.compute import completed_compute, operand_formats, patterns_of_gemms
from zeropp_fp8.config.ds_config import IN_TREE_KEYS
from zeropp_fp8.config.sections import (
    DOUBLE_QUANTIZED_NAMES,
    FIXED_BLOCKS,
    FP8_FORMATS,
    GEMMS,
    HADAMARD_GROUP,
    MX_FORMATS,
    SECTION,
    STATE_BLOCKS,
    ComputeConfig,
    PluginConfig,
    bits_of,
    formats_of,
)
from zeropp_fp8.config.words import ConfigError, Keys, at, parse, shown

Rules = dict[str, Callable[[Any], Any]]  # {line: condition that breaks the rule}


class _Refused(Exception):
    """A rule reads a refused field."""


class _Known:
    """A configuration, or a part of it, without the fields in `refused`."""

    def __init__(self, model: BaseModel, refused: Collection[Keys], path: Keys = (), ds_config: Any = None) -> None:
        self._model, self._refused, self._path, self._ds_config = model, refused, path, ds_config

    def __getattr__(self, name: str) -> Any:
        model, path = self._model, (*self._path, name)
        if path in self._refused:
            raise _Refused
        derived = getattr(type(model), name, None)
        if isinstance(derived, property):
            return derived.fget(self)
        value = getattr(model, name)
        return _Known(value, self._refused, path) if isinstance(value, BaseModel) else value

    def default(self, name: str) -> Any:
        return type(self._model).model_fields[name].default

    def is_changed(self, name: str) -> bool:
        return getattr(self, name) != self.default(name)

    def ds(self, path: str) -> Any:
        return at(self._ds_config, tuple(path.split(".")))


def broken(
    rules: Rules,
    config: PluginConfig,
    ds_config: Mapping[str, Any] | None = None,
    refused: Collection[Keys] = (),
) -> Iterator[str]:
    """Yield the lines of the rules that a configuration breaks."""
    known = _Known(config, refused, ds_config=_by_one_name(ds_config or {}))
    for line, when in rules.items():
        try:
            it = when(known)
        except _Refused:
            continue
        if it not in (None, False):
            yield line.format(c=config, it=it, S=SECTION)


def checked_compute(compute: ComputeConfig | Mapping[str, Any]) -> ComputeConfig:
    """Return a complete compute section, made from a section or from its fields.

    Raises:
        ConfigError: the fields are wrong, or formats and scaling cannot work together.
    """
    refused, lines = set(), []
    if not isinstance(compute, ComputeConfig):
        compute, refused, lines = parse(ComputeConfig, compute, f"{SECTION}.compute")
    compute = completed_compute(compute)
    lines += broken(COMPUTE, PluginConfig(compute=compute), refused={("compute", *path) for path in refused})
    if lines:
        raise ConfigError(*lines)
    return compute


def _first(found: Iterable[Any]) -> Any:
    return next(iter(found), None)


def _set_otherwise(part: Any, name: str, plain: Any) -> bool:
    """Whether a field is set by hand, to another value than this."""
    return name in part.model_fields_set and getattr(part, name) != plain


# -- compute ----------------------------------------------------------------------------------------------------------


def _operands(c: Any) -> dict[str, str]:
    """Return the format of each operand, as far as the section gives one."""
    return {} if c.compute.format == "none" else operand_formats(c.compute)


def _one_of(c: Any, formats: tuple[str, ...]) -> str | None:
    return _first(f"{role} are {name}" for role, name in _operands(c).items() if name in formats)


def _fp8(c: Any, operand: str) -> str | None:
    """Return the format of an operand of FP8 GEMMs."""
    return None if c.compute.scaling == "mx" or _one_of(c, MX_FORMATS) else _operands(c).get(operand)


COMPUTE: Rules = {
    '"{S}.compute.high_precision_gemms" leaves no GEMM of any layer in low precision; set "{S}.compute.format" to '
    '"none", or name fewer': lambda c: (
        (_operands(c) and all("*" in patterns_of_gemms(c.compute).get(gemm, ()) for gemm in GEMMS)) or None
    ),
    '"{S}.compute.scaling": "mx" goes with MX formats, but {it}; use an MX format such as "mxfp8_e4m3", or scaling '
    '"delayed", "current", "per_channel" or "block"': lambda c: c.compute.scaling == "mx" and _one_of(c, FP8_FORMATS),
    '"{S}.compute.scaling": "{c.compute.scaling}" goes with FP8, but {it}; use "scaling": '
    '"mx", or "format": "fp8"': lambda c: c.compute.scaling != "mx" and _one_of(c, MX_FORMATS),
    '"{S}.compute.format.gradients": "none" (a backward pass in high precision) goes with MX formats only; '
    "use fp8_e4m3 or fp8_e5m2": lambda c: _fp8(c, "gradients") == "none",
    '"{S}.compute.format": gradients in E5M2 do not go with scaling "block", whose GEMM '
    'takes E4M3 only; use "fp8"': lambda c: c.compute.scaling == "block" and _fp8(c, "gradients") == "fp8_e5m2",
}


# -- blocks -----------------------------------------------------------------------------------------------------------


def _of_blocks(part: str) -> Rules:
    """Make the rules for the blocks of a part."""

    def fixed(c: Any) -> str | None:
        """Return a format if the specifications of all fix their blocks."""
        formats = formats_of(getattr(c, part))
        return min(formats, default=None) if formats <= FIXED_BLOCKS.keys() else None

    def no_multiple(c: Any) -> tuple[str, int, int] | None:
        """Return what needs a multiple (a format, for its codes to fill whole bytes), of what, and the next one."""
        size, formats = getattr(c, part).block_size, formats_of(getattr(c, part)) - FIXED_BLOCKS.keys()
        needed = {'"hadamard": true': HADAMARD_GROUP} if rotates(c) else {}
        needed |= {f'"{name}"': 8 // gcd(8, bits_of(name)) for name in sorted(formats)}
        return _first((what, of, -(-size // of) * of) for what, of in needed.items() if size % of)

    key, rotates = f'"{{S}}.{part}', lambda c: getattr(getattr(c, part), "hadamard", False)
    return {
        f'{key}.block_size": {{c.{part}.block_size}} must be a multiple of {{it[1]}} with {{it[0]}}; '
        "use {it[2]}": no_multiple,
        f'{key}.hadamard": blocks of MX are not rotated; set it to false, or use int4 or int8': lambda c: (
            fixed(c) and rotates(c)
        ),
        f'{key}.block_size": {{c.{part}.block_size}} does not go with {{it}}, whose blocks have a size of '
        "their own; remove it": lambda c: (
            name if (name := fixed(c)) and getattr(c, part).block_size != FIXED_BLOCKS[name] else None
        ),
    }


BLOCKS = _of_blocks("weights") | _of_blocks("gradients") | _of_blocks("frozen")


# -- gradients --------------------------------------------------------------------------------------------------------


def _shares_scales(c: Any) -> bool:
    return c.gradients.scales == "tensor"


_WITH_SHARED_SCALES = {"hadamard": False, "error_feedback": False, "block_size": 128, "skip_modules": []}
_BLOCK_SIZES = ", ".join(map(str, STATE_BLOCKS))
GRADIENTS: Rules = {
    '"{S}.gradients.error_feedback" corrects the quantization between nodes; set "gradients.inter_format" (e.g. '
    '"int4"), or error_feedback to false': lambda c: c.gradients.error_feedback and c.gradients.inter_format == "none",
    '"{S}.gradients.accumulate_in": "node" goes with quantized gradients, which the plugin reduces; set '
    '"gradients.intra_format" and "gradients.inter_format" (e.g. "int8" and "int4"), or leave it to "auto"': lambda c: (
        c.gradients.accumulate_in == "node" and not c.reduces_gradients
    ),
    '"{S}.gradients.scales": "tensor" (one scale that all ranks share) goes with one FP8 format on both hops, got '
    'intra_format "{c.gradients.intra_format}" and inter_format "{c.gradients.inter_format}"; set both to '
    '"fp8_e4m3", or scales to "block"': lambda c: (
        _shares_scales(c)
        and (c.gradients.intra_format not in FP8_FORMATS or c.gradients.inter_format != c.gradients.intra_format)
    ),
    **{
        f'"{{S}}.gradients.{name}" does not go with "scales": "tensor", whose codes are added as they are; remove it, '
        'or set scales to "block"': lambda c, name=name, plain=plain: (
            _shares_scales(c) and _set_otherwise(c.gradients, name, plain)
        )
        for name, plain in _WITH_SHARED_SCALES.items()
    },
    '"{S}.gradients.store_format": "{c.gradients.store_format}" differs from the format '
    '"{c.gradients.intra_format}" in which gradients with shared scales are added; use that one or none': lambda c: (
        _shares_scales(c) and c.gradients.store_format not in ("none", c.gradients.intra_format)
    ),
    '"{S}.gradients.store_format": "{c.gradients.store_format}" needs gradients that the plugin reduces; set '
    '"intra_format" and "inter_format", for example to it, or store_format to "none"': lambda c: (
        not _shares_scales(c) and c.gradients.store_format != "none" and not c.reduces_gradients
    ),
    (
        '"{S}.gradients.block_size": {c.gradients.block_size} must be one of ' + _BLOCK_SIZES + " where reduced "
        "gradients are stored in FP8; change it, or set store_format to none"
    ): lambda c: (
        not _shares_scales(c) and c.gradients.store_format != "none" and c.gradients.block_size not in STATE_BLOCKS
    ),
}


# -- the other parts --------------------------------------------------------------------------------------------------


def _why_nothing_falls_back(c: Any) -> str:
    parts = {"optimizer": c.stores_states_in_low_precision, "frozen": c.frozen.format != "none"}
    names = " and ".join(f'"{name}"' for name, is_set in parts.items() if is_set)
    return f"what is stored by {names} stays rounded" if names else "nothing is in low precision"


# {field: (what it belongs to, whether that is there)}
_BELONGING: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "optimizer.scales": ("states in low precision", lambda c: c.stores_states_in_low_precision),
    **dict.fromkeys(
        ("frozen.block_size", "frozen.double_quantize"),
        ('scales of blocks ("frozen.scales": "block")', lambda c: c.frozen.scales == "block"),
    ),
    "frozen.modules": (
        'a "frozen.format" such as "int4"',
        lambda c: c.frozen.format != "none" or not isinstance(c.frozen.modules, list),
    ),
    "secondary.memory_gb": ('"secondary.scope": "node" or "rank"', lambda c: c.secondary.scope != "none"),
    "partition_split": ('"partition": "whole_tensor"', lambda c: c.partition == "whole_tensor"),
}


def _is_idle(c: Any, name: str) -> str | None:
    """The default of a field that is set and belongs to nothing."""
    *parents, last = name.split(".")
    part = reduce(getattr, parents, c)
    return shown(part.default(last)) if part.is_changed(last) and not _BELONGING[name][1](c) else None


PARTS: Rules = {
    **{
        f'"{{S}}.{name}" belongs to {what}, and there is none; set that, or this to {{it}}': partial(
            _is_idle, name=name
        )
        for name, (what, _) in _BELONGING.items()
    },
    '"{S}.frozen.double_quantize": true does not go with "format": "{it}" (there are no scales, or they have 8 '
    f"bits already); set it to false, or use one of {', '.join(DOUBLE_QUANTIZED_NAMES)}": lambda c: (
        c.frozen.double_quantize and _first({c.frozen.format} - {*DOUBLE_QUANTIZED_NAMES})
    ),
    '"{S}.frozen.scales": "tensor" does not go with "format": "{c.frozen.format}"; set it to "fp8_e4m3", or scales '
    'to "block"': lambda c: c.frozen.scales == "tensor" and c.frozen.format != "fp8_e4m3",
    '"{S}.partition": "whole_tensor" does not go with "gradients.error_feedback"; set that to false': lambda c: (
        c.partition == "whole_tensor" and c.gradients.error_feedback
    ),
    '"{S}.compile": "blocks" does not go with "gather_granularity": "{c.gather_granularity}": its hooks stand '
    'inside of blocks; use "block"': lambda c: c.compile == "blocks" and c.gather_granularity != "block",
    '"{S}.experts.gather": "used" does not go with {it}; set it to "all", or remove one of the two': lambda c: (
        c.experts.gather == "used"
        and _first(
            text
            for text, is_set in (
                ('"partition": "whole_tensor", whose owners send whole tensors', c.partition == "whole_tensor"),
                ('"compile": "blocks", whose graphs have no place for a gather', c.compile == "blocks"),
            )
            if is_set
        )
    ),
    '"{S}.numerics.watch": "fall_back" has nothing to fall back from: {it}; use "stop", or set formats that can be '
    'given up (of "weights", "gradients" or "compute")': lambda c: (
        c.numerics.watch == "fall_back" and not c.can_fall_back and _why_nothing_falls_back(c)
    ),
}
FIELDS = BLOCKS | COMPUTE | GRADIENTS | PARTS


# -- the rest of the ds_config ----------------------------------------------------------------------------------------

# Keys of zero_optimization with a second name in DeepSpeed: the name here, and the value.
_OTHER_NAMES = {
    "cpu_offload": ("offload_optimizer", {"device": "cpu"}),
    "cpu_offload_param": ("offload_param", {"device": "cpu"}),
    "stage3_use_all_reduce_for_fetch_params": ("use_all_reduce_for_fetch_params", True),
}
_OFFLOADS = ("offload_param", "offload_optimizer")
_HALF_PRECISION = ("bf16", "bfloat16", "fp16")  # the second is DeepSpeed's old name of the first
# Features that replace parts of ZeRO-3 which the plugin replaces too, and the values that mean "off".
_CONFLICTS = {
    "zero_optimization.zenflow": (None, False),
    "zero_optimization.offload_optimizer.super_offload": (None, False),
    "compile.deepcompile": (None, False),
    "hybrid_engine.enabled": (None, False),
    "zero_optimization.use_all_reduce_for_fetch_params": (None, False),
    "zero_optimization.mics_shard_size": (None, -1),
}


def _by_one_name(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    zero = ds_config.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return dict(ds_config)
    meant = dict(value for name, value in _OTHER_NAMES.items() if zero.get(name))
    return {**ds_config, "zero_optimization": {**zero, **meant}}


def _offloads(c: Any, key: str) -> bool:
    return c.ds(f"zero_optimization.{key}.device") == "cpu"


def _autotp(c: Any) -> bool:
    size = c.ds("tensor_parallel.autotp_size")
    return isinstance(size, int) and size > 1


# What "auto" does not choose.
DIFFERENCES: Rules = {
    '"{S}.weights.difference" adds to a copy of the weights in each node, and there is none: set "secondary.scope" '
    'to "node" or "rank", or this to "none"': lambda c: c.weights.difference == "exact" and c.secondary.scope == "none",
    '"{S}.weights.difference": "exact" is of numbers of 16 bits and of codes of 8, and does not go with '
    '"weights.format": "{it}"; set that to "none", "int8" or "fp8_e4m3", or this to "none"': lambda c: (
        c.weights.difference == "exact" and _first({c.weights.format} - {"none", "int8", "fp8_e4m3"})
    ),
    '"{S}.weights.difference" with "weights.format": "fp8_e4m3" and FP8 layers, whose codes are sent without scales, '
    'is of whole tensors; set "partition": "whole_tensor", or this to "none"': lambda c: (
        c.weights.difference == "exact"
        and c.weights.format == "fp8_e4m3"
        and c.computes_in_low_precision
        and c.partition != "whole_tensor"
    ),
    '"{S}.weights.difference": "exact" is of weights in 16 bits, and these are in fp32; set "bf16.enabled" or '
    '"fp16.enabled" to true, "weights.format" to "int8", or this to "none"': lambda c: (
        c.weights.difference == "exact"
        and c.weights.format == "none"
        and not any(c.ds(f"{name}.enabled") for name in _HALF_PRECISION)
    ),
}


def _unknown_to_experts(c: Any) -> Iterator[str]:
    """Yield what cannot be had of experts that are dealt out to ranks (AutoEP)."""
    chosen = {
        "frozen.format": c.frozen.format != "none",
        "compute.format": c.computes_in_low_precision,
        "optimizer": c.stores_states_in_low_precision,
        "gradients.scales": c.gradients.scales == "tensor",
        "partition": c.partition == "whole_tensor",
        "experts.gather": c.experts.gather == "used",
        "compile": c.compile != "none",
    }
    yield from (f'"{SECTION}.{key}"' for key, is_set in chosen.items() if is_set)
    if _autotp(c):
        yield '"tensor_parallel.autotp_size"'
    if c.activations.wire_format == "fp8" and c.ds("expert_parallel.comm_backend") not in (None, "comm"):
        yield f'"{SECTION}.activations.wire_format" with that "comm_backend"'


HOST: Rules = {
    **DIFFERENCES,
    '"zero_optimization.stage" is {it}; the plugin works with stage 3 only: set it to 3, or remove "{S}" and the '
    "ZeRO++ keys": lambda c: None if c.ds("zero_optimization.stage") == 3 else shown(c.ds("zero_optimization.stage")),
    **{
        f'"zero_optimization.{key}.device" is "nvme"; the plugin supports "cpu" and "none" there': lambda c, key=key: (
            c.ds(f"zero_optimization.{key}.device") == "nvme"
        )
        for key in _OFFLOADS
    },
    **{
        f'"{key}" replaces parts of ZeRO-3 that the plugin replaces too; remove one of the '
        f"two": lambda c, key=key, off=off: c.ds(key) not in off
        for key, off in _CONFLICTS.items()
    },
    '"expert_parallel.enabled" (AutoEP) deals experts out, which {it} does not know; remove one of the two': lambda c: (
        _first(_unknown_to_experts(c)) if c.ds("expert_parallel.enabled") else None
    ),
    '"{S}.compute.format" with "fp16.enabled": weights and gradients that FP8 scales hold may leave the range of '
    'fp16; use "bf16", or set "{S}.compute.allow_fp16" to true': lambda c: (
        c.computes_in_low_precision and not c.compute.allow_fp16 and bool(c.ds("fp16.enabled"))
    ),
    **{
        f'"zero_optimization.offload_optimizer" keeps fp32 states on the CPU, where "{{S}}.{field}" keeps them in '
        "low precision on the device; remove one of the two": lambda c, stored=stored: (
            stored(c) and _offloads(c, "offload_optimizer")
        )
        for field, stored in (
            ("optimizer", lambda c: c.stores_states_in_low_precision),
            ("gradients.store_format", lambda c: c.gradients.store_format != "none"),
        )
    },
    '"{S}.activations.wire_format": "fp8" does not reach "tensor_parallel.autotp_size", whose layers all-reduce '
    'activations that every rank has whole: there is no sequence-parallel region; set it to "none", or use '
    "sequence parallelism (Ulysses) instead of autotp_size": lambda c: (
        c.activations.wire_format == "fp8" and _autotp(c)
    ),
    **{
        f'"zero_optimization.{key}" does not go with "{{S}}.partition": "whole_tensor"; remove '
        f"one of the two": lambda c, key=key: c.partition == "whole_tensor" and _offloads(c, key)
        for key in _OFFLOADS
    },
    '"zero_optimization.reduce_scatter": false cannot go with quantized gradients, which are reduce-scattered, nor '
    'with owners of whole tensors; remove the key or set it to true (Muon: with "{S}.partition": "whole_tensor"), or '
    'set "{S}.gradients" to {{"intra_format": "none", "inter_format": "none"}}, and "{S}.partition" to '
    '"slice"': lambda c: c.reduces_gradients and c.ds("zero_optimization.reduce_scatter") is False,
    '"prescale_gradients"/"gradient_predivide_factor" cannot go with quantized gradients, whose mean is exact in '
    "fp32; remove them": lambda c: (
        c.reduces_gradients and (bool(c.ds("prescale_gradients")) or (c.ds("gradient_predivide_factor") or 1.0) != 1.0)
    ),
}


# -- DeepSpeed's own ZeRO++ keys --------------------------------------------------------------------------------------


def in_tree_rules(section: Mapping[str, Any], keys: Mapping[str, Any]) -> Rules:
    """Make the rules for keys that contradict the section."""
    chosen: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "zero_quantized_weights": ("weights.format", lambda c: c.weights.format),
        "zero_quantized_gradients": (
            "gradients.inter_format",
            lambda c: c.gradients.inter_format if c.gradients.inter_format != "none" else c.gradients.intra_format,
        ),
        "zero_quantized_nontrainable_weights": ("frozen.format", lambda c: c.frozen.format),
        "zero_hpz_partition_size": ("secondary.scope", lambda c: c.secondary.scope),
    }
    origin = f' (from recipe "{section["recipe"]}")' if section.get("recipe") else ""

    def contradicts(c: Any, key: str, value: Any) -> Any:
        asked = chosen[key][1](c)
        agree = (value != IN_TREE_KEYS[key]) == (asked != "none")
        return None if agree and (key != "zero_hpz_partition_size" or asked in ("none", value)) else asked

    return {
        f'"zero_optimization.{key}": {json.dumps(value)} contradicts "{SECTION}.{chosen[key][0]}" = "{{it}}"{origin}; '
        "remove one of the two": partial(contradicts, key=key, value=value)
        for key, value in keys.items()
    }
