"""The loop of the stages that learn from rows: SFT, reward model, DPO."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from basics import seed_everything
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from common.figures import means
from common.monitor import Monitor, draw, mean_over_ranks, memory_and_bytes
from common.order import Order
from common.rows import read_rows
from common.samples import Samples
from common.state import Checkpoints
from common.tokens import encode_rows

Losses = Callable[[Sequence[list]], Iterator[tuple[Tensor, dict[str, Tensor]]]]


def load_items(arguments, sources: Sequence[str], kind: str, encode: Callable, tokenizer, split: str = "train") -> list:
    """The encoded rows of all sources; what is left out is counted and said on rank 0.

    Args:
        arguments: bad_rows, chat, max_tokens.
    """
    read = read_rows(sources, kind, arguments.bad_rows, split, chat=arguments.chat)
    encoded = encode_rows(encode, read.rows, tokenizer, arguments.max_tokens, arguments.bad_rows)
    if dist.get_rank() == 0:
        print(f"{', '.join(sources)}: {read.summary()}; {encoded.summary()}", flush=True)
    return encoded.items


def steps_of(arguments, ds_config: dict, rows: int) -> int:
    """Optimizer steps of a run: --steps, or what --epochs come to."""
    in_a_step = ds_config["train_micro_batch_size_per_gpu"] * ds_config["gradient_accumulation_steps"]
    return arguments.steps or math.ceil(arguments.epochs * rows / (in_a_step * dist.get_world_size()))


def fit(
    arguments,
    ds_config: dict,
    engine,
    losses: Losses,
    items: list,
    held_out: list,
    checkpoints: Checkpoints,
    samples: Samples | None = None,
) -> dict[str, float]:
    """Train, evaluate, log, save checkpoints and resume; returns what is said of the held-out items at the end.

    Args:
        losses: makes of the micro-batches of a step, lists of items, a loss and figures each, one after the other.
        samples: what the policy says meanwhile; None: nothing.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    micro, accumulation = ds_config["train_micro_batch_size_per_gpu"], ds_config["gradient_accumulation_steps"]
    steps, order, evaluated = steps_of(arguments, ds_config, len(items)), Order(len(items), arguments.seed), {}
    first = checkpoints.begin({"engine": engine})
    monitor = Monitor(arguments.out, engine, resume=arguments.resume)
    bar = monitor.bar(steps, first)
    for step in range(first, steps):
        began = time.perf_counter()
        seed_everything(arguments.seed + 1 + step * world + rank)  # dropout differs between ranks and steps
        mine = [items[index] for index in order.batch(step, rank, world, micro * accumulation)]
        figures, lr = [], engine.get_lr()[0]
        for loss, figures_of_one in losses([mine[i : i + micro] for i in range(0, len(mine), micro)]):
            engine.backward(loss)
            engine.step()
            figures.append(figures_of_one)
        get_accelerator().synchronize()
        seconds = time.perf_counter() - began
        if (step + 1) % arguments.log_every == 0:
            monitor.log(
                step + 1,
                **mean_over_ranks(means(figures)),
                lr=lr,
                seconds=seconds,
                tokens_s=sum(map(tokens_of, mine)) / seconds,
                **memory_and_bytes(engine),
            )
        if samples is not None:
            samples.after(step + 1, monitor)
        bar.update()
        is_last = step + 1 == steps
        if held_out and (is_last or (arguments.eval_every and (step + 1) % arguments.eval_every == 0)):
            evaluated = _evaluate(engine, losses, held_out, micro)
            monitor.log(step + 1, **evaluated)
        if arguments.save_every and (step + 1) % arguments.save_every == 0:
            checkpoints.save(step + 1)
    bar.close()
    if rank == 0 and steps > 1:
        draw(arguments.out)
    return evaluated


def tokens_of(item: dict) -> int:
    """Tokens that are computed for an item; for a preference those of both sequences."""
    return sum(len(each["input_ids"]) for each in ([item["chosen"], item["rejected"]] if "chosen" in item else [item]))


def weight_of(item: dict) -> int:
    """Of how many things an item's figures are means: a pair, or the tokens that are learned."""
    return 1 if "chosen" in item else sum(item["response_mask"])


@torch.no_grad()
def _evaluate(engine, losses: Losses, items: list, size: int) -> dict[str, float]:
    """Means of the figures over all pairs or learned tokens. Items are dealt to the ranks, each once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    engine.eval()
    sums = []
    for batch in range(math.ceil(len(items) / (size * world))):
        first = (batch * world + rank) * size
        dealt = items[first : first + size]
        weight = torch.tensor(float(sum(map(weight_of, dealt))), device=engine.device)
        # A rank whose items have run out computes for nothing: all ranks gather weights together.
        ((_, said),) = losses([dealt or items[:1]])
        sums.append({name: value * weight for name, value in said.items()} | {"weight": weight})
    engine.train()
    totals = mean_over_ranks(means(sums))
    weight = totals.pop("weight")
    return {f"eval_{name}": total / weight for name, total in totals.items()}
