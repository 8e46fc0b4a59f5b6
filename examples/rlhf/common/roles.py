"""The models of RLHF as roles: policy and reference, critic and reward model.

With LoRA policy and reference are two adapters of one engine's model, and so are critic and reward model: four models
take the memory of two. Where all weights are trained each role has an engine, and the frozen ones store their weights
quantized.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass

import deepspeed
import torch
from options import model_config
from torch import Tensor, nn

from common.batch import Tokens
from common.engines import frozen_ds_config, make_engine, make_frozen_engine
from common.losses import token_logprobs
from common.models import (
    CRITIC,
    POLICY,
    REFERENCE,
    REWARD,
    Adapters,
    Start,
    find_start,
    load_policy,
    load_scorer,
    load_tokenizer,
    lora_config,
    recompute_activations,
    without_dropout,
)


@dataclass(frozen=True)
class Role:
    """A model as the algorithm sees it: an engine, and which adapter of its model computes (None: none).

    Called with (input_ids, attention_mask), int64 [B, L]. Where the model has no adapters, `adapter` means nothing.
    """

    engine: deepspeed.DeepSpeedEngine
    adapter: str | None = None

    @functools.cached_property
    def _adapters(self) -> Adapters:
        return Adapters(self.engine.module)

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the engine's model computes with this role's adapter."""
        return self._adapters.using(self.adapter)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, **more):
        with self.computing():
            return self.engine(input_ids=input_ids, attention_mask=attention_mask, **more)


def load_policy_and_reference(
    arguments, ds_config: dict, steps: int, with_reference: bool = True
) -> tuple[Role, Role | None]:
    """The policy to train, and what it starts as.

    With LoRA the reference is the frozen adapter that the policy's begins as, or the model without adapters.

    Args:
        arguments: RolloutArguments.
        steps: optimizer steps of the run.
        with_reference: False: None instead of a reference, and nothing is loaded for it.
    """
    start = find_start(arguments.model)
    lora = lora_config(arguments, ds_config, start)
    model = load_policy(start, ds_config, lora, reference=with_reference)
    engine = make_engine(_for_training(model, arguments), ds_config, arguments, steps)
    if not with_reference:
        return Role(engine, None if lora is None else POLICY), None
    if lora is not None:
        return Role(engine, POLICY), Role(engine, REFERENCE if start.adapter else None)
    frozen = frozen_ds_config(ds_config, arguments.frozen_format)
    copy = load_policy(start, _loaded_with(start, ds_config, frozen), None)
    return Role(engine), Role(make_frozen_engine(copy, frozen))


def find_reward_model(arguments, tokenizer) -> Start | None:
    """Where the reward model is, if there is one.

    Raises:
        ValueError: it is no scoring model, or has another vocabulary than the policy.
    """
    name = arguments.reward_model
    if name is None:
        return None
    start = find_start(name)
    architectures = model_config("--reward_model", start.base).architectures or [""]
    if not start.scores and not architectures[0].endswith("ForSequenceClassification"):
        raise ValueError(f"--reward_model {name} is a {architectures[0]}, which has no score; train it with reward.py")
    if load_tokenizer(name).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"--reward_model {name} has another vocabulary than --model {arguments.model}: both must be trained from "
            "models with the same tokenizer"
        )
    return start


def load_reward(arguments, ds_config: dict, tokenizer) -> Role | None:
    """The reward model alone, if there is one.

    With LoRA its adapter stays one: to be merged it would need weights of 16 bits.
    """
    start = find_reward_model(arguments, tokenizer)
    if start is None:
        return None
    lora = lora_config(arguments, ds_config, start)
    if lora is not None and start.adapter is not None:
        frozen = frozen_ds_config(ds_config, None)
        return Role(make_frozen_engine(load_scorer(start, frozen, lora, trained=REWARD), frozen), REWARD)
    frozen = frozen_ds_config(ds_config, None if lora is not None else arguments.frozen_format)
    model = load_scorer(start, _loaded_with(start, ds_config, frozen), None)
    return Role(make_frozen_engine(model, frozen))


def load_critic_and_reward(arguments, ds_config: dict, tokenizer, steps: int) -> tuple[Role, Role | None]:
    """The critic to train, and the reward model if there is one: the critic then begins as that, else as the policy.

    Args:
        arguments: PPOArguments.
        steps: optimizer steps of the run.
    """
    reward = find_reward_model(arguments, tokenizer)
    start = reward or find_start(arguments.model)
    lora = lora_config(arguments, ds_config, start)
    frozen = REWARD if reward and reward.adapter else None
    model = load_scorer(start, ds_config, lora, trained=CRITIC, frozen=frozen, new_head="zero")
    engine = make_engine(
        _for_training(model, arguments), ds_config, arguments, steps, lr=arguments.critic_lr, logs=False
    )
    if lora is not None:
        return Role(engine, CRITIC), Role(engine, frozen) if reward else None
    return Role(engine), load_reward(arguments, ds_config, tokenizer)


def _for_training(model: nn.Module, arguments) -> nn.Module:
    without_dropout(model)
    if arguments.gradient_checkpointing:
        recompute_activations(model)
    return model


def _loaded_with(start: Start, ds_config: dict, frozen: dict) -> dict:
    """Weights are stored as codes while they are loaded, unless an adapter is to be merged into them first."""
    return frozen if start.adapter is None else ds_config


# --- passes ------------------------------------------------------------------------------------------------------


def logprobs_of(policy: Role, batch: Tokens, temperature: float) -> Tensor:
    """Log-probabilities of a batch's tokens under the sampling temperature; fp32 [B, L-1]."""
    logits = policy(batch.input_ids, batch.attention_mask, use_cache=False).logits
    return token_logprobs(logits, batch.input_ids, temperature)


def values_of(critic: Role, batch: Tokens) -> Tensor:
    """The critic's values: position t holds that of the text up to token t, before token t+1; fp32 [B, L-1]."""
    return critic(batch.input_ids, batch.attention_mask)[:, :-1]


def scores_of(reward: Role, batch: Tokens) -> Tensor:
    """The reward model's scores of whole sequences: those of their last tokens; fp32 [B]."""
    last = batch.attention_mask.sum(1, keepdim=True) - 1
    return reward(batch.input_ids, batch.attention_mask).gather(1, last).squeeze(1)


@torch.no_grad()
def in_parts(compute: Callable[[Tokens], Tensor], batch: Tokens, size: int) -> Tensor:
    """compute(part) for parts of `size` rows of a batch, one after the other, without gradients.

    With the parts as large as micro-batches are in training, a GEMM adds up in the same order in both. Every rank must
    have the same number of parts.
    """
    return torch.cat([compute(part) for part in batch.parts(size)])
