"""Prompts to roll out from: their rows, tokens and texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from common.batch import Batch
from common.rows import read_rows
from common.tokens import encode_prompt, encode_rows


@dataclass
class Prompts(Batch):
    """As many of each."""

    columns: list[dict]  # the rows, with the columns that reward functions take
    ids: list[list[int]]
    texts: list[str]  # as a person reads them, without the chat template's tokens


def load_prompts(arguments, sources: Sequence[str], tokenizer, columns: Sequence[str], split: str = "train") -> Prompts:
    """The prompts of all sources; what is left out is counted and said on rank 0.

    Args:
        arguments: bad_rows, chat, max_prompt_tokens.
        columns: that the reward functions need.
    """
    read = read_rows(sources, "prompt", arguments.bad_rows, split, columns, arguments.chat)
    encoded = encode_rows(encode_prompt, read.rows, tokenizer, arguments.max_prompt_tokens, arguments.bad_rows)
    if dist.get_rank() == 0:
        print(f"{', '.join(sources)}: {read.summary()}; {encoded.summary()}", flush=True)
    rows, ids = [read.rows[index] for index in encoded.kept], [item["input_ids"] for item in encoded.items]
    texts = [
        row["prompt"] if isinstance(row["prompt"], str) else tokenizer.decode(tokens, skip_special_tokens=True)
        for row, tokens in zip(rows, ids)
    ]
    return Prompts(rows, ids, texts)
