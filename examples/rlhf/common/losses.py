"""Log-probabilities and entropy of tokens, and the losses of SFT, reward model, DPO, PPO and GRPO.

Position t of a [B, L-1] tensor speaks of token t+1; a mask is bool and True where the policy chose that token. What
stands outside the mask changes nothing, NaN included, and gets the gradient 0. Where the mask is True nowhere a loss is
0 and still has a (zero) gradient, so that every rank can call backward.

Every loss returns (loss, stats): a scalar with a gradient, and scalars without one, to be logged.

`token_count` is what a sum over tokens is divided by; None: by the chosen tokens of this batch. For the mean over the
tokens of all ranks and micro-batches of a step, give each loss `tokens_a_micro_batch(masks, group)`: DeepSpeed averages
gradients over both. The mean of a stat over both is then the mean over all tokens, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from common.advantage import kl_penalty, masked_mean, zero_outside

CHUNK = 2**24  # logits that are made fp32 at a time: 64 MiB
DPO_KINDS = ("sigmoid", "hinge", "ipo")
GRPO_KINDS = ("grpo", "bnpo", "dapo", "dr_grpo")

Stats = dict[str, Tensor]


# --- of logits ---------------------------------------------------------------------------------------------------


class _InChunks(torch.autograd.Function):
    """of_chunk(logits [n, V] in fp32, targets [n]) -> [n] for all N positions, a chunk of them at a time.

    Backward computes each chunk again, so that only the logits themselves are kept, in their own dtype.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, of_chunk: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.of_chunk = of_chunk
        values = logits.new_empty(len(logits), dtype=_wide(logits))
        for chunk in _chunks(logits):
            values[chunk] = of_chunk(logits[chunk].to(values.dtype), targets[chunk])
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        logits, targets = ctx.saved_tensors
        gradient_logits = torch.empty_like(logits)
        for chunk in _chunks(logits):
            with torch.enable_grad():
                wide = logits[chunk].detach().to(gradient.dtype).requires_grad_()
                values = ctx.of_chunk(wide, targets[chunk])
            (gradient_logits[chunk],) = torch.autograd.grad(values, wide, gradient[chunk])
        return gradient_logits, None, None


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _chunks(logits: Tensor) -> list[slice]:
    positions = max(1, CHUNK // logits.shape[1])
    return [slice(start, start + positions) for start in range(0, len(logits), positions)]


def _logprobs_of_chunk(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    logits = logits / temperature
    return logits.gather(1, targets.unsqueeze(1)).squeeze(1) - logits.logsumexp(1)


def _entropy_of_chunk(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    logprobs = (logits / temperature).log_softmax(1)
    return -(logprobs.exp() * logprobs).sum(1)


def _of_next_tokens(of_chunk: Callable, logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    if temperature <= 0:
        raise ValueError(f"the temperature is {temperature}; it must be above 0")
    # All L positions, the last one for nothing: without it the logits would have to be copied to be one matrix.
    values = _InChunks.apply(logits.flatten(0, 1), targets.flatten(), partial(of_chunk, temperature=temperature))
    return values.view(targets.shape)[:, :-1]


def token_logprobs(logits: Tensor, input_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """log p(token t+1 | tokens up to t) under softmax(logits / temperature), in nats.

    Memory: the logits are kept for backward as they are, and their gradient is made in their dtype. Besides, forward
    has four chunks of fp32 numbers and backward five, 64 MiB each (or one position's logits, if those are more),
    whatever B and L. An fp32 copy of 8 x 512 x 128256 logits would be 2.1 GB, its softmax as much.

    Args:
        logits: [B, L, V], any floating dtype; computed with in fp32 (float64 stays).
        input_ids: int64 [B, L], each one below V, padding too.

    Returns:
        fp32 [B, L-1] (float64 for float64 logits).

    Raises:
        ValueError: the temperature is not above 0.
    """
    return _of_next_tokens(_logprobs_of_chunk, logits, input_ids.roll(-1, 1), temperature)


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of the distribution that token t+1 is drawn from: [B, L-1].

    Memory, dtypes and errors are those of `token_logprobs`.
    """
    return _of_next_tokens(
        _entropy_of_chunk, logits, logits.new_zeros(logits.shape[:2], dtype=torch.int64), temperature
    )


def sequence_logprobs(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Sum of the chosen tokens' log-probabilities: [B]."""
    return zero_outside(logprobs, mask).sum(1)


# --- means -------------------------------------------------------------------------------------------------------


def tokens_a_micro_batch(masks: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> Tensor:
    """Chosen tokens in a micro-batch, mean over `masks`, those of a step, and over the ranks of `group`; a scalar."""
    tokens = torch.stack([mask.sum() for mask in masks])
    counts = torch.stack([tokens.sum(), tokens.new_tensor(len(tokens))]).double()
    if group is not None:
        dist.all_reduce(counts, group=group)
    return (counts[0] / counts[1]).float()


def _token_mean(values: Tensor, mask: Tensor, token_count: Tensor | float | None) -> Tensor:
    if token_count is None:
        return masked_mean(values, mask)
    count = torch.as_tensor(token_count, device=values.device)
    return zero_outside(values, mask).sum() / torch.where(count > 0, count, 1)


def _stats(**values: Tensor) -> Stats:
    return {name: value.detach() for name, value in values.items()}


# --- supervised --------------------------------------------------------------------------------------------------


def sft_loss(logprobs: Tensor, mask: Tensor, token_count: Tensor | float | None = None) -> tuple[Tensor, Stats]:
    """Cross-entropy, mean over the chosen tokens: of completions in SFT, of all tokens of a text in pre-training.

    Args:
        logprobs: [B, L-1].
        mask: bool [B, L-1].
    """
    loss = -_token_mean(logprobs, mask, token_count)
    return loss, _stats(sft_loss=loss)


def reward_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, centering: float = 0.0
) -> tuple[Tensor, Stats]:
    """Bradley-Terry: mean over pairs of -log sigmoid(chosen - rejected - margin).

    Args:
        chosen, rejected: [B], scores of the two responses to a prompt.
        margin: [B], by how much the chosen one should lead (Llama 2, arXiv 2307.09288, section 3.2.2).
        centering: coefficient of the mean of (chosen + rejected)^2, which keeps scores around 0 (arXiv 2312.09244).
    """
    lead = chosen - rejected
    loss = -F.logsigmoid(lead if margin is None else lead - margin).mean()
    if centering:
        loss = loss + centering * (chosen + rejected).square().mean()
    return loss, _stats(
        reward_loss=loss,
        accuracy=(lead > 0).float().mean(),
        margin=lead.mean(),
        chosen_score=chosen.mean(),
        rejected_score=rejected.mean(),
    )


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor | None,
    ref_rejected: Tensor | None,
    beta: float,
    label_smoothing: float = 0.0,
    kind: str = "sigmoid",
    chosen_tokens: Tensor | None = None,
    rejected_tokens: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """Direct preference optimization, mean over pairs.

    With the log-ratio to the reference h = log pi - log ref of a completion and lead = h(chosen) - h(rejected):
    sigmoid: -log sigmoid(beta lead) (arXiv 2305.18290, equation 7); with label smoothing e, the chance that a label is
    wrong, (1 - e) of it and e of -log sigmoid(-beta lead) (conservative DPO, E. Mitchell 2023);
    hinge: max(0, 1 - beta lead) (SLiC, arXiv 2309.06657);
    ipo: (lead - 1 / (2 beta))^2 with each h divided by its completion's tokens (arXiv 2310.12036, equation 17; the
    division is that of TRL).

    Args:
        policy_chosen, policy_rejected, ref_chosen, ref_rejected: [B], see `sequence_logprobs`. Those of the reference
            without gradient; both None: without a reference, its log-ratios 0.
        chosen_tokens, rejected_tokens: [B], tokens of the completions; kind ipo needs them.

    Raises:
        ValueError: another kind, ipo without token counts, label smoothing with hinge or ipo or outside [0, 0.5).
    """
    if kind not in DPO_KINDS:
        raise ValueError(f"dpo_loss: kind is {kind!r}; it must be one of {', '.join(DPO_KINDS)}")
    if label_smoothing and (kind != "sigmoid" or not 0 <= label_smoothing < 0.5):
        raise ValueError(f"dpo_loss: label smoothing {label_smoothing} (kind {kind}) goes with sigmoid, from 0 to 0.5")
    chosen = policy_chosen if ref_chosen is None else policy_chosen - ref_chosen
    rejected = policy_rejected if ref_rejected is None else policy_rejected - ref_rejected
    lead = chosen - rejected
    if kind == "sigmoid":
        losses = -(1 - label_smoothing) * F.logsigmoid(beta * lead) - label_smoothing * F.logsigmoid(-beta * lead)
    elif kind == "hinge":
        losses = (1 - beta * lead).relu()
    else:
        if chosen_tokens is None or rejected_tokens is None:
            raise ValueError("dpo_loss: kind ipo needs chosen_tokens and rejected_tokens")
        lead_a_token = chosen / chosen_tokens.clamp(min=1) - rejected / rejected_tokens.clamp(min=1)
        losses = (lead_a_token - 1 / (2 * beta)).square()
    loss = losses.mean()
    return loss, _stats(
        dpo_loss=loss,
        accuracy=(lead > 0).float().mean(),
        margin=beta * lead.mean(),
        chosen_reward=beta * chosen.mean(),
        rejected_reward=beta * rejected.mean(),
    )


# --- on-policy ---------------------------------------------------------------------------------------------------


def ppo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float,
    token_count: Tensor | float | None = None,
) -> tuple[Tensor, Stats]:
    """PPO's clipped surrogate (arXiv 1707.06347, equation 7): mean over tokens of max(-A r, -A clip(r, 1 - c, 1 + c)).

    Args:
        logprobs: [B, L-1], of the policy now; r is the ratio to old_logprobs, [B, L-1], of the policy that chose.
        advantages: [B, L-1], without gradient.
        clip: c.

    Stats: policy_loss; clip_fraction, the share of tokens whose clipped term is the larger one; approx_kl, of the old
    to the new policy by k3, in nats a token.
    """
    log_ratio = zero_outside(logprobs - old_logprobs, mask)
    ratio = log_ratio.exp()
    advantages = zero_outside(advantages, mask)
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip)
    loss = _token_mean(torch.maximum(plain, clipped), mask, token_count)
    return loss, _stats(
        policy_loss=loss,
        clip_fraction=_token_mean((clipped > plain).float(), mask, token_count),
        approx_kl=_token_mean(kl_penalty(-log_ratio, torch.zeros_like(log_ratio), "k3"), mask, token_count),
    )


def ppo_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float | None,
    token_count: Tensor | float | None = None,
) -> tuple[Tensor, Stats]:
    """Squared error of the critic, mean over tokens of max((V - R)^2, (V' - R)^2) / 2, V' within `clip` of the old V.

    As in DeepSpeed-Chat, AlpacaFarm and TRL; clip None: (V - R)^2 / 2. All tensors [B, L-1], old_values and returns
    without gradient. Stats: value_loss, value_clip_fraction (the share of tokens whose clipped term is the larger one).
    """
    errors = zero_outside(values - returns, mask).square()
    larger = errors
    if clip is not None:
        clipped = values.clamp(old_values - clip, old_values + clip)
        larger = torch.maximum(errors, zero_outside(clipped - returns, mask).square())
    loss = 0.5 * _token_mean(larger, mask, token_count)
    return loss, _stats(value_loss=loss, value_clip_fraction=_token_mean((larger > errors).float(), mask, token_count))


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    reference_logprobs: Tensor | None = None,
    beta: float = 0.0,
    kind: str = "grpo",
    token_count: Tensor | float | None = None,
    max_tokens: int | None = None,
    importance_level: str = "token",
    ratio_limit: float | None = None,
) -> tuple[Tensor, Stats]:
    """Group relative policy optimization: PPO's clipped surrogate with one advantage a response, plus beta KL by k3.

    A token's loss is -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + beta k3. How tokens are averaged:
    grpo: mean over responses of each one's mean (arXiv 2402.03300, equation 3);
    bnpo: mean over the tokens of this batch;
    dapo: sum over tokens divided by `token_count` (arXiv 2503.14476, over all tokens of a step);
    dr_grpo: sum over tokens divided by B `max_tokens`, a constant (arXiv 2503.20783).

    Args:
        logprobs: [B, L-1].
        old_logprobs: [B, L-1], of the policy that chose; None: this one, in the first update after a rollout.
        advantages: [B], see `group_advantages`.
        reference_logprobs: [B, L-1]; where given, stats have `kl`, in nats a token.
        max_tokens: that a response can have.
        importance_level: "token", or "sequence": r is then the exponential of a response's mean log-ratio, the same
            for all its tokens (GSPO, arXiv 2507.18071, equation 7).
        ratio_limit: largest r in the term that is not clipped, which bounds the loss of a token with a negative
            advantage (INTELLECT-2, arXiv 2505.07291); above 1 + clip_high.

    Stats: policy_loss (KL included); clip_fraction: share of tokens outside the clip range on the side where clipping
    takes their gradient, and its parts clip_fraction_low and clip_fraction_high; kl.

    Raises:
        ValueError: another kind or level, dapo without token_count, dr_grpo without max_tokens, beta without
            reference.
    """
    if kind not in GRPO_KINDS:
        raise ValueError(f"grpo_loss: kind is {kind!r}; it must be one of {', '.join(GRPO_KINDS)}")
    if kind == "dapo" and token_count is None:
        raise ValueError("grpo_loss: kind dapo needs token_count")
    if kind == "dr_grpo" and max_tokens is None:
        raise ValueError("grpo_loss: kind dr_grpo needs max_tokens")
    if beta and reference_logprobs is None:
        raise ValueError(f"grpo_loss: beta {beta} needs reference_logprobs")
    logprobs = zero_outside(logprobs, mask)
    old_logprobs = logprobs.detach() if old_logprobs is None else zero_outside(old_logprobs, mask)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    log_ratio = logprobs - old_logprobs
    if importance_level == "sequence":
        log_ratio = (log_ratio.sum(1, keepdim=True) / lengths).expand_as(mask)
    elif importance_level != "token":
        raise ValueError(f"grpo_loss: importance_level is {importance_level!r}; it must be token or sequence")

    ratio, advantages = log_ratio.exp(), advantages.unsqueeze(1)
    limited = ratio if ratio_limit is None else ratio.clamp(max=ratio_limit)
    losses = -torch.minimum(limited * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    low = ((ratio < 1 - clip_low) & (advantages < 0)).float()
    high = ((ratio > 1 + clip_high) & (advantages > 0)).float()
    figures = {"clip_fraction": low + high, "clip_fraction_low": low, "clip_fraction_high": high}
    if reference_logprobs is not None:
        figures["kl"] = kl_penalty(logprobs, zero_outside(reference_logprobs, mask), "k3")
    if beta:
        losses = losses + beta * figures["kl"]

    if kind == "grpo":
        loss = (zero_outside(losses, mask).sum(1, keepdim=True) / lengths).mean()
    elif kind == "dr_grpo":
        loss = zero_outside(losses, mask).sum() / (len(mask) * max_tokens)
    else:
        loss = _token_mean(losses, mask, token_count if kind == "dapo" else None)
    means = {name: _token_mean(values, mask, token_count) for name, values in figures.items()}
    return loss, _stats(policy_loss=loss, **means)
