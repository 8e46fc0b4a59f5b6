"""What DeepSpeed's ZeRO-3 has put on a parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True)
class Shard:
    """This rank's part of a parameter, where it lies, with DeepSpeed's notes about its size."""

    data: Tensor
    numel: int
    padding_size: Callable[[], int]

    @classmethod
    def of(cls, param: Parameter) -> Shard:
        """What rests now."""
        return cls(param.ds_tensor.data, param.ds_tensor.ds_numel, param.padding_size)

    def restore(self, param: Parameter) -> None:
        """Let it rest again."""
        param.ds_tensor.data, param.ds_tensor.ds_numel, param.padding_size = self.data, self.numel, self.padding_size
