"""torchtitan's jobs with these collectives: configs of its registries whose models get them once they are sharded."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from zeropp_fp8.fsdp2.extra_state import extra_state
from zeropp_fp8.fsdp2.model import apply


def with_collectives(config: Any, **how: Any) -> Any:
    """A `Trainer.Config` of torchtitan (0.3) whose `model_spec.parallelize_fn` ends with `apply(model, **how)`.

    Of a pipeline it is called for each stage. A ConfigError comes from there, on every rank. With error feedback
    checkpoints have the residuals too; on other ranks load them with `checkpoint.exclude_from_loading=["zeropp_fp8.0"]`
    (a name per stage).
    """
    shard = config.model_spec.parallelize_fn

    def parallelize(model: nn.Module, **settings: Any) -> nn.Module:
        return apply(shard(model, **settings), **how)

    config.model_spec = dataclasses.replace(config.model_spec, parallelize_fn=parallelize)
    if how.get("gradients", {}).get("error_feedback"):
        config.checkpoint = _with_residuals(config.checkpoint)
    return config


def _with_residuals(checkpoint: Any) -> Any:
    """The config of a checkpoint manager that is this one's, and saves the model's `extra_state`."""

    class WithResiduals(type(checkpoint)._owner):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(type(checkpoint)):
            pass

        def __init__(self, config: Any, *, model_parts: list[nn.Module], states: dict[str, Any], **more: Any) -> None:
            extra = {f"zeropp_fp8.{index}": extra_state(part) for index, part in enumerate(model_parts)}
            super().__init__(config, model_parts=model_parts, states=states | extra, **more)

    fields = [each.name for each in dataclasses.fields(checkpoint)]
    return WithResiduals.Config(**{name: getattr(checkpoint, name) for name in fields})
