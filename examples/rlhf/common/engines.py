"""DeepSpeed engines for models that are trained and for models that are frozen. Several live in one process."""

from __future__ import annotations

import copy

import deepspeed
import torch
from basics import adamw, learning_rate_factor
from torch import nn

from common.models import without_dropout
from zeropp_fp8.config import SECTION, PluginConfig, operand_formats, resolve

MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")


def make_engine(model: nn.Module, ds_config: dict, arguments, steps: int, lr: float | None = None, logs: bool = True):
    """An engine that trains what `model` has requires_grad set on.

    Optimizer and scheduler are torch's AdamW and the arguments' schedule, unless the ds_config has its own.

    Args:
        arguments: lr, weight_decay, warmup, schedule.
        steps: optimizer steps of the run, over which a cosine falls.
        lr: instead of the arguments'.
        logs: keep the ds_config's monitors; one engine of a run should.
    """
    ds_config = copy.deepcopy(ds_config) if logs else _without_monitors(ds_config)
    optimizer = scheduler = None
    if "optimizer" not in ds_config:
        optimizer = adamw(model, arguments.lr if lr is None else lr, arguments.weight_decay)
        if "scheduler" not in ds_config:
            scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: learning_rate_factor(step, arguments.warmup, steps, arguments.schedule)
            )
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=None if optimizer else [p for p in model.parameters() if p.requires_grad],
        optimizer=optimizer,
        lr_scheduler=scheduler,
        config=ds_config,
    )
    engine.train()  # from_pretrained gives models that evaluate
    return engine


def make_frozen_engine(model: nn.Module, ds_config: dict):
    """An engine without an optimizer, for a model that is never trained.

    It stays in training mode, without dropout: FP8 layers may evaluate in other numbers than they train in, and a
    reference is compared with a policy that trains.
    """
    model.requires_grad_(False)
    without_dropout(model)
    engine, *_ = deepspeed.initialize(model=model, config=_without_monitors(ds_config))
    engine.train()
    return engine


def frozen_ds_config(ds_config: dict, frozen_format: str | None) -> dict:
    """The ds_config of a model that is never trained, its linear weights stored in `frozen_format`; "none": 16 bits.

    None: what the ds_config stores frozen weights in, else what linear layers multiply (FP8 with a scale per tensor),
    else the format in which it sends weights. A copy of the trained model then computes with exactly the numbers
    that the model itself computes with, as far as blocks of both begin at the same elements: the parts of a weight that
    ranks have are multiples of the block size, and no Hadamard rotation comes before.
    """
    ds_config = {key: value for key, value in ds_config.items() if key not in ("optimizer", "scheduler")}
    plugin = resolve(ds_config)
    if plugin is None or (frozen_format is None and plugin.frozen.format != "none"):
        return ds_config
    frozen = _format_of_copies(plugin)
    if frozen_format not in (None, frozen["format"]):
        frozen = {"format": frozen_format}
    return {**ds_config, SECTION: {**ds_config[SECTION], "frozen": frozen}}


def _format_of_copies(plugin: PluginConfig) -> dict:
    """The "frozen" section with which a copy of a trained model has the numbers that the model computes with."""
    sent, compute = plugin.weights, plugin.compute
    multiplied = "none" if compute.format == "none" else operand_formats(compute)["weights"]
    if multiplied == "fp8_e4m3" and compute.scaling in ("delayed", "current") and sent.format in ("none", multiplied):
        return {"format": multiplied, "scales": "tensor"}
    if sent.format == "none":
        return {"format": "none"}
    return {"format": sent.format, "block_size": sent.block_size}


def _without_monitors(ds_config: dict) -> dict:
    return copy.deepcopy({key: value for key, value in ds_config.items() if key not in MONITORS})
