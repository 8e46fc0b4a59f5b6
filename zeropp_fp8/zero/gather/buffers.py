"""Offsets in a unit's buffers: of the ranks' bytes in the results of hops, and of decoded parameters' values."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.formats.base import align_up

_PARAMETER_ALIGNMENT = 16  # bytes; kernels can then read and write 16 at once


class Regions:
    """Regions of a flat uint8 buffer, each with the bytes of all ranks, so that the codes of a weight are one matrix.

    Args:
        sizes: bytes per rank of each region.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.places: list[tuple[int, int]] = []  # (start, size) in a rank's bytes
        self.rank_bytes = 0  # that each rank sends
        for size in sizes:
            self.places.append((self.rank_bytes, size))
            self.rank_bytes = align_up(self.rank_bytes + size)

    def __len__(self) -> int:
        return len(self.places)

    def flat(self, buffer: Tensor, index: int, ranks: int) -> Tensor:
        """uint8 [ranks * size]: region `index` of flat uint8 `buffer` [ranks * rank_bytes]."""
        start, size = self.places[index]
        return buffer if size == self.rank_bytes else buffer[start * ranks : (start + size) * ranks]

    def of(self, buffer: Tensor, index: int, ranks: int) -> Tensor:
        """The same as rows, uint8 [ranks, size]."""
        return self.flat(buffer, index, ranks).view(ranks, self.places[index][1])

    def all_of(self, buffer: Tensor, ranks: int) -> list[Tensor]:
        return [self.of(buffer, index, ranks) for index in range(len(self.places))]


class Places:
    """Offsets of parameters' values: there is one buffer per dtype, and each parameter is aligned to 16 bytes.

    Args:
        left_out: indices of parameters that need no place.
    """

    def __init__(
        self, params: Sequence[Parameter], dtypes: Sequence[torch.dtype], left_out: Collection[int] = ()
    ) -> None:
        self._places: list[tuple[torch.dtype, torch.Size, tuple[int, ...], int] | None] = []
        self._numels: dict[torch.dtype, int] = {}
        for index, (param, dtype) in enumerate(zip(params, dtypes)):
            if index in left_out:
                self._places.append(None)
                continue
            start = self._numels.get(dtype, 0)
            step = _PARAMETER_ALIGNMENT // dtype.itemsize
            self._numels[dtype] = start + -(-sharded.numel(param) // step) * step
            strides = torch.empty(sharded.shape(param), device="meta").stride()
            self._places.append((dtype, sharded.shape(param), strides, start))

    def empty(self, device: torch.device) -> list[Tensor | None]:
        """An uninitialized tensor in each parameter's shape; None for parameters without a place."""
        buffers = {dtype: torch.empty(numel, dtype=dtype, device=device) for dtype, numel in self._numels.items()}
        # One call per parameter: a slice and its view take more than twice as long.
        return [place and buffers[place[0]].as_strided(*place[1:]) for place in self._places]
