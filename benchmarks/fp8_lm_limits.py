"""The largest micro-batch or sequence that fits with FP8-LM under ZeRO-3, against bf16 with fp32 AdamW, and its speed.

    python -m benchmarks.fp8_lm_limits --runs lossless,fp8-lm-o2 --axis batch --out runs/fp8_lm_limits.json

By doubling until memory is out, then --refine times by halving the interval, each try in a fresh process
(harness/limits.py). The trainings and the Llama are those of harness/engines.py. --gib makes the GPU smaller.
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
from benchmarks.harness.engines import SECTIONS, made
from benchmarks.harness.measuring import random_tokens
from benchmarks.harness.question import Question
from benchmarks.harness.sizes import PEAK_FLOPS, SIZES, flops_per_token
from examples.options import finite


def measure(run: str, args, device: torch.device) -> None:
    """Rows of a run, one for each size that is tried."""
    size = SIZES[args.size]

    def speed(step_ms: float, micro_batch: int, sequence: int) -> dict:
        tokens_per_s = 1e3 * args.ranks * micro_batch * sequence / step_ms
        flops = tokens_per_s * flops_per_token(size, sequence) / args.ranks
        return {"tokens_per_s": tokens_per_s, "mfu": flops / (args.peak_tflops * 1e12)}

    limits.measure(
        run,
        args,
        device,
        make=lambda: made(run, args, size, device),
        batches=lambda *shape: random_tokens(size.vocabulary, *shape, device),
        speed=speed,
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = command(__doc__, "fp8_lm_limits", SECTIONS, SIZES, "4b" if on_gpu else "tiny")
    add_batch(parser, sequence=1024 if on_gpu else 64)
    add_checkpointing(parser, default=True)
    add_steps(parser, steps=2, warmup=1)
    add_search(parser)
    parser.add_argument(
        "--peak-tflops", type=finite(above=0), default=PEAK_FLOPS / 1e12, help="default: %(default)g, an H200"
    )
    args = parser.parse_args(argv)
    complete_search(args)
    choose_sections(args, parser, SECTIONS)
    return args


QUESTION = Question(
    name="fp8_lm_limits",
    parse=parse,
    settings=("size", "ranks", "micro_batch", "sequence", "checkpointing", "axis", "peak_tflops", "gib"),
    searches=True,
    work=measure,
    line=str,
    compared=lambda result: {"comparison": limits.compare(result["rows"])},
    show=limits.show,
)

if __name__ == "__main__":
    QUESTION.answer()
