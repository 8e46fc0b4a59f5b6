"""PPO: a policy learns to get higher scores, without going far from where it starts.

    deepspeed examples/rlhf/ppo.py --deepspeed_config ds_configs/qlora.json --model runs/sft --data PROMPTS \
        --reward_model runs/reward --out runs/ppo
    deepspeed examples/rlhf/ppo.py ... --reward_functions exact_match          # verifiable answers instead, or as well

An iteration: the policy answers prompts; the answers are scored; a KL penalty to the reference, and the critic's
values, make an advantage of each token; policy and critic are trained on them for some epochs. As in DeepSpeed-Chat and
AlpacaFarm. --out then holds the policy, as an adapter or a model.
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
from common.advantage import (
    AdaptiveKL,
    FixedKL,
    gae,
    kl_penalty,
    token_rewards,
    whiten,
    zero_outside,
)
from common.arguments import PPOArguments, check_length, check_rollout, parse, read_ds_config
from common.batch import Tokens
from common.ema import WeightAverage
from common.figures import Clock, means, rollout_figures
from common.losses import (
    ppo_policy_loss,
    ppo_value_loss,
    sft_loss,
    token_entropy,
    token_logprobs,
    tokens_a_micro_batch,
)
from common.models import find_start, save_model
from common.monitor import mean_over_ranks
from common.order import Order
from common.roles import (
    Role,
    in_parts,
    load_critic_and_reward,
    load_policy_and_reference,
    logprobs_of,
    values_of,
)
from common.rollout import Rollout, seed_of
from common.rollout_stage import RolloutStage
from common.rows import read_rows
from common.tokens import collate, pack_text
from options import model_config, refusals

SHOWN = ("reward", "kl", "entropy", "clip_fraction", "policy_loss", "value_loss", "response_tokens", "tokens_s")


@dataclass
class Experience(Tokens):
    """The numbers that PPO learns from; fp32 [B, L-1] each."""

    old_logprobs: Tensor
    old_values: Tensor
    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def make_experience(
    arguments: PPOArguments,
    actor: Role,
    reference: Role,
    critic: Role,
    rollout: Rollout,
    scores: Tensor,
    kl_coefficient: float,
) -> tuple[Experience, Tensor]:
    """Return what the four models make of a rollout.

    Args:
        scores: fp32 [B], of whole responses.

    Returns:
        (experience, KL divergence of each response in nats, fp32 [B])
    """
    size, everyone, mask = actor.engine.train_micro_batch_size_per_gpu(), dist.group.WORLD, rollout.response_mask
    old_logprobs = in_parts(lambda part: logprobs_of(actor, part, arguments.temperature), rollout, size)
    reference_logprobs = in_parts(lambda part: logprobs_of(reference, part, arguments.temperature), rollout, size)
    values = in_parts(lambda part: values_of(critic, part), rollout, size)

    kl = kl_penalty(old_logprobs, reference_logprobs, arguments.kl_kind)
    rewards = token_rewards(scores, kl, mask, kl_coefficient, arguments.reward_clip or None)
    if arguments.whiten_rewards:
        rewards = whiten(rewards, mask, shift_mean=False, group=everyone)
    advantages, returns = gae(rewards, values, mask, arguments.gamma, arguments.lam)
    if arguments.whiten_advantages:
        advantages = whiten(advantages, mask, group=everyone)
    tokens = rollout.input_ids, rollout.attention_mask, mask
    return Experience(*tokens, old_logprobs, values, advantages, returns), zero_outside(kl, mask).sum(1)


def actor_loss(
    arguments: PPOArguments, actor: Role, batch: Experience, tokens: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy loss, minus the bonus for entropy.

    Args:
        tokens: chosen tokens in a micro-batch, on average; see common/losses.py.
    """
    logits = actor(batch.input_ids, batch.attention_mask, use_cache=False).logits
    logprobs, mask = token_logprobs(logits, batch.input_ids, arguments.temperature), batch.response_mask
    loss, figures = ppo_policy_loss(logprobs, batch.old_logprobs, batch.advantages, mask, arguments.clip, tokens)
    with torch.set_grad_enabled(arguments.entropy_coefficient != 0):
        entropy = zero_outside(token_entropy(logits, arguments.temperature), mask).sum() / tokens
    return loss - arguments.entropy_coefficient * entropy, figures | {"entropy": entropy.detach()}


def critic_loss(
    arguments: PPOArguments, critic: Role, batch: Experience, tokens: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped squared error of the values."""
    values = values_of(critic, batch)
    clip = arguments.value_clip or None
    return ppo_value_loss(values, batch.old_values, batch.returns, batch.response_mask, clip, tokens)


class PretrainingText:
    """Texts whose language modelling loss is mixed in, so that the policy does not forget what it knew."""

    def __init__(self, arguments: PPOArguments, tokenizer) -> None:
        read = read_rows(arguments.pretraining_data, "text", arguments.bad_rows)
        self._items = pack_text(read.rows, tokenizer, arguments.pretraining_tokens)
        self._order, self._pad = Order(len(self._items), arguments.seed), tokenizer.pad_token_id

    def loss(self, actor: Role, number: int) -> Tensor:
        """Mean over the tokens of micro-batch `number` of the run."""
        size = actor.engine.train_micro_batch_size_per_gpu()
        picked = self._order.batch(number, dist.get_rank(), dist.get_world_size(), size)
        batch = Tokens(**collate([self._items[index] for index in picked], self._pad)).to(actor.engine.device)
        return sft_loss(logprobs_of(actor, batch, temperature=1.0), batch.response_mask)[0]


def train_on(
    arguments: PPOArguments,
    actor: Role,
    critic: Role,
    experience: Experience,
    iteration: int,
    text: PretrainingText | None = None,
    average: WeightAverage | None = None,
) -> list[dict[str, Tensor]]:
    """Train both models for some epochs; returns the figures of each micro-batch.

    The first epoch takes the rows as they come (prompts come shuffled), so its micro-batches are those that
    `make_experience` computed with: before the first step each ratio is exactly 1, with FP8 too, whose scales depend on
    what is computed together.
    """
    size, accumulation = actor.engine.train_micro_batch_size_per_gpu(), actor.engine.gradient_accumulation_steps()
    everything = []
    for epoch in range(arguments.ppo_epochs):
        if epoch > 0:
            generator = torch.Generator().manual_seed(seed_of(arguments.seed, iteration, epoch, dist.get_rank()))
            experience = experience.rows(torch.randperm(len(experience), generator=generator).tolist())
        for minibatch in experience.parts(size * accumulation):
            batches = list(minibatch.parts(size))
            tokens = tokens_a_micro_batch([batch.response_mask for batch in batches], dist.group.WORLD)
            for batch in batches:
                loss, figures = actor_loss(arguments, actor, batch, tokens)
                if text is not None:
                    number = iteration * arguments.ppo_epochs * (len(experience) // size) + len(everything)
                    text_loss = text.loss(actor, number)
                    loss = loss + arguments.pretraining_coefficient * text_loss
                    figures["pretraining_loss"] = text_loss.detach()
                actor.engine.backward(loss)
                actor.engine.step()

                loss, more = critic_loss(arguments, critic, batch, tokens)
                critic.engine.backward(loss)
                critic.engine.step()
                everything.append(figures | more)
            if average is not None:
                average.update()
    return everything


def train(arguments: PPOArguments, ds_config: dict) -> None:
    """The whole run."""
    with refusals():
        stage = RolloutStage(arguments, ds_config, arguments.ppo_epochs)
        text = PretrainingText(arguments, stage.tokenizer) if arguments.pretraining_coefficient else None
    actor, reference = load_policy_and_reference(arguments, ds_config, stage.steps)
    critic, reward_model = load_critic_and_reward(arguments, ds_config, stage.tokenizer, stage.steps)
    controller, average = FixedKL(arguments.kl_coefficient), None
    if arguments.kl_target is not None:
        controller = AdaptiveKL(arguments.kl_coefficient, arguments.kl_target, arguments.kl_horizon)
    if arguments.ema_decay:
        average = WeightAverage(actor.engine, arguments.ema_decay, arguments.ema_dtype, arguments.ema_device)
    first = stage.checkpoints.begin(
        {"actor": actor.engine, "critic": critic.engine},
        {"controller": controller} | ({"average": average} if average else {}),
    )

    for iteration in stage.iterations(actor, reward_model, first, SHOWN):
        clock = Clock()
        asked, rollout = stage.roll_out(iteration)
        clock.stop("generation_s")
        scores, parts = stage.rewards(rollout, asked.columns, asked.texts)
        experience, kl = make_experience(arguments, actor, reference, critic, rollout, scores, controller.coefficient)
        clock.stop("experience_s")
        trained = train_on(arguments, actor, critic, experience, iteration, text, average)
        clock.stop("training_s")

        figures = rollout_figures(rollout, scores, parts) | {"kl": kl.mean()}
        figures = mean_over_ranks(figures | means(trained))
        figures |= {"kl_coefficient": controller.coefficient, "lr": actor.engine.get_lr()[0]}
        controller.update(figures["kl"], arguments.rollout_batch * dist.get_world_size())
        stage.end_iteration(iteration, figures, clock, asked, rollout, scores, actor.engine, critic.engine)

    save_model(actor.engine.module, arguments.out, stage.tokenizer, actor.adapter)
    if average is not None:
        with average.in_place():
            save_model(actor.engine.module, Path(arguments.out, "average"), stage.tokenizer, actor.adapter)
    stage.draw()
    shut_down(*dict.fromkeys(role.engine for role in (actor, reference, critic, reward_model) if role is not None))


def main() -> None:
    arguments = parse(PPOArguments, __doc__)
    with refusals():
        ds_config = read_ds_config(arguments)
        check_rollout(arguments, ds_config)
        config = model_config("--model", find_start(arguments.model).base)
        if arguments.pretraining_coefficient:
            check_length(arguments.pretraining_tokens, config, "--pretraining_tokens")
    zeropp_fp8.enable()  # acts where the ds_config asks for it
    join_the_other_ranks()
    seed_everything(arguments.seed)
    train(arguments, ds_config)


if __name__ == "__main__":
    main()
