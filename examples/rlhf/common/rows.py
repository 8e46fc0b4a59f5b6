"""Rows of data: JSONL and parquet files or Hugging Face data sets, in TRL's conventions, all checked at the start.

    read_rows(["runs/data/preferences.jsonl", "Dahoas/rm-static"], "preference", bad_rows="skip")

Kinds of rows, after reading; "text | turns" is a string or a list of {"role", "content"}:

    text        {"text"}
    sft         {"messages": turns}, or {"prompt": text | turns, "completion": text | turns}
    preference  {"prompt": text | turns, "chosen": text | turns, "rejected": text | turns}, maybe with a number "margin"
    prompt      {"prompt": text | turns} and the row's other columns, such as "answer"

Columns of other names are taken as well: "question" with "answer" (GSM8K: the answer is what follows "####"),
"response" (Dahoas/rm-static), a prompt that chosen and rejected begin with (TRL's implicit prompt; UltraFeedback).
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from common.sources import RowError, records

KINDS = ("text", "sft", "preference", "prompt")
ROLES = ("system", "user", "assistant", "tool")
SHOWN_BAD_ROWS = 5
SHORT = reprlib.Repr()  # rows are shown cut short
SHORT.maxstring = SHORT.maxother = 40
ASSISTANT_MARK = "\n\nAssistant:"  # in texts of Anthropic/hh-rlhf
RESERVED_COLUMNS = ("prompts", "completions")  # names that reward functions are called with

BadRows = Literal["skip", "refuse"]


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used: the line of a JSONL file, else the number of the row (both from 1), and the reason."""

    source: str
    line: int
    why: str
    row: str = ""  # its beginning

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.why}" + (f": {self.row}" if self.row else "")


def list_bad_rows(bad: Sequence[BadRow]) -> str:
    """The first bad rows, a line each, and how many more there are."""
    lines = [f"  {row}" for row in bad[:SHOWN_BAD_ROWS]]
    if len(bad) > SHOWN_BAD_ROWS:
        lines.append(f"  and {len(bad) - SHOWN_BAD_ROWS} more")
    return "\n".join(lines)


@dataclass
class Rows:
    """Checked rows of one kind, and those left out."""

    kind: str
    rows: list[dict] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)

    def summary(self) -> str:
        """For the console: one line, and one for each of the first bad rows."""
        if not self.bad:
            return f"{len(self.rows)} {self.kind} rows"
        return f"{len(self.rows)} {self.kind} rows, {len(self.bad)} bad rows left out\n{list_bad_rows(self.bad)}"


def read_rows(
    sources: Sequence[str],
    kind: str,
    bad_rows: BadRows = "skip",
    split: str = "train",
    columns: Sequence[str] = (),
    chat: bool = False,
) -> Rows:
    """All rows of all sources, in order.

    Args:
        sources: files (.jsonl, .json, .parquet), folders of them, or NAME[:CONFIGURATION][@SPLIT] of Hugging Face. Of a
            folder (FOLDER[@SPLIT]) the files whose names hold the split's name are read if there are any, else all.
        kind: one of KINDS.
        bad_rows: "skip" leaves out what is malformed, "refuse" raises.
        split: for sources that name none.
        columns: further columns that a row of kind "prompt" must have, such as "answer".
        chat: texts become turns (see conversational), so that the chat template is put around them.

    Raises:
        FileNotFoundError: a source that is not there.
        ValueError: a source that cannot be read at all, no good row, or bad rows and bad_rows="refuse".
    """
    if kind not in KINDS:
        raise ValueError(f"rows of kind {kind!r}; the kinds are {', '.join(KINDS)}")
    if bad_rows not in ("skip", "refuse"):
        raise ValueError(f'bad_rows={bad_rows!r}; give "skip" or "refuse"')
    read = Rows(kind)
    for source in sources:
        for name, line, record in records(source, split):
            try:
                row = checked_row(record, kind, columns)
                read.rows.append(conversational(row, kind) if chat else row)
            except RowError as error:
                shown = "" if record is error else SHORT.repr(record)
                read.bad.append(BadRow(name, line, str(error), shown))
    if read.bad and bad_rows == "refuse":
        raise ValueError(f"{len(read.bad)} bad rows of {len(read.rows) + len(read.bad)}:\n{list_bad_rows(read.bad)}")
    if not read.rows:
        raise ValueError(f"{', '.join(sources)}: no good row of kind {kind}\n{list_bad_rows(read.bad)}".rstrip())
    return read


# --- checking ----------------------------------------------------------------------------------------------------


def checked_row(record: object, kind: str, columns: Sequence[str] = ()) -> dict:
    """A row of kind `kind` in the form of the module's docstring.

    Raises:
        RowError: it is none.
    """
    if isinstance(record, RowError):
        raise record
    if not isinstance(record, dict):
        raise RowError(f"a row is an object with named columns, this is {json_type(record)}")
    given = {name: value for name, value in record.items() if value is not None}  # parquet has all columns in all rows
    if kind == "text":
        return {"text": text_in(given, "text")}
    return (
        {"sft": sft_row, "preference": preference_row}[kind](given) if kind != "prompt" else prompt_row(given, columns)
    )


def sft_row(given: dict) -> dict:
    """ "messages", else a prompt and the first of "completion", "response" and "chosen"."""
    if "messages" in given:
        messages = turns_in(given, "messages")
        if not any(message["role"] == "assistant" for message in messages):
            raise RowError("messages has no turn of the assistant")
        return {"messages": messages}
    names = ("completion", "response", "chosen")
    if "question" in given and "prompt" not in given:
        given, names = {**given, "prompt": given["question"]}, ("completion", "answer")
    name = next((name for name in names if name in given), "completion")
    completion = text_or_turns_in(given, name)
    if isinstance(completion, list) and completion[0]["role"] != "assistant":
        return sft_row({"messages": completion})  # an implicit prompt
    prompt = prompt_in(given)
    must_answer(prompt, completion, name)
    return {"prompt": prompt, "completion": completion}


def preference_row(given: dict) -> dict:
    chosen, rejected = (text_or_turns_in(given, name) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise RowError("chosen and rejected are the same")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise RowError(f"chosen is {json_type(chosen)}, rejected is {json_type(rejected)}")
    if has_implicit_prompt(given):
        prompt, chosen, rejected = without_common_prompt(chosen, rejected)
    else:
        prompt = prompt_in(given)
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        must_answer(prompt, answer, name)
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    if "margin" in given:
        margin = given["margin"]
        if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not math.isfinite(margin):
            raise RowError(f"margin is {margin!r}, not a finite number")
        row["margin"] = float(margin)
    return row


def prompt_row(given: dict, columns: Sequence[str]) -> dict:
    """The prompt, taken if need be from where other kinds of rows have it, and the columns it was not taken from."""
    if "question" in given and "prompt" not in given:
        taken_from, prompt = {"question"}, text_in(given, "question")
        if isinstance(given.get("answer"), str):
            given = {**given, "answer": final_answer(given["answer"])}
    elif "chosen" in given and has_implicit_prompt(given):
        taken_from, prompt = {"prompt", "chosen", "rejected"}, preference_row(given)["prompt"]
    elif "prompt" not in given and "messages" in given:
        taken_from, prompt = {"messages"}, sft_row(given)["messages"]
        while prompt and prompt[-1]["role"] == "assistant":
            prompt.pop()
        if not prompt:
            raise RowError("messages has no turn before the assistant's")
    else:
        taken_from, prompt = {"prompt"}, prompt_in(given)
    row = {"prompt": prompt, **{name: value for name, value in given.items() if name not in taken_from}}
    for name in columns:
        if row.get(name) is None or (isinstance(row[name], str) and not row[name].strip()):
            raise RowError(f"no {name!r}, which the reward function needs")
    for name in RESERVED_COLUMNS:
        if name in row:
            raise RowError(f"a column cannot be called {name!r}: reward functions have that name for something else")
    must_be_utf8(row)
    return row


def has_implicit_prompt(given: dict) -> bool:
    """Whether the prompt is to be taken from "chosen": there is none, or a text beside turns that hold it too."""
    if "prompt" not in given:
        return True
    chosen = given.get("chosen")
    turns = isinstance(given["prompt"], str) and isinstance(chosen, list) and len(chosen) > 0
    return turns and isinstance(chosen[0], dict) and chosen[0].get("role") != "assistant"


def final_answer(solution: str) -> str:
    """Return what follows "####" in a solution of GSM8K, without the commas that group thousands; else all of it."""
    _, marker, answer = solution.rpartition("####")
    return answer.strip().replace(",", "") if marker else solution.strip()


def prompt_in(given: dict) -> str | list[dict]:
    """The column "prompt"; turns must not end with the assistant's.

    Raises:
        RowError: otherwise.
    """
    prompt = text_or_turns_in(given, "prompt")
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        raise RowError("prompt ends with a turn of the assistant; nothing is left to answer")
    return prompt


def must_answer(prompt: str | list, answer: str | list, name: str) -> None:
    """Raises RowError unless both are texts, or both turns and the answer begins and ends with an assistant's."""
    if isinstance(prompt, str) != isinstance(answer, str):
        raise RowError(f"prompt is {json_type(prompt)}, {name} is {json_type(answer)}")
    if not answer or (isinstance(answer, str) and not answer.strip()):
        raise RowError(f"{name} is empty")
    if isinstance(answer, list):
        for place, turn in (("begins", answer[0]), ("ends", answer[-1])):
            if turn["role"] != "assistant":
                raise RowError(f"{name} {place} with a turn of role {turn['role']}, not assistant")


def without_common_prompt(chosen: str | list, rejected: str | list) -> tuple:
    """(prompt, chosen, rejected) of two conversations or texts that begin in the same way.

    Of texts the prompt ends before the last space that both share, as in TRL, but never within a word; of texts like
    "Human: ... Assistant: ..." (Anthropic/hh-rlhf), after the last "Assistant:" that both share.

    Raises:
        RowError: they do not begin in the same way.
    """
    shorter = min(len(chosen), len(rejected))
    common = next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter)
    if isinstance(chosen, str):
        turn = chosen.rfind(ASSISTANT_MARK, 0, common)
        spaces = [chosen.rfind(space, 0, common) for space in " \n\t"]
        common = turn + len(ASSISTANT_MARK) if turn >= 0 else max(0, *spaces)
    prompt, chosen, rejected = chosen[:common], chosen[common:], rejected[common:]
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise RowError("no prompt, and chosen and rejected do not begin in the same way")
    return prompt, chosen, rejected


def text_in(given: dict, name: str) -> str:
    """The text in a column; neither missing nor empty."""
    value = text_or_turns_in(given, name)
    if not isinstance(value, str):
        raise RowError(f"{name} is {json_type(value)}, not a text")
    return value


def turns_in(given: dict, name: str) -> list[dict]:
    """The turns in a column; neither missing nor empty."""
    value = text_or_turns_in(given, name)
    if isinstance(value, str):
        raise RowError(f'{name} is a text, not a list of {{"role", "content"}}')
    return value


def text_or_turns_in(given: dict, name: str) -> str | list[dict]:
    """The value of a column that is a text or turns; of turns only "role" and "content" are kept.

    Raises:
        RowError: it is missing, empty, of another type, has an unknown role or is not UTF-8.
    """
    if name not in given:
        raise RowError(f"no column {name!r} (there are {', '.join(given) or 'none'})")
    value = given[name]
    if not isinstance(value, (str, list)):
        raise RowError(f'{name} is {json_type(value)}, neither a text nor a list of {{"role", "content"}}')
    if not value or (isinstance(value, str) and not value.strip()):
        raise RowError(f"{name} is empty")
    must_be_utf8(value)
    return value if isinstance(value, str) else [checked_turn(turn, name, i) for i, turn in enumerate(value, 1)]


def checked_turn(turn: object, name: str, number: int) -> dict:
    where = f"turn {number} of {name}"
    if not isinstance(turn, dict):
        raise RowError(f'{where} is {json_type(turn)}, not {{"role", "content"}}')
    role, content = turn.get("role"), turn.get("content")
    if role not in ROLES:
        raise RowError(f"{where} has the role {role!r}; the roles are {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise RowError(f"{where} has {json_type(content)} as its content, not a text")
    if not content.strip() and role != "system":
        raise RowError(f"{where} is empty")
    return {"role": role, "content": content}


def must_be_utf8(value: object) -> None:
    """Raises RowError if a text in `value` holds half a surrogate pair: JSON can say it, no tokenizer takes it."""
    pending = [value]  # no recursion: a row may be nested as deep as the parser lets it
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise RowError(f"half a surrogate pair at character {error.start + 1} of a text") from error
        elif isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, (list, tuple)):
            pending += value


def json_type(value: object) -> str:
    """Return what a value is, in JSON's words."""
    words = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return words.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


# --- texts as conversations --------------------------------------------------------------------------------------


TURNS = {
    "text": {},
    "sft": {"prompt": "user", "completion": "assistant"},
    "preference": {"prompt": "user", "chosen": "assistant", "rejected": "assistant"},
    "prompt": {"prompt": "user"},
}


def conversational(row: dict, kind: str) -> dict:
    """A row of kind `kind` with its texts as turns: a prompt the user's, an answer the assistant's. Turns stay."""
    roles = TURNS[kind]
    return {
        name: [{"role": roles[name], "content": value}] if name in roles and isinstance(value, str) else value
        for name, value in row.items()
    }
