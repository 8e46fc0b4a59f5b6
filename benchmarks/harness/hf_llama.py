"""transformers' Llama in the sizes of benchmarks."""

from __future__ import annotations

from torch import nn

from benchmarks.harness.llama import EPSILON, ROPE_BASE
from benchmarks.harness.sizes import Size


def llama_config(size: Size):
    """transformers' configuration of a Llama."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        rms_norm_eps=EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        max_position_embeddings=1 << 20,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
        use_cache=False,
    )


def sharded_llama(size: Size, config: dict) -> nn.Module:
    """A Llama with torch's own random weights, in shards from the beginning: no rank holds more than a layer of it."""
    import deepspeed
    from transformers import LlamaForCausalLM

    with deepspeed.zero.Init(config_dict_or_path=config):
        return LlamaForCausalLM(llama_config(size))
