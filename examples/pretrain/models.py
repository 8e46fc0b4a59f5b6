"""The model of a run: a Hugging Face checkpoint, or a small Llama with random weights."""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig

sys.path.append(str(Path(__file__).resolve().parents[1]))  # examples/

from basics import training_dtype

BYTE_VOCABULARY = 256

# name: (hidden size, layers, heads, feed-forward size). Bytes are the tokens: no tokenizer to download.
SMALL_LLAMAS = {
    "llama-tiny": (32, 2, 2, 88),  # 42 thousand parameters: tests
    "llama-small": (192, 2, 6, 512),  # 1.0 million: the demo on a CPU
    "llama-base": (768, 12, 12, 2048),  # 85 million: one or a few GPUs
}


def is_small(name: str) -> bool:
    """Whether `name` is one of the configurations of this file, trained on bytes from random weights."""
    return name in SMALL_LLAMAS


def make_model(name: str, ds_config: dict, sequence_length: int) -> PreTrainedModel:
    """Build a causal language model, already partitioned over the ranks where the ds_config has ZeRO stage 3.

    Call it after torch.distributed is initialized. `name` is a key of SMALL_LLAMAS, a Hugging Face model name, or a
    folder that save_pretrained() wrote.
    """
    # While this object lives, transformers builds and loads models under deepspeed.zero.Init when the stage is 3, so no
    # rank ever holds the whole model, and initializes random weights through gathers.
    partitioning = HfDeepSpeedConfig(ds_config)
    dtype = training_dtype(ds_config)
    if is_small(name):
        hidden, layers, heads, feed_forward = SMALL_LLAMAS[name]
        config = LlamaConfig(
            vocab_size=BYTE_VOCABULARY,
            hidden_size=hidden,
            intermediate_size=feed_forward,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=sequence_length,
            bos_token_id=None,
            eos_token_id=0,
            tie_word_embeddings=False,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    del partitioning
    model.config.use_cache = False
    return model
