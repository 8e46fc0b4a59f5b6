"""Small models with random weights, and a few rows of data, under names of the Hugging Face hub.

    python tests/upstream/hub.py FOLDER

Tests of libraries name what they download. Here FOLDER becomes a cache as the hub's library keeps one (HF_HOME), so
that the names are found in it and nothing is downloaded. The architectures are those of the names, the sizes are not:
a test that compares a loss or an accuracy with what a trained model has cannot hold.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import datasets
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

REVISION = "0" * 40
SPLITS = ("train", "test")
VOCABULARY = 1024  # tests draw token ids below 1000
CHAT = (
    "{% for turn in messages %}<|{{ turn.role }}|>{{ turn.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}


def _decoder(config: Callable, **more) -> Callable:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return lambda: config(vocab_size=VOCABULARY, **TOKENS, **{**sizes, "num_key_value_heads": 2, **more})


def _gpt2() -> transformers.GPT2Config:
    return transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, **TOKENS)


def _gptj() -> transformers.GPTJConfig:
    return transformers.GPTJConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, **TOKENS)


def _t5() -> transformers.T5Config:
    return transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, decoder_start_token_id=0
    )


_MOE = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
QWEN2 = _decoder(transformers.Qwen2Config)
# {name: (class of the weights or None, config)}
MODELS = {
    "sshleifer/tiny-gpt2": (transformers.GPT2LMHeadModel, _gpt2),
    "gpt2": (transformers.GPT2LMHeadModel, _gpt2),
    "hf-internal-testing/tiny-random-gpt2": (transformers.GPT2LMHeadModel, _gpt2),
    "hf-internal-testing/tiny-random-gptj": (transformers.GPTJForCausalLM, _gptj),
    "hf-internal-testing/tiny-random-LlamaForCausalLM": (
        transformers.LlamaForCausalLM,
        _decoder(transformers.LlamaConfig),
    ),
    "patrickvonplaten/t5-tiny-random": (transformers.T5ForConditionalGeneration, _t5),
    "peft-internal-testing/tiny-random-qwen-1.5-MoE": (
        transformers.Qwen2MoeForCausalLM,
        _decoder(transformers.Qwen2MoeConfig, **_MOE),
    ),
    "apple/mobilevit-xx-small": (None, transformers.MobileViTConfig),
    "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5": (transformers.Qwen2ForCausalLM, QWEN2),
    "trl-internal-testing/tiny-Qwen2ForSequenceClassification-2.5": (
        transformers.Qwen2ForSequenceClassification,
        lambda: _decoder(transformers.Qwen2Config, num_labels=1)(),
    ),
}


def _rows() -> dict[str, list[dict]]:
    """{configuration of the data set: rows}, in the forms that TRL's data sets have."""
    asked = [f"What is better than {word}?" for word in ("ugly", "implicit", "complex", "nested", "dense", "never")]
    good = [f"{word} is better." for word in ("Beautiful", "Explicit", "Simple", "Flat", "Sparse", "Now")]
    bad = ["Nothing is better than that."] * len(asked)

    def turn(role: str, text: str) -> dict:
        return {"role": role, "content": text}

    both = list(zip(asked, good, bad))
    return {
        "standard_language_modeling": [{"text": f"{q} {a}"} for q, a, _ in both],
        "standard_preference": [{"prompt": q, "chosen": f" {a}", "rejected": f" {b}"} for q, a, b in both],
        "standard_unpaired_preference": [
            {"prompt": q, "completion": f" {a if n % 2 else b}", "label": bool(n % 2)}
            for n, (q, a, b) in enumerate(both)
        ],
        "conversational_prompt_only": [{"prompt": [turn("user", q)]} for q in asked],
        "conversational_implicit_prompt_preference": [
            {
                "chosen": [turn("user", q), turn("assistant", a)],
                "rejected": [turn("user", q), turn("assistant", b)],
            }
            for q, a, b in both
        ],
    }


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A token for each byte, and one for each role of a conversation."""
    vocabulary = {
        token: number for number, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    bytes_of = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_of.pre_tokenizer, bytes_of.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytes_of, pad_token="<pad>", eos_token="<|end|>", bos_token="<|end|>", model_max_length=512
    )
    made.add_special_tokens({"additional_special_tokens": list(SPECIAL[2:])})
    made.chat_template = CHAT
    return made


def make(folder: Path) -> None:
    """Fill the cache, but for what it has."""
    for name, (kind, config_of) in MODELS.items():
        entry = folder / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = entry / "snapshots" / REVISION
        if (entry / "refs/main").exists():
            continue
        torch.manual_seed(0)
        (kind(config_of()) if kind else config_of()).save_pretrained(snapshot)
        if kind:
            tokenizer().save_pretrained(snapshot)
        (entry / "refs").mkdir(parents=True)
        (entry / "refs/main").write_text(REVISION)
    for configuration, rows in _rows().items():
        kept = folder / "datasets" / "trl-internal-testing___zen" / configuration / "0.0.0" / REVISION
        if kept.exists():
            continue
        data = datasets.Dataset.from_list(rows * 3)
        kept.mkdir(parents=True)
        info = datasets.DatasetInfo(
            features=data.features,
            builder_name="parquet",
            dataset_name="zen",
            config_name=configuration,
            version="0.0.0",
            splits=[{"name": split, "num_examples": len(data), "dataset_name": "zen"} for split in SPLITS],
        )
        for split in SPLITS:
            with datasets.arrow_writer.ArrowWriter(path=str(kept / f"zen-{split}.arrow"), features=data.features) as to:
                for row in data:
                    to.write(row)
                to.finalize()
        info.write_to_directory(str(kept))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
