"""Step time and traffic of LoRA over frozen weights stored as codes, against bf16 ZeRO-3 and bitsandbytes.

    python -m benchmarks.lora_step --ranks 4 --gbit 25 --out runs/lora_25gbit.json         (root: namespaces)

On GPUs over NCCL a Llama of 8 billion random parameters; without one a tiny model on the CPU over gloo. The runs are
those of harness/lora.py. Step time, tokens/s, bytes on the wire by the ledger and by the interface, in steps after the
warm-up. Every run is built and timed in every round, forwards in even rounds and backwards in odd ones: on one GPU in
fresh processes, else one after the other in the same. The link is shaped once a run is built.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from benchmarks.harness.command import (
    add_batch,
    add_checkpointing,
    add_link,
    add_memory,
    add_steps,
    choose_sections,
    command,
    cut_into_nodes,
)
from benchmarks.harness.lora import (
    BNB,
    SECTIONS,
    STOCK,
    ZEROPP,
    bytes_of,
    made,
    unit_of,
    without_bnb_where_it_cannot_run,
)
from benchmarks.harness.measuring import random_tokens, timed_steps
from benchmarks.harness.nodes import GBIT, set_rate_everywhere
from benchmarks.harness.question import Question, rounds
from benchmarks.harness.sizes import EVERY_SIZE
from benchmarks.harness.tables import cell, link_of

TARGET_GBIT = 25.0
TIMES_STOCK = {ZEROPP: 2.0}  # faster than stock at that rate between two nodes, at least
TIMES_STOCK_STORED = 4.0


def measure(run: str, args, device: torch.device) -> dict:
    """The row of one run in one round; bytes are those of the rank that has most."""
    if args.gbit is not None:
        set_rate_everywhere(None)  # what is sent while it is built is not measured
    trainer = made(run, args, EVERY_SIZE[args.size], device)
    if args.gbit:
        set_rate_everywhere(args.gbit)
    batches = random_tokens(EVERY_SIZE[args.size].vocabulary, args.micro_batch, args.sequence, device)
    first = timed_steps(trainer, batches, 0, args.warmup, device)
    before = trainer.sent()
    trainer.meter.bytes()  # frees what is cached
    trainer.meter.start_peak()
    timed = timed_steps(trainer, batches, 0, args.steps, device)
    row = {
        "run": run,
        "round": args.round,
        "parameters": trainer.parameters,
        "frozen_parameters": trainer.frozen_parameters,
        **bytes_of(trainer),
        "losses": first["losses"] + timed.pop("losses"),
        "found_bytes": trainer.meter.found,
        "first_ms": first["times_ms"][0],
        **timed,
    }
    row["frozen_per_parameter"] = row["frozen_bytes"] * args.ranks / trainer.frozen_parameters
    row["tokens_per_s"] = 1e3 * args.ranks * args.micro_batch * args.sequence / row["step_ms"]
    if args.gbit is None:
        row["tx_bytes_per_node_step"] = None
    if before is not None:
        row["wire"] = wire_of(before, trainer.sent(), args)
        if args.gbit:
            row["floor_ms"] = 1e3 * row["wire"]["inter"] / (args.gbit * GBIT)  # what the bytes need that one node sends
    trainer.close()
    return row


def wire_of(before: dict[str, float], after: dict[str, float], args) -> dict[str, float]:
    """Bytes that one node sends in a timed step, and that it sent in the steps before."""
    sent = {link: (after[link] - before[link]) / args.steps / args.nodes for link in after}
    return sent | {f"{link}_before": before[link] / args.nodes for link in before}


def compare(rows: list[dict], settings: dict) -> list[dict]:
    """A line per run over its rounds; its speed against stock and against weights that are sent as INT8."""
    lines = []
    for run in dict.fromkeys(row["run"] for row in rows):
        mine = [row for row in rows if row["run"] == run]
        medians = [row["step_ms"] for row in mine]
        line = {
            "run": run,
            "step_ms": statistics.median(medians),
            "step_ms_by_round": medians,
            "tokens_per_s": statistics.median(row["tokens_per_s"] for row in mine),
            "losses": [mine[0]["losses"][0], mine[0]["losses"][-1]],
        }
        for key in ("first_ms", "floor_ms", "tx_bytes_per_node_step", "wire", "frozen_per_parameter"):
            line[key] = mine[-1].get(key)
        for key in ("rest_bytes", "peak_bytes"):
            line[key] = max((row[key] for row in mine if row[key] is not None), default=None)
        lines.append(line)
    by_run = {line["run"]: line for line in lines}
    for name, other in (("times_stock", by_run.get(STOCK)), ("times_zeropp", by_run.get(ZEROPP))):
        for line in lines:
            line[name] = None if other is None else other["step_ms"] / line["step_ms"]
    if settings["gbit"] == TARGET_GBIT and STOCK in by_run:
        for line in lines:
            is_stored = line["frozen_per_parameter"] < 2 and line["run"] != BNB
            target = TIMES_STOCK_STORED if is_stored else TIMES_STOCK.get(line["run"])
            if target is not None:
                line |= {"times_stock_target": target, "times_stock_met": line["times_stock"] >= target}
    return lines


def show(result: dict) -> None:
    """Print the table."""
    settings, some = result["settings"], result["rows"][0]
    name, unit = unit_of(some)
    print(
        f"\nLoRA on {some['parameters'] / 1e9:.3f} B parameters, {settings['ranks']} rank(s) in {link_of(settings)}, "
        f"{settings['micro_batch']} x {settings['sequence']} tokens per rank, checkpointing "
        f"{'on' if settings['checkpointing'] else 'off'}; MB that a node sends per step"
    )
    print(
        f"{'':<15}{'ms':>9}{'lowest..highest round':>24}{'first':>9}{'tokens/s':>10}{'x stock':>9}{'at least':>9}"
        f"{'x zeropp':>9}{'between':>10}{'interface':>10}{'within':>10}{'floor':>8}{f'rest {name}':>9}{'peak':>8}  loss"
    )
    for line in result["comparison"]:
        medians, wire = line["step_ms_by_round"], line["wire"] or {}
        met = {True: " met", False: " MISSED", None: ""}[line.get("times_stock_met")]
        print(
            f"{line['run']:<15}{line['step_ms']:>9.1f}{f'{min(medians):.1f} .. {max(medians):.1f}':>24}"
            f"{line['first_ms']:>9.1f}{line['tokens_per_s']:>10.0f}{cell(line['times_stock'], 2, width=9)}"
            f"{cell(line.get('times_stock_target'), 0, width=9)}{cell(line['times_zeropp'], 2, width=9)}"
            f"{cell(wire.get('inter'), 1, 1e6, 10)}{cell(line['tx_bytes_per_node_step'], 1, 1e6, 10)}"
            f"{cell(wire.get('intra'), 1, 1e6, 10)}{cell(line['floor_ms'], width=8)}"
            f"{cell(line['rest_bytes'], 2, unit, 9)}{cell(line['peak_bytes'], 2, unit, 8)}"
            f"  {line['losses'][0]:.3f} -> {line['losses'][1]:.3f}{met}"
        )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = command(__doc__, "lora_step", SECTIONS, EVERY_SIZE, "8b" if on_gpu else "tiny-gqa")
    add_link(parser)
    add_batch(parser, sequence=1024 if on_gpu else 64)
    add_checkpointing(parser, default=False)
    add_steps(parser, steps=4, warmup=2, rounds=1)
    add_memory(parser)
    args = parser.parse_args(argv)
    cut_into_nodes(args, parser)
    choose_sections(args, parser, SECTIONS)
    args.runs = without_bnb_where_it_cannot_run(args.runs, args.ranks)
    return args


QUESTION = Question(
    name="lora_step",
    parse=parse,
    settings=("size", "ranks", "nodes", "gbit", "micro_batch", "sequence", "checkpointing", "steps", "warmup", "gib"),
    jobs=rounds,
    work=measure,
    line=lambda row: f"{row['run']}: {row['step_ms']:.1f} ms per step",
    compared=lambda result: {"comparison": compare(result["rows"], result["settings"])},
    show=show,
)

if __name__ == "__main__":
    QUESTION.answer()
