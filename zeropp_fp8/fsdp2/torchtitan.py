"""torchtitan's jobs with these collectives: configs of its registries whose models get them once they are sharded.

# my_runs.py, for `torchrun ... -m torchtitan.train --module my_runs --config llama3_8b`
from torchtitan.models.llama3 import config_registry
from zeropp_fp8.fsdp2.torchtitan import with_collectives


def llama3_8b():
    return with_collectives(config_registry.llama3_8b(), recipe="zeropp")
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from zeropp_fp8.fsdp2.model import apply


def with_collectives(config: Any, **how: Any) -> Any:
    """A `Trainer.Config` of torchtitan (0.3) whose `model_spec.parallelize_fn` ends with `apply(model, **how)`.

    Of a pipeline it is called for each stage. A ConfigError comes from there, on every rank.
    """
    shard = config.model_spec.parallelize_fn

    def parallelize(model: nn.Module, **settings: Any) -> nn.Module:
        return apply(shard(model, **settings), **how)

    config.model_spec = dataclasses.replace(config.model_spec, parallelize_fn=parallelize)
    return config
