"""Delayed scaling: the largest magnitudes of earlier steps, from which the next step's scales come.

"FP8 Formats for Deep Learning" (arXiv 2209.05433), section 3, and Transformer Engine's recipe of that name: a cast that
knows its scale beforehand takes one pass over its data, and all ranks can agree on scales in one collective per step.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 16


class AmaxHistory:
    """Amax of `count` tensors over the last STEPS steps.

    Attributes:
        current: fp32 [count], what the step under way has shown so far; casts record into it.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.length = STEPS
        self.steps = 0
        self.current = torch.zeros(count, dtype=torch.float32, device=device)
        self.table = torch.zeros(self.length, count, dtype=torch.float32, device=device)  # [length, count], a ring

    @property
    def newest(self) -> Tensor:
        """fp32 [count]: the row of the last step, zeros before the first."""
        return self.table[(self.steps - 1) % self.length]

    def end_step(self) -> None:
        """Take `current` over. A tensor that the step did not show keeps its newest entry."""
        newest = self.newest
        self.table[self.steps % self.length] = torch.where(self.current > 0, self.current, newest)
        self.steps += 1
        self.current.zero_()

    def largest(self) -> Tensor:
        """fp32 [count]: the amax that scales should hold; 0 where a tensor was never shown."""
        return self.table.amax(dim=0)

    def to(self, device: torch.device) -> AmaxHistory:
        """Let the tables follow the model."""
        self.current, self.table = self.current.to(device), self.table.to(device)
        return self

    def oldest_first(self) -> Tensor:
        """fp32 [length, count] on the CPU, for a checkpoint."""
        return self.table.roll(-(self.steps % self.length), dims=0).cpu()

    def load(self, oldest_first: Tensor) -> None:
        """Continue from what `oldest_first` gave, also with another length."""
        kept = oldest_first[-self.length :]
        self.table.zero_()
        self.table[self.length - kept.shape[0] :] = kept.to(self.table.device)
        self.steps = 0
        self.current.zero_()
