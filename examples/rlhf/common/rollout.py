"""Batched generation and its masks; a hook for another engine than the model itself.

Prompts are padded on the left, because all rows of a batch write their next token at the same place. What comes out is
padded on the right, as training has it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from transformers import GenerationConfig

import zeropp_fp8
from common.batch import Tokens
from common.models import gathered_weights, transformers_model
from common.roles import Role
from common.tokens import collate, collate_left


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: of all tokens
    greedy: bool = False

    @classmethod
    def of(cls, arguments) -> Sampling:
        """As RolloutArguments say."""
        return cls(arguments.max_new_tokens, arguments.temperature, arguments.top_p, arguments.top_k)


@dataclass
class Rollout(Tokens):
    """Prompts and the responses to them."""

    prompt_lengths: Tensor  # int64 [B]
    ended: Tensor  # bool [B]: the end token came
    texts: list[str]  # of the responses, without special tokens


class OtherEngine(Protocol):
    """Something else that generates for this rank: vLLM, a server, a stand-in."""

    def update_weights(self, names_and_tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Take the policy's weights, adapters merged, by the names that they have in the transformers model.

        They come one by one, each gathered from all ranks when it is asked for, and are to be copied at once: every
        rank must take all of them.
        """

    def generate(self, prompts: list[list[int]], sampling: Sampling, seed: int) -> list[list[int]]:
        """The tokens after each prompt, the end token included where it came."""


def seed_of(*numbers: int) -> int:
    """A seed below 2^63 that only these numbers decide, such as (seed, iteration, rank)."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "little") >> 1


def roll_out(
    policy: Role,
    tokenizer,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    seed: int,
    batch: int = 0,
    other: OtherEngine | None = None,
) -> Rollout:
    """Let the policy answer prompts. On every rank together.

    Args:
        prompts: token ids, at least one each.
        seed: of this rank's samples; the generators of torch go on afterwards as if nothing had been drawn.
        batch: prompts at a time; 0: all.
        other: what generates instead of the policy's own engine, after it has got the policy's weights.
    """
    model = policy.engine.module
    ends = end_tokens(model, tokenizer)
    if other is not None:
        other.update_weights(gathered_weights(model, policy.adapter))
        responses = other.generate(list(prompts), sampling, seed)
    else:
        size = batch or len(prompts)
        parts = [prompts[first : first + size] for first in range(0, len(prompts), size)]
        with (
            policy.computing(),
            choosing(model, sampling, ends, tokenizer.pad_token_id),
            generating(policy.engine) as generate,
            seeded(seed),
        ):
            responses = [tokens for part in parts for tokens in _generate(generate, part, tokenizer.pad_token_id)]
    return as_rollout(prompts, responses, ends, tokenizer).to(policy.engine.device)


def end_tokens(model: nn.Module, tokenizer) -> list[int]:
    """The tokens that end a response: the tokenizer's, and those of the model's generation_config.json (Llama 3)."""
    configured = model.generation_config.eos_token_id
    more = configured if isinstance(configured, list) else [] if configured is None else [configured]
    return sorted({tokenizer.eos_token_id, *more})


@contextmanager
def choosing(model: nn.Module, sampling: Sampling, ends: list[int], pad_id: int) -> Iterator[None]:
    """generate() chooses tokens as told and in no other way.

    What generate() is not told it takes from the model's generation_config.json, such as a penalty for repetition, and
    log-probabilities would be those of another distribution.
    """
    model = transformers_model(model)
    own = model.generation_config
    how = (
        {}
        if sampling.greedy
        else {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    )
    model.generation_config = GenerationConfig(
        do_sample=not sampling.greedy,
        **how,
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=ends,
        pad_token_id=pad_id,
    )
    try:
        yield
    finally:
        model.generation_config = own


@contextmanager
def generating(engine) -> Iterator[Callable[..., Tensor]]:
    """The generate() of the engine's model, which evaluates meanwhile.

    With the plugin its weights stay on the ranks meanwhile. Without it ZeRO-3 gathers them for each token, and ranks go
    on in step until the last one has finished.
    """
    if getattr(engine, "zeropp_fp8_session", None) is not None:
        with zeropp_fp8.generation(engine) as model:
            yield model.generate
        return
    engine.eval()
    try:
        yield partial(engine.module.generate, synced_gpus=dist.get_world_size() > 1)
    finally:
        engine.train()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from torch's generators with a seed, and then put them back."""
    accelerator = get_accelerator()
    devices = [accelerator.current_device()] if accelerator.device_name() == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


@torch.no_grad()
def _generate(generate: Callable[..., Tensor], prompts: Sequence[list[int]], pad_id: int) -> list[list[int]]:
    """The tokens that generate() puts after each prompt, padding included."""
    batch = collate_left([{"input_ids": prompt} for prompt in prompts], pad_id)
    device = get_accelerator().current_device_name()
    tokens = generate(**{name: tensor.to(device) for name, tensor in batch.items()}, use_cache=True)
    return tokens[:, batch["input_ids"].shape[1] :].tolist()


def as_rollout(prompts: Sequence[list[int]], responses: Sequence[list[int]], ends: Sequence[int], tokenizer) -> Rollout:
    """Prompts and the tokens after them, each response cut behind its first end token, padded on the right."""
    items, ended, texts = [], [], []
    for prompt, response in zip(prompts, responses, strict=True):
        length = next((i + 1 for i, token in enumerate(response) if token in ends), None)
        ended.append(length is not None)
        response = response[:length]
        items.append(
            {"input_ids": prompt + response, "response_mask": [False] * (len(prompt) - 1) + [True] * len(response)}
        )
        texts.append(tokenizer.decode(response, skip_special_tokens=True))
    return Rollout(
        **collate(items, tokenizer.pad_token_id),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
        ended=torch.tensor(ended),
        texts=texts,
    )
