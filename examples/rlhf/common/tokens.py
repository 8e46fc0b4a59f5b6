"""Rows as token ids with the tokenizer's chat template, and batches of them: padding and masks.

    encoded = encode_rows(encode_sft, rows.rows, tokenizer, max_tokens=512)
    batch = collate([encoded.items[i] for i in order.batch(step, rank, world, size)], tokenizer.pad_token_id)

An item is {"input_ids": list of L ids, "response_mask": list of L - 1 bools}; position t of the mask speaks of token
t + 1, as everything "per token" does here: True where that token is one the model has to learn to choose.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from common.rows import BadRow, BadRows, RowError, list_bad_rows

GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")

Item = dict[str, list]


class TooLong(RowError):
    """A row with more tokens than there may be."""


@dataclass
class Encoded:
    """Rows as token ids, and those left out: too long (counted), or not to be encoded (`line`: number of the row)."""

    items: list = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  # items[i] comes from row kept[i], counted from 0
    too_long: int = 0
    bad: list[BadRow] = field(default_factory=list)

    def summary(self) -> str:
        """For the console: one line, and one for each of the first bad rows."""
        line = f"{len(self.items)} rows encoded, {self.too_long} left out as too long"
        return f"{line}, {len(self.bad)} as bad\n{list_bad_rows(self.bad)}" if self.bad else line


def encode_rows(
    encode: Callable[..., dict],
    rows: Sequence[dict],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    bad_rows: BadRows = "skip",
    **options,
) -> Encoded:
    """`encode` (encode_sft, encode_preference or encode_prompt) applied to every row.

    Rows with more than `max_tokens` tokens are counted and left out. Rows that the chat template refuses, or from which
    nothing could be learned, are left out and shown (bad_rows="skip") or refused.

    Raises:
        ValueError: bad rows and bad_rows="refuse"; or no row is left.
    """
    encoded = Encoded()
    for index, row in enumerate(rows):
        try:
            encoded.items.append(encode(row, tokenizer, max_tokens, **options))
            encoded.kept.append(index)
        except TooLong:
            encoded.too_long += 1
        except RowError as error:
            encoded.bad.append(BadRow("row", index + 1, str(error)))
    if encoded.bad and bad_rows == "refuse":
        raise ValueError(f"{len(encoded.bad)} of {len(rows)} rows cannot be encoded:\n{list_bad_rows(encoded.bad)}")
    if not encoded.items:
        raise ValueError(
            f"no row is left of {len(rows)}: {encoded.too_long} have more than {max_tokens} tokens, {len(encoded.bad)} "
            f"cannot be encoded\n{list_bad_rows(encoded.bad)}".rstrip()
        )
    return encoded


def encode_sft(row: dict, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Item:
    """The tokens of a row of kind "sft"; the mask is True on the completion, or on every turn of the assistant.

    A completion that is a text is ended by the end-of-text token, turns as the chat template does it.

    Raises:
        RowError: see encode_rows. TooLong: more than `max_tokens` tokens.
        ValueError: turns, and the tokenizer has no chat template.
    """
    if "messages" in row:
        return as_item(*conversation(tokenizer, row["messages"]), max_tokens)
    return as_item(*answered(tokenizer, row["prompt"], row["completion"]), max_tokens)


def encode_preference(row: dict, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> dict[str, Item]:
    """{"chosen": item, "rejected": item} of a row of kind "preference"; both begin with the same tokens of the prompt.

    A row's "margin" comes along. Raises: as encode_sft.
    """
    pair = {
        name: as_item(*answered(tokenizer, row["prompt"], row[name]), max_tokens) for name in ("chosen", "rejected")
    }
    if pair["chosen"]["input_ids"] == pair["rejected"]["input_ids"]:
        raise RowError("chosen and rejected have the same tokens")
    return pair | ({"margin": row["margin"]} if "margin" in row else {})


def encode_prompt(
    row: dict, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int, truncate: bool = False
) -> dict[str, list[int]]:
    """{"input_ids"} from which the model goes on: a text as it is, turns with the template's generation prompt.

    `truncate` keeps the last `max_prompt_tokens` tokens of a longer prompt, which may cut off a template's beginning.

    Raises: as encode_sft.
    """
    ids = prompt_ids(tokenizer, row["prompt"])
    if len(ids) > max_prompt_tokens and not truncate:
        raise TooLong(f"{len(ids)} tokens")
    if not ids:
        raise RowError("the prompt has no tokens")
    return {"input_ids": ids[-max_prompt_tokens:]}


def pack_text(rows: Sequence[dict], tokenizer: PreTrainedTokenizerBase, length: int) -> list[Item]:
    """Rows of kind "text", each ended by the end-of-text token, as one stream cut into items of `length` tokens.

    Every token but an item's first is learned. The rest of the stream that fills no item is left out.

    Raises:
        ValueError: there is not one whole item.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    stream = [token for ids in text_ids(tokenizer, *(row["text"] for row in rows)) for token in ids + end]
    if len(stream) < length:
        raise ValueError(f"{len(stream)} tokens of text are not enough for one sequence of {length}")
    starts = range(0, len(stream) - length + 1, length)
    return [{"input_ids": stream[start : start + length], "response_mask": [True] * (length - 1)} for start in starts]


# --- tokens of one row -------------------------------------------------------------------------------------------


def as_item(ids: list[int], learned: list[bool], max_tokens: int) -> Item:
    """An item from ids and, for each of them, whether it is learned."""
    if len(ids) > max_tokens:
        raise TooLong(f"{len(ids)} tokens")
    if not any(learned[1:]):  # the first token follows nothing: no model chooses it
        raise RowError("no token of the answer is left to learn: the tokenizer or its chat template drops it")
    return {"input_ids": ids, "response_mask": learned[1:]}


def text_ids(tokenizer: PreTrainedTokenizerBase, *texts: str) -> list[list[int]]:
    """The tokens of each text alone. One call for several: a call costs 0.1 ms, a short text next to nothing."""
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []


@functools.lru_cache(maxsize=8)
def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The begin-of-text token, if the tokenizer puts one before a text. (Some also put another after it.)"""
    added = list(tokenizer("")["input_ids"])
    return added[:1] if added and added[0] == tokenizer.bos_token_id else []


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict]) -> list[int]:
    """The tokens before an answer."""
    if isinstance(prompt, str):
        return beginning(tokenizer) + text_ids(tokenizer, prompt)[0]
    return templated(tokenizer, prompt, add_generation_prompt=True)["input_ids"]


def answered(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict], answer: str | list[dict]):
    """(ids, whether each is learned) of a prompt and its answer; ids begin with prompt_ids(prompt)."""
    if not isinstance(prompt, str):
        return conversation(tokenizer, prompt + answer, answered_from=len(prompt))
    before, ids = (beginning(tokenizer) + ids for ids in text_ids(tokenizer, prompt, prompt + answer))
    if ids[: len(before)] != before:
        # A token spans the border, such as a space at the prompt's end. In generation the model is given the prompt's
        # own tokens, so it has to learn to go on from these.
        ids = before + text_ids(tokenizer, answer)[0]
        if tokenizer.decode(ids) != tokenizer.decode(before) + answer:
            raise RowError(
                "the tokens of prompt and completion do not join: move the space between them from the prompt's end to "
                "the completion's beginning"
            )
    if tokenizer.eos_token_id is not None and ids[-1] != tokenizer.eos_token_id:
        ids.append(tokenizer.eos_token_id)
    return ids, [False] * len(before) + [True] * (len(ids) - len(before))


def conversation(tokenizer: PreTrainedTokenizerBase, turns: list[dict], answered_from: int = 0):
    """(ids, whether each is learned) of turns: learned are those of the assistant, from number `answered_from` on.

    Which tokens those are, the template's {% generation %} markers tell; without markers, the lengths of the
    conversation up to each turn of the assistant and up to its end.
    """
    if GENERATION_MARKER.search(chat_template(tokenizer)):
        rendered = templated(tokenizer, turns, return_assistant_tokens_mask=True)
        ids, learned = rendered["input_ids"], [bool(mark) for mark in rendered["assistant_masks"]]
        if answered_from:
            before = beginning_of(ids, tokenizer, turns[:answered_from])
            learned[:before] = [False] * before
        return ids, learned
    ids = templated(tokenizer, turns)["input_ids"]
    learned = [False] * len(ids)
    for number, turn in enumerate(turns):
        if turn["role"] == "assistant" and number >= answered_from:
            first = beginning_of(ids, tokenizer, turns[:number])
            last = len(ids) if number == len(turns) - 1 else beginning_of(ids, tokenizer, turns[: number + 1], False)
            learned[first:last] = [True] * (last - first)
    return ids, learned


def beginning_of(
    ids: list[int], tokenizer: PreTrainedTokenizerBase, turns: list[dict], open_answer: bool = True
) -> int:
    """How many tokens the first turns have, with the generation prompt if `open_answer`.

    Raises:
        RowError: `ids`, the whole conversation, do not begin with them.
    """
    before = templated(tokenizer, turns, add_generation_prompt=open_answer)["input_ids"]
    if ids[: len(before)] != before:
        raise RowError(
            f"with this chat template a conversation does not begin with its own first {len(turns)} turns, so the "
            "answer's tokens cannot be told; put {% generation %} ... {% endgeneration %} around the assistant's text "
            "in the tokenizer's chat_template, leave out earlier turns of the assistant, or use texts instead of turns"
        )
    return len(before)


def chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's chat template.

    Raises:
        ValueError: it has none.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            "the rows are conversations, but the tokenizer has no chat template: set tokenizer.chat_template (or add "
            "chat_template.jinja to its folder), or use rows whose prompts and answers are texts"
        )
    return tokenizer.get_chat_template()


def templated(tokenizer: PreTrainedTokenizerBase, turns: list[dict], **options) -> dict[str, list[int]]:
    """apply_chat_template to token ids.

    Raises:
        RowError: the template refuses these turns.
    """
    chat_template(tokenizer)
    if not turns:
        raise RowError("the conversation begins with the assistant's turn: no turn comes before it")
    try:
        return tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True, **options)
    except TemplateError as error:
        raise RowError(f"the chat template refuses it: {error}") from error


# --- batches -----------------------------------------------------------------------------------------------------


def padded(sequences: Sequence[Sequence], fill: int | bool, dtype: torch.dtype, left: bool = False) -> torch.Tensor:
    """[B, longest]: the sequences, filled up with `fill` after their ends, or before their beginnings."""
    longest = max(map(len, sequences))
    batch = torch.full((len(sequences), longest), fill, dtype=dtype)
    for row, sequence in zip(batch, sequences):
        start = longest - len(sequence) if left else 0
        row[start : start + len(sequence)] = torch.tensor(sequence, dtype=dtype)
    return batch


def collate(items: Sequence[Item], pad_id: int) -> dict[str, torch.Tensor]:
    """Right-padded for training: input_ids int64 [B, L], attention_mask int64 [B, L], response_mask bool [B, L-1].

    The masks come from the lengths; `pad_id` may be a token that texts have, such as the end-of-text token.
    """
    ids = [item["input_ids"] for item in items]
    return {
        "input_ids": padded(ids, pad_id, torch.int64),
        "attention_mask": padded([[1] * len(one) for one in ids], 0, torch.int64),
        "response_mask": padded([item["response_mask"] for item in items], False, torch.bool),
    }


def collate_pairs(items: Sequence[dict[str, Item]], pad_id: int) -> dict[str, torch.Tensor]:
    """collate() of pairs for one pass of the model: 2B sequences, first the chosen ones, then the rejected.

    If any pair has one, also "margin", fp32 [B], 0 for pairs without.
    """
    batch = collate([item["chosen"] for item in items] + [item["rejected"] for item in items], pad_id)
    if any("margin" in item for item in items):
        batch["margin"] = torch.tensor([item.get("margin", 0.0) for item in items], dtype=torch.float32)
    return batch


def collate_left(items: Sequence[dict[str, list[int]]], pad_id: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts for generation: input_ids int64 [B, L], attention_mask int64 [B, L], from the lengths."""
    ids = [item["input_ids"] for item in items]
    return {
        "input_ids": padded(ids, pad_id, torch.int64, left=True),
        "attention_mask": padded([[1] * len(one) for one in ids], 0, torch.int64, left=True),
    }
