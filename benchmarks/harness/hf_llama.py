"""transformers' Llama and Qwen3-MoE in the sizes of benchmarks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.harness.llama import EPSILON, ROPE_BASE, Llama
from benchmarks.harness.sizes import MixtureSize, Size


def _of_both(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "rms_norm_eps": EPSILON,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},
        "max_position_embeddings": 1 << 20,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
        "use_cache": False,
    }


def llama_config(size: Size):
    """transformers' configuration of a Llama."""
    from transformers import LlamaConfig

    return LlamaConfig(intermediate_size=size.intermediate, **_of_both(size))


def mixture_config(size: MixtureSize):
    """transformers' configuration of a Qwen3-MoE."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        moe_intermediate_size=size.intermediate,
        head_dim=size.head_dim,
        num_experts=size.experts,
        num_experts_per_tok=size.chosen,
        norm_topk_prob=True,
        **_of_both(size),
    )


def maker_of(size: Size) -> Callable[[], nn.Module]:
    """A Llama or a mixture of a size, with torch's own random weights, when it is called.

    Classes of mixtures that are imported in zero.Init lose what transformers' decorators give them.
    """
    if isinstance(size, MixtureSize):
        from transformers import Qwen3MoeForCausalLM

        return lambda: Qwen3MoeForCausalLM(mixture_config(size))
    from transformers import LlamaForCausalLM

    return lambda: LlamaForCausalLM(llama_config(size))


def save_random(size: MixtureSize, gb: float, folder: str) -> None:
    """Write a checkpoint of a mixture in bf16 with transformers' random weights, in files of at most `gb`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(mixture_config(size), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=int(gb * 1e9))


class Mixture(nn.Module):
    """A Qwen3-MoE; `forward` returns the mean loss of predicting every next token, as that of `Llama` does."""

    def __init__(self, size: MixtureSize) -> None:
        super().__init__()
        self.model = maker_of(size)()
        self._no_split_modules = self.model._no_split_modules

    def forward(self, tokens: Tensor) -> Tensor:
        """fp32 [] of int64 tokens [batch, length]."""
        return self.model(input_ids=tokens, labels=tokens).loss


def with_loss(size: Size, checkpointing: bool = False, unit_layers: int = 1) -> nn.Module:
    """A `Llama` or a `Mixture` of a size.

    Raises:
        ValueError: a mixture with one of the options of `Llama`.
    """
    if not isinstance(size, MixtureSize):
        return Llama(size, checkpointing, unit_layers)
    if checkpointing or unit_layers > 1:
        raise ValueError("a mixture keeps what its layers compute, and its layers are gathered one at a time")
    return Mixture(size)


def sharded_model(size: Size, config: dict) -> nn.Module:
    """A model of a size in shards from the beginning: no rank holds more than a layer of it."""
    import deepspeed

    make = maker_of(size)
    with _random_experts(size), deepspeed.zero.Init(config_dict_or_path=config):
        return make()


@contextlib.contextmanager
def _random_experts(size: Size) -> Iterator[None]:
    """Packed experts have values when they are made: transformers writes them later, into what is cut by then."""
    if not isinstance(size, MixtureSize):
        yield
        return
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    plain = Qwen3MoeExperts.__init__

    @functools.wraps(plain)
    def initialized(self, config, *args, **kwargs):
        plain(self, config, *args, **kwargs)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=config.initializer_range)

    with mock.patch.object(Qwen3MoeExperts, "__init__", initialized):
        yield
