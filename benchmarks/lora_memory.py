"""Memory of LoRA over frozen weights stored as codes, against bf16 ZeRO-3 and bitsandbytes.

    python -m benchmarks.lora_memory --side-by-side 4 --out runs/lora_memory.json
    python -m benchmarks.lora_memory --ranks 4 --runs stock-lora,nf4-dq --out runs/lora_memory_4.json

On GPUs over NCCL a Llama of 8 billion random parameters; without one a tiny model on the CPU over gloo. The runs are
those of harness/lora.py. Bytes of a rank, by the CUDA allocator (on a CPU the sum over living tensors). "Frozen" is
what the model takes once it is made under zero.Init, without the 16 bits of embedding, lm_head and norms, per weight of
the linear layers of all blocks. Then the engine, after steps, and the peaks while the model is made and of a step. With
checkpointing, small buffers, one fresh process (group of ranks) a run. Groups that share a GPU (--side-by-side) have no
meaningful step time, and report none.
"""

from __future__ import annotations

import argparse

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
    QLORA,
    SECTIONS,
    STOCK,
    bytes_of,
    made,
    unit_of,
    without_bnb_where_it_cannot_run,
)
from benchmarks.harness.measuring import random_tokens, timed_steps
from benchmarks.harness.question import Question, runs_apart
from benchmarks.harness.sizes import SIZES
from benchmarks.harness.tables import cell, verdict
from examples.options import whole

# Bytes a frozen parameter on the ranks, at most.
AT_REST_TARGETS = {"int8": 1.04, "int4": 0.54, "int4-dq": 0.52, "nf4-dq": 0.52}
PEAK_OF_STOCK = 0.5  # of stock's, below which the peak of a step with QLORA must be


def measure(run: str, args, device: torch.device) -> dict:
    """The row of one run; bytes are those of the rank that has most."""
    trainer = made(run, args, SIZES[args.size], device, lean=True)
    batches = random_tokens(SIZES[args.size].vocabulary, args.micro_batch, args.sequence, device)
    first = timed_steps(trainer, batches, 0, args.warmup, device)
    trainer.meter.bytes()  # frees what is cached
    trainer.meter.start_peak()
    timed = timed_steps(trainer, batches, 0, args.steps, device)
    row = {
        "run": run,
        "parameters": trainer.parameters,
        "frozen_parameters": trainer.frozen_parameters,
        **bytes_of(trainer),
        "losses": first["losses"] + timed["losses"],
        "found_bytes": trainer.meter.found,
    }
    row["frozen_per_parameter"] = row["frozen_bytes"] * args.ranks / trainer.frozen_parameters
    if not args.shared:
        row["step_ms"] = timed["step_ms"]
    trainer.close()
    return row


def line(row: dict) -> str:
    """Return what is printed of a row at once."""
    text = f"{row['run']}: {row['frozen_per_parameter']:.4f} bytes a frozen parameter"
    return text if row["peak_bytes"] is None else f"{text}, peak of a step {row['peak_bytes'] / 2**30:.2f} GiB"


def compare(rows: list[dict]) -> list[dict]:
    """Bytes a frozen parameter and the peak of a step, against the targets."""
    by_run, lines = {row["run"]: row for row in rows}, []
    peaks = {run: row["peak_bytes"] for run, row in by_run.items() if row["peak_bytes"] is not None}
    for run, row in by_run.items():
        line = {"run": run, "frozen_per_parameter": row["frozen_per_parameter"]}
        if run in AT_REST_TARGETS:
            line["at_rest_target"] = AT_REST_TARGETS[run]
            line["at_rest_met"] = row["frozen_per_parameter"] <= AT_REST_TARGETS[run]
        for name, other in (("stock", STOCK), ("bnb", BNB)):
            if run in peaks and other in peaks:
                line[f"peak_of_{name}"] = peaks[run] / peaks[other]
        if run == QLORA:
            if "peak_of_stock" in line:
                line["peak_of_stock_met"] = line["peak_of_stock"] < PEAK_OF_STOCK
            if "peak_of_bnb" in line:
                line["peak_of_bnb_met"] = line["peak_of_bnb"] <= 1
        lines.append(line)
    return lines


def show(result: dict) -> None:
    """Print the table."""
    settings, rows = result["settings"], {row["run"]: row for row in result["rows"]}
    some = next(iter(rows.values()))
    name, unit = unit_of(some)
    print(
        f"\nMemory of LoRA on each of {settings['ranks']} rank(s): {some['parameters'] / 1e9:.3f} B parameters, "
        f"{some['frozen_parameters'] / 1e9:.3f} B of them in linear layers of blocks; {settings['micro_batch']} x "
        f"{settings['sequence']} tokens, checkpointing {'on' if settings['checkpointing'] else 'off'}. {name} but for "
        f"the first column. Targets for {QLORA}: peak below {PEAK_OF_STOCK:g} x {STOCK}, at most {BNB}'s"
    )
    columns = ("model_bytes", 8), ("making_peak_bytes", 12), ("engine_bytes", 8), ("engine_peak_bytes", 8)
    columns += ("rest_bytes", 8), ("peak_bytes", 9)
    print(
        f"{'':<15}{'bytes a frozen':>15}{'at':>7}{'model':>8}{'peak while':>12}{'engine':>8}{'peak':>8}{'after':>8}"
        f"{'peak of':>9}{'x':>8}{'x':>8}\n"
        f"{'':<15}{'parameter':>15}{'most':>7}{'':>8}{'making it':>12}{'':>8}{'so far':>8}{'steps':>8}{'a step':>9}"
        f"{'stock':>8}{'bnb':>8}"
    )
    for line in result["comparison"]:
        row = rows[line["run"]]
        print(
            f"{line['run']:<15}{line['frozen_per_parameter']:>15.4f}{cell(line.get('at_rest_target'), 2, width=7)}"
            + "".join(cell(row[column], 2, unit, width) for column, width in columns)
            + cell(line.get("peak_of_stock"), 3, width=8)
            + cell(line.get("peak_of_bnb"), 3, width=8)
            + f"{verdict(line):>9}"
        )
    timed = [row for row in rows.values() if "step_ms" in row]
    if timed:
        print("ms per step: " + ", ".join(f"{row['run']} {row['step_ms']:.1f}" for row in timed))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = command(__doc__, "lora_memory", SECTIONS, SIZES, "8b" if on_gpu else "tiny-gqa")
    add_link(parser)
    add_batch(parser, sequence=1024 if on_gpu else 64)
    add_checkpointing(parser, default=True)
    add_steps(parser, steps=2, warmup=2)
    add_memory(parser)
    parser.add_argument("--side-by-side", type=whole(1), help="groups of ranks; more than fit the GPUs share them")
    args = parser.parse_args(argv)
    cut_into_nodes(args, parser)
    places = max(1, torch.cuda.device_count() // args.ranks)
    args.side_by_side, args.rounds = args.side_by_side or places, 1
    args.shared = args.side_by_side > places
    choose_sections(args, parser, SECTIONS)
    args.runs = without_bnb_where_it_cannot_run(args.runs, args.ranks)
    return args


QUESTION = Question(
    name="lora_memory",
    parse=parse,
    settings=("size", "ranks", "nodes", "gbit", "micro_batch", "sequence", "checkpointing", "steps", "warmup", "gib")
    + ("shared",),
    jobs=runs_apart,
    work=measure,
    line=line,
    compared=lambda result: {"comparison": compare(result["rows"])},
    show=show,
)

if __name__ == "__main__":
    QUESTION.answer()
