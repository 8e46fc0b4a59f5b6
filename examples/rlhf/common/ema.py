"""A moving average of the weights that an engine trains: each rank averages its own shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class WeightAverage:
    """average = decay average + (1 - decay) weights, after each optimizer step; in the beginning the weights.

    Args:
        engine: of ZeRO-3. Its shards are averaged in the dtype in which they compute, before they are sent as codes.
        decay: DeepSpeed-Chat has 0.992.
        dtype: "fp32" or "bf16"; in bf16 a step that changes a weight by less than 1/256 of it, times 1 / (1 - decay),
            changes nothing.
        device: "model" (where the shard is) or "cpu".
    """

    def __init__(self, engine, decay: float, dtype: str = "fp32", device: str = "model") -> None:
        if not 0 < decay < 1:
            raise ValueError(f"--ema_decay {decay}: give a number between 0 and 1")
        self.decay = decay
        self._trained = {name: param for name, param in engine.module.named_parameters() if param.requires_grad}
        self._average = {
            name: param.ds_tensor.data.to(
                "cpu" if device == "cpu" else param.ds_tensor.device, DTYPES[dtype], copy=True
            )
            for name, param in self._trained.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """After an optimizer step."""
        for name, average in self._average.items():
            shard = self._trained[name].ds_tensor.data.to(average.device, torch.float32)
            average.copy_(torch.lerp(shard, average.float(), self.decay))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the averages as its weights: to save it. No pass may run meanwhile."""
        weights: dict[Parameter, Tensor] = {}
        for name, param in self._trained.items():
            param.partition()  # small ones may be gathered all the time; the next pass gathers them again
            weights[param] = param.ds_tensor.data.clone()
            param.ds_tensor.data.copy_(self._average[name])
        try:
            yield
        finally:
            for param, shard in weights.items():
                param.partition()
                param.ds_tensor.data.copy_(shard)

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's averages by name."""
        return self._average

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on with `state_dict`'s result of the same rank of as many."""
        for name, average in self._average.items():
            average.copy_(state[name])
