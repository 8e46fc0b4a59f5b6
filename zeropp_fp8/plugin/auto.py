"""The "auto" values of a ds_config, which Hugging Face's libraries fill in before DeepSpeed sees them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from zeropp_fp8.config.sections import SECTION

BATCH_SIZES = frozenset({"train_batch_size", "train_micro_batch_size_per_gpu"})
# Keys that transformers' Trainer and Accelerate fill in.
_FILLED = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
    optimizer.params.lr optimizer.params.betas optimizer.params.eps optimizer.params.weight_decay
    scheduler.params.warmup_min_lr scheduler.params.warmup_max_lr
    scheduler.params.warmup_num_steps scheduler.params.total_num_steps fp16.enabled bf16.enabled
    zero_optimization.stage zero_optimization.reduce_bucket_size zero_optimization.stage3_prefetch_bucket_size
    zero_optimization.offload_optimizer.device zero_optimization.offload_optimizer.nvme_path
    zero_optimization.offload_param.device zero_optimization.offload_param.nvme_path
    zero_optimization.stage3_param_persistence_threshold
    zero_optimization.stage3_gather_16bit_weights_on_model_save
"""
FILLED = frozenset(_FILLED.split())


def auto_keys(ds_config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield every key whose value is "auto", as `a.b.c`. No other library fills in keys of the plugin's own section."""
    for key, value in ds_config.items():
        if not prefix and key == SECTION:
            continue
        if isinstance(value, Mapping):
            yield from auto_keys(value, f"{prefix}{key}.")
        elif value == "auto":
            yield f"{prefix}{key}"


def as_if_filled(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy without these keys, so that DeepSpeed's defaults hold.

    Two keys have no default: the stage, which becomes the plugin's 3, and the micro-batch if no batch size is set.
    Parameters of an optimizer or a scheduler stay: a value that will be filled in counts as given.
    """
    filled, keys = copy.deepcopy(dict(ds_config)), set(auto_keys(ds_config))
    for path in keys:
        *parents, last = path.split(".")
        if parents in (["optimizer", "params"], ["scheduler", "params"]):
            continue
        owner = filled
        for parent in parents:
            owner = owner[parent]
        if path == "zero_optimization.stage":
            owner[last] = 3
        else:
            del owner[last]
    if keys & BATCH_SIZES and not filled.keys() & BATCH_SIZES:
        filled["train_micro_batch_size_per_gpu"] = 1
    return filled
