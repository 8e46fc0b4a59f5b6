"""Where tensors lie in a flat buffer of optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zeropp_fp8.optim.state_formats import TILE


class Segments:
    """Sizes and places of tensors (or slices of tensors) in one flat buffer.

    Every segment starts at a multiple of TILE = 1024 elements, so neither a block nor a kernel's tile belongs to two.
    What lies between a segment's end and the next start is padding, whose content nobody reads.

    Args:
        numels: elements of each segment, 0 or more.
        device: where the tables, and the buffers laid out by them, live.

    Attributes:
        numels, starts: tuples of ints, one per segment.
        padded_numel: elements of a buffer, a multiple of TILE.
        num_tiles: padded_numel / TILE.
        tile_segments: int32 [num_tiles], the segment of each tile.
        table: int64 [segments, 2]: start, numel.
        pointer_tables: for kernels/optimizer/adamw.py, which keeps there what it has worked out for a set of tensors.
    """

    def __init__(self, numels: Sequence[int], device: torch.device | str) -> None:
        self.numels = tuple(int(numel) for numel in numels)
        self.device = torch.device(device)
        if any(numel < 0 for numel in self.numels):
            raise ValueError(f"segments have 0 or more elements, got {min(self.numels)}")
        tiles = [-(-numel // TILE) for numel in self.numels]
        starts = [0]
        for count in tiles:
            starts.append(starts[-1] + count * TILE)
        self.padded_numel = starts.pop()
        self.starts = tuple(starts)
        self.num_tiles = self.padded_numel // TILE
        indices = torch.arange(len(tiles), dtype=torch.int32, device="cpu")
        counts = torch.tensor(tiles, dtype=torch.int64, device="cpu")
        self.tile_segments = torch.repeat_interleave(indices, counts).to(self.device)
        rows = list(zip(self.starts, self.numels))
        self.table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 2).to(self.device)
        self.pointer_tables: dict[Any, Tensor] = {}

    def __len__(self) -> int:
        return len(self.numels)

    def padded(self, segment: int) -> int:
        """Elements of a segment with its padding."""
        return -(-self.numels[segment] // TILE) * TILE

    def view(self, flat: Tensor, segment: int) -> Tensor:
        """The part of a flat buffer that belongs to a segment, without its padding."""
        return flat[self.starts[segment] : self.starts[segment] + self.numels[segment]]
