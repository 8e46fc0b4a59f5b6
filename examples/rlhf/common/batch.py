"""Tensors that belong together: a row of each for every sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass
class Batch:
    """A subclass's fields are tensors [B, ...], lists of B, and None where there is no such thing."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def rows(self, indices: Sequence[int]):
        """The same with these rows, in this order."""
        picked = {}
        for field in fields(self):
            values = getattr(self, field.name)
            if isinstance(values, Tensor):
                picked[field.name] = values[list(indices)]
            else:
                picked[field.name] = None if values is None else [values[i] for i in indices]
        return type(self)(**picked)

    def parts(self, size: int) -> Iterator:
        """Batches of `size` rows each, in order."""
        for first in range(0, len(self), size):
            yield self.rows(range(first, min(first + size, len(self))))

    def to(self, device: torch.device):
        """The same on a device."""
        return type(self)(
            **{
                field.name: values.to(device) if isinstance(values, Tensor) else values
                for field in fields(self)
                for values in [getattr(self, field.name)]
            }
        )


@dataclass
class Tokens(Batch):
    """B sequences of L tokens, right-padded; see common/__init__.py. As collate() of tokens.py makes them."""

    input_ids: Tensor  # int64 [B, L]
    attention_mask: Tensor  # int64 [B, L]
    response_mask: Tensor  # bool [B, L-1]
