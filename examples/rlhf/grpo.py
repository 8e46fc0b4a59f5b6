"""GRPO: a policy learns from how its answers to one prompt compare with each other; there is no critic.

    deepspeed examples/rlhf/grpo.py --deepspeed_config ds_configs/qlora.json --model runs/sft --data PROMPTS \
        --reward_functions exact_match --out runs/grpo
    deepspeed examples/rlhf/grpo.py ... --reward_model runs/reward            # instead of exact answers, or as well

An iteration: the policy answers each prompt --group_size times; the answers are scored; an answer's advantage is its
score less the mean of its group, scaled; the policy is trained on them for some epochs (DeepSeekMath, arXiv
2402.03300). --out then holds the policy, as an adapter or a model.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import zeropp_fp8

sys.path.append(str(Path(__file__).resolve().parents[1]))  # examples/

from basics import join_the_other_ranks, seed_everything, shut_down
from common.advantage import group_advantages, kl_penalty, zero_outside
from common.arguments import GRPOArguments, check_groups, check_rollout, parse, read_ds_config
from common.batch import Tokens
from common.figures import Clock, means, rollout_figures
from common.losses import grpo_loss, token_entropy, token_logprobs, tokens_a_micro_batch
from common.models import find_start, save_model
from common.monitor import mean_over_ranks
from common.roles import (
    Role,
    in_parts,
    load_policy_and_reference,
    load_reward,
    logprobs_of,
)
from common.rollout import Rollout, seed_of
from common.rollout_stage import RolloutStage
from options import model_config, refusals

SHOWN = ("reward", "zero_spread", "kl", "entropy", "clip_fraction", "policy_loss", "response_tokens", "tokens_s")


@dataclass
class Experience(Tokens):
    """The numbers that GRPO learns from."""

    old_logprobs: Tensor  # fp32 [B, L-1]
    reference_logprobs: Tensor | None  # fp32 [B, L-1]
    advantages: Tensor  # fp32 [B]


@torch.no_grad()
def make_experience(
    arguments: GRPOArguments,
    policy: Role,
    reference: Role | None,
    rollout: Rollout,
    scores: Tensor,
    iteration: int,
) -> tuple[Experience, dict[str, Tensor]]:
    """Return what is learned from a rollout, in which the responses to one prompt lie next to each other.

    The experience is shuffled, so that a minibatch has responses to many prompts, and computed in the micro-batches of
    the first epoch. Before the first step each ratio is exactly 1 then, with FP8 too, whose scales depend on what is
    computed together.

    Args:
        scores: fp32 [B], of whole responses.

    Returns:
        (experience, figures): zero_spread, the share of groups whose scores are all equal, so that nothing is learned
        from them; with a reference kl, the KL divergence of a response from it by k3, in nats.
    """
    groups = scores.view(-1, arguments.group_size)
    figures = {"zero_spread": (groups.amax(1) == groups.amin(1)).float().mean()}
    advantages = group_advantages(scores, arguments.group_size, arguments.scale, dist.group.WORLD)

    order = shuffled(len(rollout), arguments, iteration, epoch=0)
    rollout, advantages = rollout.rows(order), advantages[order]
    size, mask = policy.engine.train_micro_batch_size_per_gpu(), rollout.response_mask
    old_logprobs = in_parts(lambda part: logprobs_of(policy, part, arguments.temperature), rollout, size)
    reference_logprobs = None
    if reference is not None:
        reference_logprobs = in_parts(lambda part: logprobs_of(reference, part, arguments.temperature), rollout, size)
        figures["kl"] = zero_outside(kl_penalty(old_logprobs, reference_logprobs, "k3"), mask).sum(1).mean()
    tokens = rollout.input_ids, rollout.attention_mask, mask
    return Experience(*tokens, old_logprobs, reference_logprobs, advantages), figures


def shuffled(count: int, arguments: GRPOArguments, iteration: int, epoch: int) -> list[int]:
    """The numbers below `count` in an order that seed, iteration, epoch and rank decide."""
    generator = torch.Generator().manual_seed(seed_of(arguments.seed, iteration, epoch, dist.get_rank()))
    return torch.randperm(count, generator=generator).tolist()


def policy_loss(
    arguments: GRPOArguments, policy: Role, batch: Experience, tokens: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy loss and KL divergence from the reference.

    Args:
        tokens: chosen tokens in a micro-batch, on average; see common/losses.py.
    """
    logits = policy(batch.input_ids, batch.attention_mask, use_cache=False).logits
    logprobs, mask = token_logprobs(logits, batch.input_ids, arguments.temperature), batch.response_mask
    loss, figures = grpo_loss(
        logprobs,
        batch.old_logprobs,
        batch.advantages,
        mask,
        arguments.clip_low,
        arguments.clip_high,
        batch.reference_logprobs,
        arguments.beta,
        arguments.loss,
        token_count=tokens,
        max_tokens=arguments.max_new_tokens,
        importance_level=arguments.importance,
        ratio_limit=arguments.ratio_limit,
    )
    with torch.no_grad():
        entropy = zero_outside(token_entropy(logits, arguments.temperature), mask).sum() / tokens
    return loss, figures | {"entropy": entropy}


def train_on(arguments: GRPOArguments, policy: Role, experience: Experience, iteration: int) -> list[dict[str, Tensor]]:
    """Train for some epochs; returns the figures of each micro-batch."""
    size, accumulation = policy.engine.train_micro_batch_size_per_gpu(), policy.engine.gradient_accumulation_steps()
    everything = []
    for epoch in range(arguments.grpo_epochs):
        if epoch > 0:
            experience = experience.rows(shuffled(len(experience), arguments, iteration, epoch))
        for minibatch in experience.parts(size * accumulation):
            batches = list(minibatch.parts(size))
            tokens = tokens_a_micro_batch([batch.response_mask for batch in batches], dist.group.WORLD)
            for batch in batches:
                loss, figures = policy_loss(arguments, policy, batch, tokens)
                policy.engine.backward(loss)
                policy.engine.step()
                everything.append(figures)
    return everything


def train(arguments: GRPOArguments, ds_config: dict) -> None:
    """The whole run."""
    with refusals():
        stage = RolloutStage(arguments, ds_config, arguments.grpo_epochs)
    policy, reference = load_policy_and_reference(arguments, ds_config, stage.steps, with_reference=arguments.beta > 0)
    reward_model = load_reward(arguments, ds_config, stage.tokenizer)
    first = stage.checkpoints.begin({"policy": policy.engine})
    shown = [name for name in SHOWN if name != "kl" or reference is not None]

    for iteration in stage.iterations(policy, reward_model, first, shown):
        clock = Clock()
        asked, rollout = stage.roll_out(iteration, arguments.group_size)
        clock.stop("generation_s")
        scores, parts = stage.rewards(rollout, asked.columns, asked.texts)
        experience, figures = make_experience(arguments, policy, reference, rollout, scores, iteration)
        clock.stop("experience_s")
        trained = train_on(arguments, policy, experience, iteration)
        clock.stop("training_s")

        # The loss knows a KL as well, a token's while the policy trains; that of the rollout stands.
        figures = mean_over_ranks(means(trained) | rollout_figures(rollout, scores, parts) | figures)
        figures["lr"] = policy.engine.get_lr()[0]
        stage.end_iteration(iteration, figures, clock, asked, rollout, scores, policy.engine)

    save_model(policy.engine.module, arguments.out, stage.tokenizer, policy.adapter)
    stage.draw()
    shut_down(*dict.fromkeys(role.engine for role in (policy, reference, reward_model) if role is not None))


def main() -> None:
    arguments = parse(GRPOArguments, __doc__)
    with refusals():
        ds_config = read_ds_config(arguments)
        check_rollout(arguments, ds_config)
        check_groups(arguments)
        model_config("--model", find_start(arguments.model).base)
    zeropp_fp8.enable()  # acts where the ds_config asks for it
    join_the_other_ranks()
    seed_everything(arguments.seed)
    train(arguments, ds_config)


if __name__ == "__main__":
    main()
