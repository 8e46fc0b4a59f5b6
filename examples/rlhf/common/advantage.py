"""From scores of whole responses to advantages of tokens: KL penalty, GAE, whitening, groups, KL controllers.

Pure torch, in the dtype of the arguments (fp32 in the scripts). Position t of a [B, L-1] tensor speaks of token t+1; a
mask is bool and True where the policy chose that token. What stands outside the mask is never read, NaN included.
Statistics are those of this rank, or of all ranks of a process group: `group=torch.distributed.group.WORLD`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

WHITEN_EPSILON = 1e-8  # added to a variance, as in TRL and AlpacaFarm
GROUP_EPSILON = 1e-4  # added to a standard deviation of rewards, as in TRL


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` is True and 0 elsewhere, in value and in gradient, whatever stood there."""
    return values.masked_fill(~mask, 0)


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, kind: str = "k1") -> Tensor:
    """An estimate of KL(policy || reference) from each token, in nats; same shape as the arguments.

    Tokens are drawn from the policy. With r = reference / policy probability, after J. Schulman, "Approximating KL
    Divergence" (2020): k1 = -log r (unbiased, can be negative), k2 = (log r)^2 / 2 (biased, smaller variance),
    k3 = r - 1 - log r (unbiased, never negative).

    Raises:
        ValueError: another kind.
    """
    log_ratio = reference_logprobs - logprobs
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    if kind == "k3":
        return torch.expm1(log_ratio) - log_ratio  # expm1: r - 1 has no digits left where r is close to 1
    raise ValueError(f"kl_penalty: kind is {kind!r}; it must be k1, k2 or k3")


def token_rewards(
    scores: Tensor, kl: Tensor, response_mask: Tensor, kl_coefficient: float, clip: float | None = None
) -> Tensor:
    """The reward of each token: minus its KL penalty, and at the last token of a response the response's score.

    Args:
        scores: [B], of whole responses.
        kl: [B, L-1], see `kl_penalty`.
        response_mask: bool [B, L-1].
        kl_coefficient: what the penalty is multiplied by.
        clip: scores are first cut to [-clip, clip] (DeepSpeed-Chat: 5).

    Returns:
        [B, L-1], 0 outside the mask. A response without tokens has no reward.
    """
    if clip is not None:
        scores = scores.clamp(-clip, clip)
    chosen_from_here = response_mask.flip(1).cumsum(1).flip(1)
    is_last = response_mask & (chosen_from_here == 1)
    penalty = zero_outside(kl_coefficient * kl, response_mask)
    return torch.where(is_last, scores.unsqueeze(1).to(kl.dtype), 0) - penalty


def gae(rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al., arXiv 1506.02438, equation 16) over the chosen tokens.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}, where t+1 is the next chosen token;
    behind the last one value and advantage are 0. Tokens that the policy did not choose are passed over.

    Args:
        rewards, values: [B, L-1]; values[:, t] is the critic's estimate before token t+1.

    Returns:
        (advantages, returns), both [B, L-1], without gradient, 0 outside the mask. returns = advantages + values.
    """
    rewards, values = zero_outside(rewards.detach(), response_mask), zero_outside(values.detach(), response_mask)
    next_value, next_advantage = torch.zeros_like(values[:, :1]), torch.zeros_like(values[:, :1])
    advantages = torch.zeros_like(values)
    for t in range(values.shape[1] - 1, -1, -1):
        here, value = response_mask[:, t : t + 1], values[:, t : t + 1]
        delta = rewards[:, t : t + 1] + gamma * next_value - value
        next_advantage = torch.where(here, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(here, value, next_value)
        advantages[:, t : t + 1] = next_advantage
    advantages = zero_outside(advantages, response_mask)
    return advantages, advantages + values


def _sum_over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(values, group=group)
    return values


def masked_mean(values: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Mean where `mask` is True, a scalar; 0 if it is True nowhere. With a group no gradient passes."""
    total, count = zero_outside(values, mask).sum(), mask.sum()
    if group is not None:
        total, count = _sum_over_ranks(torch.stack([total.detach(), count.to(total.dtype)]), group)
    return total / count.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Unbiased variance (n - 1) where `mask` is True, a scalar without gradient; 0 for fewer than two values."""
    values = values.detach()
    squares = zero_outside((values - masked_mean(values, mask, group)).square(), mask).sum()
    squares, count = _sum_over_ranks(torch.stack([squares, mask.sum().to(squares.dtype)]), group)
    return squares / (count - 1).clamp(min=1)


def whiten(values: Tensor, mask: Tensor, shift_mean: bool = True, group: dist.ProcessGroup | None = None) -> Tensor:
    """`values` with variance 1 and, with `shift_mean`, mean 0 over the mask; else the mean stays. 0 outside the mask.

    PPO whitens advantages with the shift and rewards without it (Ziegler et al., arXiv 1909.08593; TRL).
    """
    mean = masked_mean(values.detach(), mask, group)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask, group) + WHITEN_EPSILON)
    return zero_outside(whitened if shift_mean else whitened + mean, mask)


def group_advantages(
    rewards: Tensor, group_size: int, scale: str = "group", group: dist.ProcessGroup | None = None
) -> Tensor:
    """GRPO's advantage of a response: its reward minus the mean of the responses to the same prompt, scaled.

    DeepSeekMath, arXiv 2402.03300, section 4.1.2. `scale` is the standard deviation (n - 1) to divide by: that of the
    prompt's own responses ("group"), that of all rewards (of all ranks with a process group: "batch"), or nothing
    ("none": Dr. GRPO, arXiv 2503.20783).

    Args:
        rewards: [B]; the responses to one prompt lie next to each other, all on one rank.
        group_size: responses to a prompt.

    Returns:
        [B]. A group whose rewards are all equal has advantages 0 (up to rounding of the mean).

    Raises:
        ValueError: B is no multiple of the group size, or another scale.
    """
    if group_size < 1 or len(rewards) % group_size:
        raise ValueError(f"group_advantages: {len(rewards)} rewards do not make groups of {group_size}")
    grouped = rewards.view(-1, group_size)
    advantages = grouped - grouped.mean(1, keepdim=True)
    if scale == "group":
        deviation = (advantages.square().sum(1, keepdim=True) / max(1, group_size - 1)).sqrt()
        advantages = advantages / (deviation + GROUP_EPSILON)
    elif scale == "batch":
        deviation = masked_var(rewards, torch.ones_like(rewards, dtype=torch.bool), group).sqrt()
        advantages = advantages / (deviation + GROUP_EPSILON)
    elif scale != "none":
        raise ValueError(f"group_advantages: scale is {scale!r}; it must be group, batch or none")
    return advantages.flatten()


class FixedKL:
    """A KL coefficient that stays as it is."""

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient

    def update(self, kl: float, responses: int) -> None:
        """Nothing; here so that both controllers are used alike."""

    def state_dict(self) -> dict:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict) -> None:
        self.coefficient = state["coefficient"]


class AdaptiveKL(FixedKL):
    """A KL coefficient that is steered to a KL divergence (Ziegler et al., arXiv 1909.08593, section 2.2).

    Args:
        coefficient: to begin with.
        target: KL divergence of a response, in nats.
        horizon: responses over which the coefficient changes by at most about 20 %; an iteration of more changes it by
            no more than that, or it would end up below 0.

    Raises:
        ValueError: target or horizon is not above 0.
    """

    def __init__(self, coefficient: float, target: float, horizon: int) -> None:
        super().__init__(coefficient)
        if target <= 0 or horizon <= 0:
            raise ValueError(f"AdaptiveKL: target {target} and horizon {horizon} must be above 0")
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, responses: int) -> None:
        """Change the coefficient after an iteration.

        Args:
            kl: mean over responses, all ranks' ones, of the sum over a response's tokens, in nats.
            responses: how many these were.
        """
        error = min(max((kl - self.target) / self.target, -0.2), 0.2)
        self.coefficient *= 1 + error * min(1.0, responses / self.horizon)
