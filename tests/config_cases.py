"""Common parts of the tests of the `zeropp_fp8` section: ds_configs, their resolved forms, and every default."""

from __future__ import annotations

import pytest

from zeropp_fp8.config import SECTION, ConfigError, resolve

# Of every field: what an empty section resolves to.
DEFAULTS = {
    "enabled": True,
    "topology.ranks_per_node": "detect",
    "weights.format": "none",
    "weights.block_size": 256,
    "weights.hadamard": False,
    "weights.skip_modules": [],
    "weights.difference": "none",
    "secondary.scope": "none",
    "secondary.memory_gb": "all",
    "gradients.intra_format": "none",
    "gradients.inter_format": "none",
    "gradients.block_size": 128,
    "gradients.hadamard": True,
    "gradients.skip_modules": [],
    "gradients.error_feedback": False,
    "gradients.scales": "block",
    "gradients.store_format": "none",
    "gradients.accumulate_in": "auto",
    "compute.format": "none",
    "compute.scaling": "delayed",
    "compute.min_features": 64,
    "compute.allow_fp16": False,
    "compute.skip_modules": ["lm_head"],
    "compute.high_precision_gemms": [],
    "optimizer.master_format": "fp32",
    "optimizer.exp_avg_format": "fp32",
    "optimizer.exp_avg_sq_format": "fp32",
    "optimizer.scales": "tensor",
    "partition": "slice",
    "partition_split": "balance",
    "frozen.modules": "all-linear",
    "frozen.format": "none",
    "frozen.scales": "block",
    "frozen.block_size": 64,
    "frozen.double_quantize": False,
    "frozen.skip_modules": ["lm_head", "*embed*", "score", "classifier", "v_head"],
    "experts.gather": "all",
    "activations.wire_format": "none",
    "gather_granularity": "block",
    "compile": "none",
    "trl_generation": "auto",
    "checkpoint.verify": True,
    "report.every": 100,
    "numerics.every": 0,
    "numerics.parts": 8,
    "numerics.file": "numerics.jsonl",
    "numerics.watch": "none",
    "numerics.spike": 8.0,
    "report.diagnose": True,
}
# What recipe "zeropp" sets.
ZEROPP = {
    "weights.format": "int8",
    "weights.difference": "exact",
    "secondary.scope": "node",
    "gradients.intra_format": "int8",
    "gradients.inter_format": "int4",
}
BF16 = {"bf16": {"enabled": True}}  # which exact differences need


def ds_config(section=None, zero=None, **others):
    """A stage-3 ds_config with this section, these zero_optimization keys and these top-level keys."""
    config = {"zero_optimization": {"stage": 3, **(zero or {})}, **others}
    return config if section is None else {**config, SECTION: section}


def resolved(section=None, zero=None, **others):
    return resolve(ds_config(section, zero, **others))


def refusal(section=None, zero=None, **others):
    """The message of the ConfigError."""
    with pytest.raises(ConfigError) as error:
        resolved(section, zero, **others)
    return str(error.value)


def values(config, path):
    for part in path.split("."):
        config = getattr(config, part)
    return config
