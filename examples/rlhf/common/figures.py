"""Figures of an iteration of PPO or GRPO: lengths, scores, times, tokens per second."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from common.advantage import masked_mean, masked_var
from common.rollout import Rollout


def rollout_figures(rollout: Rollout, scores: Tensor, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Scalars by name, to be averaged over ranks.

    Args:
        scores: fp32 [B].
        parts: what the scores are made of, [B] each, NaN where a part had nothing to say.
    """
    everything = torch.ones_like(scores, dtype=torch.bool)
    return {
        "reward": scores.mean(),
        "reward_std": masked_var(scores, everything, dist.group.WORLD).sqrt(),
        **{f"reward_{name}": masked_mean(part, ~part.isnan(), dist.group.WORLD) for name, part in parts.items()},
        "response_tokens": rollout.response_mask.sum(1).float().mean(),
        "ended": rollout.ended.float().mean(),
    }


def means(figures: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The means over micro-batches, scalars by name."""
    return {name: torch.stack([each[name].float() for each in figures]).mean() for name in figures[0]}


class Clock:
    """How long the phases of an iteration take."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def stop(self, phase: str) -> None:
        """The phase that began with the last call ends."""
        get_accelerator().synchronize()
        now = time.perf_counter()
        self._seconds[phase], self._last = now - self._last, now

    def figures(self, rollout: Rollout) -> dict[str, float]:
        """Seconds of each phase, and tokens a second of this rank: generated ones, and all of them in the iteration."""
        generated, tokens = rollout.response_mask.sum().item(), rollout.attention_mask.sum().item()
        return {
            **self._seconds,
            "generated_tokens_s": generated / self._seconds["generation_s"],
            "tokens_s": tokens / sum(self._seconds.values()),
        }
