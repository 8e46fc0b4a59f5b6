"""The `zeropp_fp8` section of a DeepSpeed configuration: fields, recipes, and every rule across fields.

`resolve()` is the one way in. It looks at a ds_config and answers None (this job does not ask for the plugin) or a
`PluginConfig` that is complete and consistent. Everything that cannot be honoured raises ConfigError here, before any
collective, with the key and the remedy in the message.
"""

from __future__ import annotations

import base64
import copy
import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import hjson
from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

SECTION = "zeropp_fp8"


class ConfigError(ValueError):
    """A ds_config that the plugin cannot honour. The message names the key and the remedy."""


# The four ZeRO++ keys of DeepSpeed itself, and the value that means "off". They are honoured by this project and
# hidden from DeepSpeed, whose own implementation needs nvcc and is wrong for bf16 and fp32 gradients.
IN_TREE_KEYS = {
    "zero_quantized_weights": False,
    "zero_hpz_partition_size": 1,
    "zero_quantized_gradients": False,
    "zero_quantized_nontrainable_weights": False,
}

WIRE_FORMATS = ("none", "int8", "int4", "fp8_e4m3", "fp8_e5m2")
PLANNED_FORMATS = ("nf4", "fp16", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "mxint8")
HADAMARD_GROUP = 32

Rounding = Literal["nearest", "half_away", "stochastic"]
BlockSize = Annotated[int, Strict(), Field(ge=2, le=1 << 20)]
Flag = Annotated[bool, Strict()]
PositiveInt = Annotated[int, Strict(), Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TopologyConfig(_Section):
    """`ranks_per_node`: a number, or "detect" (LOCAL_WORLD_SIZE, else LOCAL_SIZE, else the launcher's variables)."""

    ranks_per_node: PositiveInt | Literal["detect"] = "detect"


class WeightsConfig(_Section):
    """qwZ: how weights travel when they are gathered."""

    format: str = "none"
    block_size: BlockSize = 256
    hadamard: Flag = False
    rounding: Rounding = "nearest"


class SecondaryConfig(_Section):
    """hpZ: `scope` none | node | rank | a number of ranks that divides ranks_per_node."""

    scope: Literal["none", "node", "rank"] | PositiveInt = "none"


class GradientsConfig(_Section):
    """qgZ: how gradients travel inside a node (`intra_format`) and between nodes (`inter_format`)."""

    intra_format: str = "none"
    inter_format: str = "none"
    block_size: BlockSize = 128
    hadamard: Flag = True
    rounding: Rounding = "nearest"
    error_feedback: Flag = False
    store_format: str = "none"
    scale_policy: Literal["auto", "pre", "post"] = "auto"


class ComputeConfig(_Section):
    format: str | dict[str, str] = "none"
    scaling: Literal["delayed", "current", "per_channel", "block", "mx"] = "delayed"
    amax_history: PositiveInt = 16
    skip_modules: list[str] = ["lm_head"]


class OptimizerConfig(_Section):
    master_format: str = "fp32"
    exp_avg_format: str = "fp32"
    exp_avg_sq_format: str = "fp32"
    scales: Literal["tensor", "block"] = "tensor"


class FrozenConfig(_Section):
    modules: Literal["all-linear"] | list[str] = "all-linear"
    format: str = "none"
    block_size: BlockSize = 64
    double_quantize: Flag = False
    skip_modules: list[str] = ["lm_head", "embed"]


class ActivationsConfig(_Section):
    wire_format: str = "none"


class ReportConfig(_Section):
    """`every`: steps between two lines with the bytes on the wire; 0 for none."""

    every: Annotated[int, Strict(), Field(ge=0)] = 100


class PluginConfig(_Section):
    """A complete, checked configuration. `resolve()` makes it; nothing else should."""

    enabled: Flag = True
    recipe: str | None = None
    seed: Annotated[int, Strict(), Field(ge=0)] = 0
    topology: TopologyConfig = TopologyConfig()
    weights: WeightsConfig = WeightsConfig()
    secondary: SecondaryConfig = SecondaryConfig()
    gradients: GradientsConfig = GradientsConfig()
    compute: ComputeConfig = ComputeConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    partition: Literal["slice", "whole_tensor"] = "slice"
    frozen: FrozenConfig = FrozenConfig()
    activations: ActivationsConfig = ActivationsConfig()
    gather_granularity: Literal["block", "module", "parameter"] = "block"
    report: ReportConfig = ReportConfig()

    @property
    def quantizes(self) -> bool:
        """Whether anything is quantized at all; if not, results are promised to be stock's, bit for bit."""
        return self.quantizes_gradients or self.weights.format != "none" or self.frozen.format != "none"

    @property
    def quantizes_gradients(self) -> bool:
        return self.gradients.intra_format != "none" or self.gradients.inter_format != "none"


# A recipe fills the whole section; a field set by hand overrides it.
RECIPES: dict[str, dict[str, Any]] = {
    "lossless": {},
    "zeropp": {
        "weights": {"format": "int8", "block_size": 256},
        "secondary": {"scope": "node"},
        "gradients": {"intra_format": "int8", "inter_format": "int4", "block_size": 128, "hadamard": True},
    },
    "zeropp-4bit": {
        "weights": {"format": "int4", "block_size": 128, "hadamard": True},
        "secondary": {"scope": "node"},
        "gradients": {"intra_format": "int8", "inter_format": "int4", "block_size": 128, "hadamard": True},
    },
}
PLANNED_RECIPES = ("fp8-lm-o1", "fp8-lm-o2", "fp8-lm", "mxfp8", "qlora")


def load_ds_config(ds_config: Any) -> dict[str, Any]:
    """A ds_config in any form DeepSpeed takes (a dict, a path, base64 of JSON), or as JSON text, as a new dict.

    Raises:
        ConfigError: a string that is neither.
    """
    if isinstance(ds_config, Mapping):
        return copy.deepcopy(dict(ds_config))
    if os.path.exists(ds_config):
        return hjson.loads(Path(ds_config).read_text(), object_pairs_hook=dict)  # DeepSpeed reads Hjson too
    if ds_config.lstrip().startswith("{"):
        return hjson.loads(ds_config, object_pairs_hook=dict)
    try:
        return hjson.loads(base64.urlsafe_b64decode(ds_config).decode(), object_pairs_hook=dict)
    except (ValueError, hjson.HjsonDecodeError):
        raise ConfigError(f"the ds_config {ds_config!r} is neither a file nor base64 of JSON") from None


def in_tree_keys(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """The ZeRO++ keys that this ds_config sets, whatever their values."""
    zero = ds_config.get("zero_optimization")
    return {key: zero[key] for key in IN_TREE_KEYS if key in zero} if isinstance(zero, Mapping) else {}


def without_in_tree_keys(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the ds_config that DeepSpeed may see."""
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
    return section is not None or asked


def resolve(ds_config: Mapping[str, Any], *, hybrid_engine: bool = False) -> PluginConfig | None:
    """The plugin's configuration out of a ds_config, or None where it does not ask for the plugin.

    Raises:
        ConfigError: wrong type, unknown key, or a combination that cannot be honoured.
    """
    if not asks_for_plugin(ds_config):
        return None
    section = ds_config.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise ConfigError(f'"{SECTION}" must be an object such as {{"recipe": "zeropp"}}, got {section!r}')
    keys = in_tree_keys(ds_config)
    _check_in_tree_types(keys)
    config = _parse(_merge(section, keys))
    _check_in_tree_keys(config, section, keys)
    _check_fields(config)
    _check_host(config, ds_config, hybrid_engine)
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
            base["frozen"] = {"format": "int8", "block_size": 256}
        if hpz_size != 1:
            base["secondary"] = {"scope": hpz_size}
    elif not isinstance(recipe, str):
        raise ConfigError(f'"{SECTION}.recipe" must be a name, one of {", ".join(sorted(RECIPES))}; got {recipe!r}')
    elif recipe in RECIPES:
        base = copy.deepcopy(RECIPES[recipe])
        if hpz_size != 1 and base.get("secondary", {}).get("scope") == "node":
            base["secondary"]["scope"] = hpz_size  # the key says how many ranks of the node share a copy
    elif recipe in PLANNED_RECIPES:
        raise ConfigError(
            f'"{SECTION}.recipe": "{recipe}" is not in this version; use one of {", ".join(sorted(RECIPES))}'
        )
    else:
        raise ConfigError(
            f'"{SECTION}.recipe": there is no recipe {recipe!r}{_nearest(str(recipe), RECIPES)}; '
            f"recipes are {', '.join(sorted(RECIPES))}"
        )
    for key, value in section.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            base[key] = {**base[key], **value}
        else:
            base[key] = copy.deepcopy(value)
    return base


def _nearest(word: str, known) -> str:
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f' (did you mean "{match[0]}"?)' if match else ""


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
                hint = _nearest(str(problem["loc"][-1]), names)
                lines.append(f'"{where}": unknown key{hint}; keys here are {", ".join(names)}')
            else:
                lines.append(f'"{where}": {problem["msg"]}, got {problem["input"]!r}')
        raise ConfigError("; ".join(dict.fromkeys(lines))) from None


def _check_in_tree_types(keys: Mapping[str, Any]) -> None:
    for key, value in keys.items():
        off = IN_TREE_KEYS[key]
        valid = isinstance(value, bool) if isinstance(off, bool) else type(value) is int and value >= 1
        if not valid:
            kind = "true or false" if isinstance(off, bool) else "a number of ranks, at least 1"
            raise ConfigError(f'"zero_optimization.{key}" must be {kind}, got {value!r}')


def _check_in_tree_keys(config: PluginConfig, section: Mapping[str, Any], keys: Mapping[str, Any]) -> None:
    """The in-tree keys must not contradict the section."""
    chosen = {
        "zero_quantized_weights": ("weights.format", config.weights.format),
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


def _check_format(field: str, value: str) -> None:
    if value in WIRE_FORMATS:
        return
    if value in PLANNED_FORMATS:
        raise ConfigError(
            f'"{SECTION}.{field}": "{value}" is not available there in this version; '
            f"use one of {', '.join(WIRE_FORMATS)}"
        )
    raise ConfigError(
        f'"{SECTION}.{field}": there is no format {value!r}{_nearest(value, WIRE_FORMATS)}; '
        f"formats are {', '.join(WIRE_FORMATS)}"
    )


def _check_fields(config: PluginConfig) -> None:
    """Rules inside the section."""
    _check_format("weights.format", config.weights.format)
    _check_format("gradients.intra_format", config.gradients.intra_format)
    _check_format("gradients.inter_format", config.gradients.inter_format)
    _check_format("frozen.format", config.frozen.format)
    for name, section in (("weights", config.weights), ("gradients", config.gradients)):
        if section.hadamard and section.block_size % HADAMARD_GROUP:
            raise ConfigError(
                f'"{SECTION}.{name}.block_size": {section.block_size} must be a multiple of {HADAMARD_GROUP} '
                f'with "hadamard": true; use {-(-section.block_size // HADAMARD_GROUP) * HADAMARD_GROUP}'
            )
        if section.block_size % 2:
            raise ConfigError(f'"{SECTION}.{name}.block_size": must be even, got {section.block_size}')
    if config.frozen.format not in ("none", "int8"):
        raise ConfigError(
            f'"{SECTION}.frozen.format": "{config.frozen.format}" is not in this version; use "none" or "int8"'
        )
    if config.gradients.error_feedback and config.gradients.inter_format == "none":
        raise ConfigError(
            f'"{SECTION}.gradients.error_feedback" corrects the quantization between nodes; '
            f'set "gradients.inter_format" (e.g. "int4") or remove error_feedback'
        )
    not_yet = {
        "gradients.store_format": (config.gradients.store_format, "none"),
        "gradients.scale_policy": (config.gradients.scale_policy, "auto"),
        "compute.format": (config.compute.format, "none"),
        "optimizer.master_format": (config.optimizer.master_format, "fp32"),
        "optimizer.exp_avg_format": (config.optimizer.exp_avg_format, "fp32"),
        "optimizer.exp_avg_sq_format": (config.optimizer.exp_avg_sq_format, "fp32"),
        "partition": (config.partition, "slice"),
        "frozen.double_quantize": (config.frozen.double_quantize, False),
        "activations.wire_format": (config.activations.wire_format, "none"),
    }
    for field, (value, available) in not_yet.items():
        if value != available:
            raise ConfigError(
                f'"{SECTION}.{field}": {value!r} is not in this version; the only value is {json.dumps(available)}'
            )


def _get(ds_config: Mapping[str, Any], *path: str) -> Any:
    value: Any = ds_config
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _check_host(config: PluginConfig, ds_config: Mapping[str, Any], hybrid_engine: bool) -> None:
    """Rules across the section and the rest of the ds_config."""
    stage = _get(ds_config, "zero_optimization", "stage")
    if stage != 3:
        raise ConfigError(
            f'"zero_optimization.stage" is {json.dumps(stage)}; the plugin works with stage 3 only: set it to 3, '
            f'or remove "{SECTION}" and the ZeRO++ keys'
        )
    nvme = '"nvme"; the plugin supports "cpu" and "none" there'
    refused = {
        "zero_optimization.offload_param.device": (
            _get(ds_config, "zero_optimization", "offload_param", "device"),
            nvme,
        ),
        "zero_optimization.offload_optimizer.device": (
            _get(ds_config, "zero_optimization", "offload_optimizer", "device"),
            nvme,
        ),
    }
    for key, (value, remedy) in refused.items():
        if value == "nvme":
            raise ConfigError(f'"{key}" is {remedy}')
    conflicts = {
        "zero_optimization.zenflow": _get(ds_config, "zero_optimization", "zenflow"),
        "zero_optimization.offload_optimizer.super_offload": _get(
            ds_config, "zero_optimization", "offload_optimizer", "super_offload"
        ),
        "compile.deepcompile": _get(ds_config, "compile", "deepcompile"),
        "hybrid_engine.enabled": hybrid_engine or _get(ds_config, "hybrid_engine", "enabled"),
        "zero_optimization.use_all_reduce_for_fetch_params": _get(
            ds_config, "zero_optimization", "use_all_reduce_for_fetch_params"
        ),
        "zero_optimization.mics_shard_size": _get(ds_config, "zero_optimization", "mics_shard_size") not in (None, -1),
    }
    for key, value in conflicts.items():
        if value not in (None, False):
            raise ConfigError(f'"{key}" replaces parts of ZeRO-3 that the plugin replaces too; remove one of the two')
    if config.quantizes_gradients:
        if _get(ds_config, "zero_optimization", "reduce_scatter") is False:
            raise ConfigError(
                '"zero_optimization.reduce_scatter": false cannot go with quantized gradients, which are '
                "reduce-scattered; remove the key or set it to true"
            )
        if _get(ds_config, "prescale_gradients") or (_get(ds_config, "gradient_predivide_factor") or 1.0) != 1.0:
            raise ConfigError(
                '"prescale_gradients"/"gradient_predivide_factor" cannot go with quantized gradients, whose mean '
                "is exact in fp32; remove them"
            )


def check_topology(config: PluginConfig, world_size: int, ranks_per_node: int) -> None:
    """Rules that need to know the ranks.

    Raises:
        ConfigError: the ranks cannot be cut into equal nodes, or the secondary scope does not divide a node.
    """
    if world_size % ranks_per_node:
        raise ConfigError(
            f'"{SECTION}.topology.ranks_per_node": the data-parallel world of {world_size} ranks is not a multiple of '
            f"{ranks_per_node} ranks a node; set ranks_per_node to a divisor of {world_size}"
        )
    scope = config.secondary.scope
    if isinstance(scope, int) and ranks_per_node % scope:
        raise ConfigError(
            f'"zero_optimization.zero_hpz_partition_size" / "{SECTION}.secondary.scope": {scope} does not divide the '
            f'{ranks_per_node} ranks of a node; use a divisor of {ranks_per_node}, or "node"'
        )


def secondary_ranks(config: PluginConfig, ranks_per_node: int) -> int | None:
    """How many ranks share one secondary copy; None without one."""
    scope = config.secondary.scope
    return {"none": None, "node": ranks_per_node, "rank": 1}.get(scope, scope)


_LAUNCHER_VARIABLES = (
    "LOCAL_WORLD_SIZE",  # torchrun, accelerate
    "LOCAL_SIZE",  # deepspeed
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)


def find_ranks_per_node(config: PluginConfig, world_size: int, env: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """(ranks per node, where the number comes from).

    Raises:
        ConfigError: nothing says it and the world has more than one rank, or the number is out of range.
    """
    configured = config.topology.ranks_per_node
    if configured != "detect":
        source, value = f"{SECTION}.topology.ranks_per_node", configured
    else:
        found = [
            (name, env[name]) for name in _LAUNCHER_VARIABLES if env.get(name, "").isdigit() and int(env[name]) > 0
        ]
        if found:
            source, value = found[0][0], int(found[0][1])
        elif world_size == 1:
            source, value = "one rank", 1
        else:
            raise ConfigError(
                f'"{SECTION}.topology.ranks_per_node" is "detect", but none of {", ".join(_LAUNCHER_VARIABLES)} is '
                "set; give the number of ranks on each node"
            )
    if value > world_size:
        if configured == "detect":
            return world_size, f"{source} (more than the {world_size} ranks there are)"
        raise ConfigError(
            f'"{SECTION}.topology.ranks_per_node": {value} is more than the data-parallel world of {world_size} ranks'
        )
    return value, source
