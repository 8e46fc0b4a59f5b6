"""Work on cache-sized pieces with buffers that are used again.

The formulas of this folder are a dozen passes over fp32 numbers. On a CPU a pass over a whole tensor waits for memory,
and longer for the pages of a fresh buffer: quantizing 16M bf16 numbers to int8 took 77 ms. Piece by piece, from
cache and in buffers made once, it takes 11 ms. On a GPU, where each pass is a launch, the whole tensor is one piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# Elements that a thread works on at a time: 1 MB in fp32. Smaller pieces lie nearer to the core, but a call takes 1 us
# whatever its size, and a piece some fifty calls: 16M numbers to int8 take 21 ms with 64K, 11 with 256K, 9 with 512K.
# 512K would need two buffers of 2 MB for each thread, more than its share of a last-level cache often is.
PIECE = 1 << 18


def pieces(rows: int, num_blocks: int, block_size: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Cut a matrix of blocks into (rows, blocks): parts of one row, or several whole rows where rows are short.

    A piece has at least one block, so one scale for a whole row means pieces of whole rows. With several threads a
    piece is larger, because torch shares out each pass among them.
    """
    if device.type != "cpu":
        yield slice(0, rows), slice(0, num_blocks)
        return
    at_once = max(1, PIECE * torch.get_num_threads() // block_size)
    rows_at_once = max(1, at_once // num_blocks)
    for row in range(0, rows, rows_at_once):
        for block in range(0, num_blocks, at_once):
            yield slice(row, min(row + rows_at_once, rows)), slice(block, min(block + at_once, num_blocks))


class Scratch:
    """Named buffers that live for one call. The same name gives the same memory, whatever shape and dtype it gets."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[tuple, Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        key = (name, shape, dtype)
        view = self._views.get(key)  # nearly all pieces have the same shape, and making a view takes 2 us
        if view is None:
            num_bytes = math.prod(shape) * dtype.itemsize
            held = self._buffers.get(name)
            if held is None or held.numel() < num_bytes:
                held = self._buffers[name] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
                self._views = {key: view for key, view in self._views.items() if key[0] != name}
            view = self._views[key] = held[:num_bytes].view(dtype).view(shape)
        return view
