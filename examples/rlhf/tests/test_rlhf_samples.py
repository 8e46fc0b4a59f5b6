"""A policy's responses to prompts of its rows: which prompts, when, and what is counted."""

import importlib
from types import SimpleNamespace

import pytest
from common.arguments import check_sequences
from common.samples import Samples, prompt_of
from common.supervised import tokens_of
from common.tokenizer import make_byte_tokenizer
from common.tokens import encode_preference, encode_sft

TOKENIZER = make_byte_tokenizer()
ROWS = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(6)]
TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "goodbye"},
]


def test_prompts_end_where_the_answer_begins():
    item = encode_sft({"prompt": "2+3=", "completion": "5"}, TOKENIZER, 64)
    assert TOKENIZER.decode(prompt_of(item)) == "2+3=" and len(prompt_of(item)) == 4
    turns = encode_sft({"messages": TURNS}, TOKENIZER, 256)
    asked = TOKENIZER.apply_chat_template(TURNS[:1], add_generation_prompt=True, return_dict=False)
    assert prompt_of(turns) == asked, "the first turn of the assistant"
    pair = encode_preference({"prompt": "2+3=", "chosen": "5", "rejected": "66"}, TOKENIZER, 64)
    assert prompt_of(pair["chosen"]) == prompt_of(pair["rejected"])


def test_tokens_are_those_that_are_computed():
    item = encode_sft({"prompt": "2+3=", "completion": "5"}, TOKENIZER, 64)
    assert tokens_of(item) == 6, "four of the prompt, one of the answer, the end"
    pair = encode_preference({"prompt": "2+3=", "chosen": "5", "rejected": "66", "margin": 1.0}, TOKENIZER, 64)
    assert tokens_of(pair | {"reference": [0.0, 0.0]}) == 6 + 7


def test_every_so_many_steps(monkeypatch):
    module = importlib.import_module("common.samples")
    asked, shown = [], []

    def roll_out(policy, tokenizer, prompts, sampling, seed):
        asked.append((policy, prompts, sampling.greedy, sampling.max_new_tokens))
        return SimpleNamespace(texts=["x"] * len(prompts))

    monkeypatch.setattr(module, "roll_out", roll_out)
    monitor = SimpleNamespace(sample=lambda *what: shown.append(what))
    items = [encode_sft(row, TOKENIZER, 64) for row in ROWS]
    samples = Samples(SimpleNamespace(sample_every=3, sample_tokens=7), "policy", TOKENIZER, items)
    for step in range(1, 8):
        samples.after(step, monitor)
    texts = [row["prompt"] for row in ROWS[:4]]
    assert shown == [(3, texts, ["x"] * 4), (6, texts, ["x"] * 4)]
    assert asked == [("policy", [prompt_of(item) for item in items[:4]], True, 7)] * 2
    never = Samples(SimpleNamespace(sample_every=0, sample_tokens=7), "policy", TOKENIZER, items)
    never.after(3, monitor)
    assert len(shown) == 2


def test_positions_for_samples():
    text = SimpleNamespace(max_position_embeddings=100)
    config = SimpleNamespace(get_text_config=lambda: text)
    check_sequences(SimpleNamespace(max_tokens=100, sample_every=0, sample_tokens=64), config)
    check_sequences(SimpleNamespace(max_tokens=36, sample_every=1, sample_tokens=64), config)
    with pytest.raises(ValueError, match="--max_tokens and --sample_tokens make 101 tokens, but the model has 100"):
        check_sequences(SimpleNamespace(max_tokens=37, sample_every=1, sample_tokens=64), config)
    with pytest.raises(ValueError, match="--max_tokens make 101 tokens"):
        check_sequences(SimpleNamespace(max_tokens=101, sample_every=0, sample_tokens=64), config)
