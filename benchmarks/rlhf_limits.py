"""The largest minibatch of PPO that fits, by the runs of rlhf_step.py, and tokens/s of an iteration with it.

    python -m benchmarks.rlhf_limits --runs stock-four,qlora --gib 24 --out runs/rlhf_limits.json

By doubling from --start until memory is out and then halving the interval --refine times, each in a fresh process
(harness/limits.py); an iteration is both phases, experience and training. --gib makes the GPU smaller.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.harness import limits
from benchmarks.harness.command import add_search, add_steps, choose_runs, command, complete_search
from benchmarks.harness.question import Question
from benchmarks.harness.rlhf_runs import RUNS, add_rollouts, made
from benchmarks.harness.sizes import SIZES


def measure(run: str, args, device: torch.device) -> None:
    """Rows of a run, one for each batch that is tried."""
    from benchmarks.harness.ppo_models import random_rollouts

    def rollouts(batch: int, length: int):
        vocabulary = SIZES[args.size].vocabulary
        return random_rollouts(vocabulary, batch, length - args.tokens, args.tokens, device)

    limits.measure(
        run,
        args,
        device,
        make=lambda: made(run, args, device),
        batches=rollouts,
        speed=lambda step_ms, batch, length: {"tokens_per_s": 1e3 * args.ranks * batch * length / step_ms},
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = command(__doc__, "rlhf_limits", RUNS, SIZES, "1.3b" if on_gpu else "tiny-gqa")
    add_rollouts(parser)
    add_steps(parser, steps=3, warmup=2, least_warmup=1)  # moments are made and kernels compiled
    add_search(parser, axes=False)
    args = parser.parse_args(argv)
    args.micro_batch, args.sequence, args.checkpointing = args.batch, args.prompt + args.tokens, False
    complete_search(args)
    choose_runs(args, parser, RUNS)
    return args


QUESTION = Question(
    name="rlhf_limits",
    parse=parse,
    settings=("size", "ranks", "batch", "prompt", "tokens", "steps", "warmup", "leaf", "checkpointing", "gib"),
    searches=True,
    work=measure,
    line=str,
    compared=lambda result: {"comparison": limits.compare(result["rows"])},
    show=limits.show,
    folders=("examples", "examples/rlhf"),
)

if __name__ == "__main__":
    QUESTION.answer()
