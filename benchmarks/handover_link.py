"""Weights to an engine across a link: all of them, and what a step has changed, sent and applied.

    python -m benchmarks.handover_link --gbit 1 --out runs/handover_link.json     # two namespaces; as root
    python -m benchmarks.handover_link                                            # without a link

A trainer on the first rank, and a receiver on the second, which keeps weights of its own and checks each group's sum;
a random Llama, in bf16 on GPUs, after --warmup steps. `Transfer` hands over, a step between hand-overs:

whole              all weights, each time
exact              exact differences; the trainer waits until they are applied
exact-background   the same with `wait=False`: "stalled" is what the trainer waits

Seconds are those until the receiver has applied all, the median of --repeats.
"""

from __future__ import annotations

import argparse
import os
import time
from multiprocessing.connection import Client, Listener

import torch
import torch.distributed as dist

from benchmarks.harness.command import add_link, choose_runs, command, cut_into_nodes
from benchmarks.harness.measuring import random_tokens
from benchmarks.harness.nodes import sent_bytes, set_rate_everywhere
from benchmarks.harness.question import Question, rounds_together
from benchmarks.harness.results import append_to
from benchmarks.harness.sizes import SIZES
from benchmarks.harness.tables import cell
from examples.options import finite, whole

RUNS = ("whole", "exact", "exact-background")
PORT, KEY = 29600, b"handover"


class Calls:
    """The trainer's end: vLLM's four calls, answered by `receive` on the other rank."""

    def __init__(self, connection) -> None:
        self._connection = connection

    def __getattr__(self, name: str):
        def call(argument=None):
            self._connection.send((name, argument))
            if (error := self._connection.recv()) is not None:
                raise RuntimeError(error)

        return call

    def finish_weight_update(self, weight_version: str) -> None:
        self.synchronize()


def receive(address: str, device: torch.device) -> None:
    """Answer calls until the trainer leaves."""
    from zeropp_fp8.receiving import Receiver, TransferGroup

    receiver, groups = Receiver(device=device), []
    calls = {
        "init_weight_transfer_engine": lambda told: groups.append(TransferGroup.join(told, 0, device)),
        "start_weight_update": lambda _: None,
        "update_weights": lambda header: receiver.receive(header, groups[-1]),
        "synchronize": lambda _: torch.cuda.synchronize() if device.type == "cuda" else None,
    }
    with Client((address, PORT), authkey=KEY) as connection:
        while True:
            try:
                name, argument = connection.recv()
            except EOFError:
                return
            try:
                calls[name](argument)
                connection.send(None)
            except Exception as error:  # the trainer raises it
                connection.send(f"{type(error).__name__}: {error}")


def hand_over(run: str, args, device: torch.device, transfer, step) -> dict:
    """The row of a run."""
    seconds, stalled, payload, sent_by_link = [], [], [], []
    transfer.send_weights()
    for _ in range(args.repeats):
        step()
        if run == "whole":
            transfer.forget()
        if device.type == "cuda":
            torch.cuda.synchronize()
        begun, sent, at_interface = time.perf_counter(), transfer.sent_bytes, sent_bytes() if args.gbit else 0
        transfer.send_weights(wait=run != "exact-background")
        stalled.append(time.perf_counter() - begun)
        transfer.complete()
        seconds.append(time.perf_counter() - begun)
        payload.append(transfer.sent_bytes - sent)
        sent_by_link.append(sent_bytes() - at_interface if args.gbit else None)
    middle = sorted(range(args.repeats), key=seconds.__getitem__)[args.repeats // 2]
    row = {"seconds": seconds[middle], "stalled": stalled[middle], "payload_bytes": payload[middle]}
    return {"run": run, **row, "tx_bytes": sent_by_link[middle], "all_seconds": seconds}


def alone(device: torch.device) -> None:
    """Leave the group of both ranks, and have one of this process."""
    dist.barrier()
    dist.destroy_process_group()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def train(args, address: str, device: torch.device, connection) -> list[dict]:
    """The rows of all runs."""
    import deepspeed

    import zeropp_fp8
    from benchmarks.harness.hf_llama import sharded_model
    from benchmarks.harness.lora import adamw
    from benchmarks.harness.zero3 import ds_config
    from zeropp_fp8.handover import Transfer, WeightSource

    zeropp_fp8.enable()
    size = SIZES[args.size]
    config = ds_config({"recipe": "lossless"}, 1, small=size.small, lean=True, bf16=True)
    model = sharded_model(size, config)
    engine = deepspeed.initialize(model=model, optimizer=adamw(model, device, lr=args.lr), config=config)[0]
    batches = random_tokens(size.vocabulary, 1, 64, device)

    def step() -> None:
        tokens = next(batches)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()

    for _ in range(args.warmup):
        step()
    transfer = Transfer(WeightSource(engine), Calls(connection), address)
    rows = [hand_over(run, args, device, transfer, step) for run in args.runs]
    transfer.shutdown()
    numel = sum(param.ds_numel for param in engine.module.parameters())
    return [{**row, "bits_per_weight": 8 * row["payload_bytes"] / numel} for row in rows]


def work(run: str, args, device: torch.device) -> None:
    """All runs at once: `run` is the first of them."""
    if run != args.runs[0]:
        return
    rank, address = dist.get_rank(), os.environ["MASTER_ADDR"]
    if args.gbit is not None:
        set_rate_everywhere(args.gbit or None)
    listener = Listener((address, PORT), authkey=KEY) if rank == 0 else None
    alone(device)
    if listener is None:
        receive(address, device)
        return
    with listener, listener.accept() as connection:
        for row in train(args, address, device, connection):
            append_to(args.out, "rows", row)


def show(result: dict) -> None:
    """Print the table."""
    settings = result["settings"]
    print(f"\nLlama {settings['size']}, lr {settings['lr']:g}, gbit {settings['gbit']}")
    print(f"{'':<18}{'seconds':>10}{'stalled':>10}{'MB':>10}{'tx MB':>10}{'bits':>8}")
    for row in result["rows"]:
        cells = (cell(row[key], 2, scale, 10) for key, scale in (("payload_bytes", 1e6), ("tx_bytes", 1e6)))
        print(f"{row['run']:<18}{row['seconds']:>10.3f}{row['stalled']:>10.3f}" + "".join(cells), end="")
        print(f"{row['bits_per_weight']:>8.3f}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command(__doc__, "handover_link", RUNS, SIZES, "1.3b" if torch.cuda.is_available() else "tiny-gqa")
    add_link(parser)
    parser.set_defaults(ranks=2, rounds=1)
    parser.add_argument("--lr", type=finite(above=0), default=1e-6, help="of AdamW (default %(default)g)")
    parser.add_argument("--warmup", type=whole(1), default=5, help="steps before (default %(default)s)")
    parser.add_argument("--repeats", type=whole(1), default=5, help="hand-overs (default %(default)s)")
    args = parser.parse_args(argv)
    cut_into_nodes(args, parser)
    if args.ranks != 2:
        parser.error("--ranks: a trainer and a receiver are 2")
    choose_runs(args, parser, RUNS)
    return args


QUESTION = Question(
    name="handover_link",
    parse=parse,
    settings=("size", "ranks", "nodes", "gbit", "lr", "warmup", "repeats"),
    work=work,
    compared=lambda result: {},
    show=show,
    jobs=rounds_together,
)

if __name__ == "__main__":
    QUESTION.answer()
