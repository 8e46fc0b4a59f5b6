"""The shape of vLLM's `vllm.distributed.weight_transfer`, as far as the plugin uses it, without vLLM.

tests/upstream/test_vllm.py compares the signatures with those of an unpacked wheel; here is no other logic of vLLM's
than the refusal of a `metadata` that may change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    placements: tuple[Any, ...] | None = field(default=None, kw_only=True)


class WeightSource(ABC):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        metadata = cls.__dict__.get("metadata")
        if metadata is not None and not isinstance(metadata, cached_property):
            raise TypeError(f"{cls.__name__}.metadata must be a functools.cached_property")

    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class WeightTransferTrainerFactory:
    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        assert isinstance(source, WeightSource) and (init_info, client) == ("info", "client")
        return TrainerWeightTransferEngine(source)


class TrainerWeightTransferEngine:
    """It reads metadata and iterates the source, at each `send_weights`."""

    def __init__(self, source: WeightSource) -> None:
        self.source, self.sent, self.failing = source, [], None

    def send_weights(self) -> None:
        if self.failing == "start":
            raise OSError("connection refused")
        self.sent.append((self.source.metadata, [name for name, _ in self.source.iter_full()]))
        if self.failing == "finish":
            raise OSError("connection reset")

    def shutdown(self) -> None:
        self.source = None
