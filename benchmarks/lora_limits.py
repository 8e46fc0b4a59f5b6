"""The largest micro-batch or sequence that fits of LoRA over weights that rest as codes, and its speed.

    python -m benchmarks.lora_limits --runs stock-lora,nf4-dq,bnb --out runs/lora_batch.json

By doubling until memory is out, then --refine times by halving the interval, each in a fresh process
(harness/limits.py). The runs are those of harness/lora.py. --gib makes the GPU smaller.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.harness import limits
from benchmarks.harness.command import (
    add_batch,
    add_checkpointing,
    add_search,
    add_steps,
    choose_sections,
    command,
    complete_search,
)
from benchmarks.harness.lora import SECTIONS, made, without_bnb_where_it_cannot_run
from benchmarks.harness.measuring import random_tokens
from benchmarks.harness.question import Question
from benchmarks.harness.sizes import SIZES


def measure(run: str, args, device: torch.device) -> None:
    """Rows of a run, one for each size that is tried."""
    size = SIZES[args.size]
    limits.measure(
        run,
        args,
        device,
        make=lambda: made(run, args, size, device, lean=True),
        batches=lambda *shape: random_tokens(size.vocabulary, *shape, device),
        speed=lambda step_ms, batch, length: {"tokens_per_s": 1e3 * args.ranks * batch * length / step_ms},
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = command(__doc__, "lora_limits", SECTIONS, SIZES, "8b" if on_gpu else "tiny-gqa")
    add_batch(parser, sequence=1024 if on_gpu else 64)
    add_checkpointing(parser, default=True)
    add_steps(parser, steps=2, warmup=1)
    add_search(parser)
    args = parser.parse_args(argv)
    complete_search(args)
    choose_sections(args, parser, SECTIONS)
    args.runs = without_bnb_where_it_cannot_run(args.runs, args.ranks)
    return args


QUESTION = Question(
    name="lora_limits",
    parse=parse,
    settings=("size", "ranks", "micro_batch", "sequence", "checkpointing", "axis", "gib"),
    searches=True,
    work=measure,
    line=str,
    compared=lambda result: {"comparison": limits.compare(result["rows"])},
    show=limits.show,
)

if __name__ == "__main__":
    QUESTION.answer()
