"""Write what the RLHF examples need where nothing can be downloaded: data, and with --model a random small Llama.

    python examples/rlhf/make_data.py --out runs/data --seed 0 --model small

    tasks_train.jsonl   prompt, answer, kind: tasks with exact answers, for rewards (common/tasks.py)
    tasks_test.jsonl    the same; none of these prompts is in any other file
    sft.jsonl           prompt, completion (with --chat: messages), from the training tasks
    preferences.jsonl   prompt, chosen, rejected, from the training tasks
    text.jsonl          text: the source of Python's standard library, in documents of at most 2048 characters
    MODEL/              config, weights and byte-level tokenizer, to be loaded by from_pretrained

A seed gives the same files, byte for byte; text.jsonl depends on the version of Python as well.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # examples/

import torch
from common.rows import conversational
from common.tasks import KINDS, Difficulty, make_tasks, preference_rows, prompt_rows, sft_rows
from common.tokenizer import make_byte_tokenizer
from options import Parser, finite, generator_seed, new_folder, refusals, whole
from pretrain.data import standard_library_files
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

DOCUMENT_CHARACTERS = 2048
POSITIONS = 1024
VOCABULARY = 320  # the tokenizer's 261, rounded up to a multiple of 64


@dataclass(frozen=True)
class Size:
    """The shape of a Llama. Sizes are multiples of 64, so that rows are whole blocks of every quantized format."""

    hidden: int
    layers: int
    heads: int
    feed_forward: int


SIZES = {
    "tiny": Size(64, 2, 2, 128),  # 0.12 million parameters: tests
    "small": Size(192, 2, 6, 512),  # 1.01 million: the demo on a CPU
    "base": Size(1024, 8, 16, 2816),  # 103 million: one GPU
}


def command_line() -> Parser:
    """The command line."""
    usual = Difficulty()
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=new_folder, default="runs/data", help="folder for the files")
    parser.add_argument("--seed", type=generator_seed, default=0, help="of tasks, wrong answers and weights")
    parser.add_argument("--train", type=whole(1), default=20_000, help="training tasks")
    parser.add_argument("--test", type=whole(1), default=1_000, help="held-out tasks, at least 500 for an evaluation")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), help="kinds of tasks")
    parser.add_argument("--below", type=whole(2), default=usual.below, help="numbers are smaller than this")
    parser.add_argument("--shortest", type=whole(1), default=usual.shortest, help="letters in a word, at least")
    parser.add_argument("--longest", type=whole(2), default=usual.longest, help="letters in a word, at most")
    parser.add_argument("--letters", type=whole(2, 26), default=usual.letters, help="different letters in all words")
    parser.add_argument(
        "--sft-wrong", type=finite(least=0, most=1), default=0.0, help="share of wrong completions in sft.jsonl"
    )
    parser.add_argument("--text-characters", type=whole(0), default=4_000_000, help="characters in text.jsonl, about")
    parser.add_argument("--chat", action="store_true", help="prompts and answers as turns of a conversation")
    parser.add_argument("--model", choices=list(SIZES), help="also write a random Llama of this size to OUT/MODEL")
    return parser


def write_rows(path: Path, rows: Iterable[dict]) -> int:
    """JSON lines in UTF-8, the same bytes on every system; returns how many."""
    count = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def documents(files: Sequence[Path], characters: int) -> Iterator[dict]:
    """Rows {"text"}: whole lines of the files in turn, up to about `characters` in all."""
    written = 0
    for path in files:
        for text in cut(path.read_text(encoding="utf-8", errors="replace"), DOCUMENT_CHARACTERS):
            if written >= characters:
                return
            if text.strip():
                written += len(text)
                yield {"text": text}


def cut(text: str, characters: int) -> Iterator[str]:
    """The text in pieces of at most `characters`, cut after ends of lines where lines are not longer than that."""
    while len(text) > characters:
        end = text.rfind("\n", 0, characters) + 1 or characters
        yield text[:end]
        text = text[end:]
    yield text


def make_model(size: Size, tokenizer, seed: int) -> PreTrainedModel:
    """A Llama in fp32 with random weights that `seed` fixes; the generator of the process is left as it was."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.feed_forward,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=POSITIONS,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def main() -> None:
    arguments = command_line().parse_args()
    with refusals():
        difficulty = Difficulty(arguments.below, arguments.shortest, arguments.longest, arguments.letters)
        training, held_out = make_tasks(arguments.train, arguments.test, arguments.seed, arguments.kinds, difficulty)
    files = {
        "tasks_train.jsonl": ("prompt", prompt_rows(training)),
        "tasks_test.jsonl": ("prompt", prompt_rows(held_out)),
        "sft.jsonl": ("sft", sft_rows(training, arguments.seed, arguments.sft_wrong)),
        "preferences.jsonl": ("preference", preference_rows(training, arguments.seed)),
        "text.jsonl": ("text", documents(standard_library_files(), arguments.text_characters)),
    }
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    for name, (kind, rows) in files.items():
        if arguments.chat:
            rows = [conversational(row, kind) for row in rows]
        if arguments.chat and kind == "sft":
            rows = [{"messages": row["prompt"] + row["completion"]} for row in rows]
        count = write_rows(out / name, rows)
        print(f"{out / name}: {count} rows")
    if arguments.model:
        folder, tokenizer = out / arguments.model, make_byte_tokenizer()
        model = make_model(SIZES[arguments.model], tokenizer, arguments.seed)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        print(f"{folder}: {sum(weight.numel() for weight in model.parameters()) / 1e6:.2f} million parameters")


if __name__ == "__main__":
    main()
