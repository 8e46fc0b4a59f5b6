"""Bytes per parameter on a rank that trains with FP8-LM under ZeRO-3, against bf16 with fp32 AdamW.

    python -m benchmarks.fp8_lm_memory --out runs/fp8_lm_memory.json

On GPUs over NCCL; without one a tiny model on the CPU over gloo. The trainings and the Llama are those of
harness/engines.py. Bytes are those of the CUDA allocator (on a CPU: the sum over living tensors): weights; model states
(weights, gradients, master weights, moments) once the engine is made; what is left after a step, buffers for some
layers' weights and gradients included; the peak of a step. "codes" is what the states say of themselves. One fresh
process (or group of ranks) a run.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.harness.command import (
    add_batch,
    add_checkpointing,
    add_memory,
    choose_sections,
    command,
    cut_into_nodes,
)
from benchmarks.harness.engines import BASE, SECTIONS, STOCK, made
from benchmarks.harness.measuring import live_bytes, random_tokens, stored_bytes
from benchmarks.harness.question import Question, runs_apart
from benchmarks.harness.sizes import SIZES
from benchmarks.harness.tables import cell, verdict
from examples.options import whole

# Bytes per parameter of gradients, master weights and moments, without weights and scales.
STATE_TARGETS = {"fp8-lm-o2": 6.0, "fp8-lm": 6.0}
STATE_TOLERANCE = 5.0  # percent of states and weights together
PEAK_TARGET = 30.0  # percent that the step's peak is below the base's


def measure(run: str, args, device: torch.device) -> dict:
    """The row of one run; bytes are those of the rank that has most."""
    trainer = made(run, args, SIZES[args.size], device, lean=True)
    optimizer = trainer.engine.optimizer
    built = live_bytes(device) - trainer.found_bytes - moment_bytes(optimizer)
    batches = random_tokens(SIZES[args.size].vocabulary, args.micro_batch, args.sequence, device)
    tokens = next(batches)
    losses = [trainer.step(tokens).item() for _ in range(2)]
    rest = live_bytes(device) - trainer.found_bytes
    peak = None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        losses.append(trainer.step(tokens).item())
        peak = torch.cuda.max_memory_allocated() - trainer.found_bytes
    # torch's AdamW may make its moments in the first step; low-precision states are there from the beginning.
    states = built + moment_bytes(optimizer)
    gathered = [None] * args.ranks
    torch.distributed.all_gather_object(gathered, (states, rest, peak or 0))
    states, rest, peak_of_all = (max(column) for column in zip(*gathered))
    shard = trainer.parameters / args.ranks
    row = {
        "run": run,
        "parameters": trainer.parameters,
        "shard_parameters": shard,
        "weights_bytes": trainer.weight_bytes / args.ranks,  # before they are sharded, a rank has all
        "states_bytes": states,
        "rest_bytes": rest,
        "peak_bytes": None if peak is None else peak_of_all,
        "codes_bytes": stored_bytes(optimizer) or None,
        "losses": losses,
    }
    for name in ("weights", "states", "rest", "peak", "codes"):
        size = row[f"{name}_bytes"]
        row[f"{name}_per_parameter"] = None if size is None else size / shard
    return row


def moment_bytes(optimizer) -> int:
    """Bytes of what the user's optimizer keeps inside a ZeRO-3 optimizer."""
    kept = [x for state in optimizer.optimizer.state.values() for x in state.values() if torch.is_tensor(x)]
    return sum(x.nbytes for x in kept)


def compare(rows: list[dict]) -> list[dict]:
    """Bytes per parameter of each run, and whether they meet the targets; the base is the leanest run in bf16."""
    by_run, lines = {row["run"]: row for row in rows}, []
    base_peaks = [row["peak_bytes"] for row in rows if row["run"] in (BASE, *STOCK) and row["peak_bytes"] is not None]
    for run, row in by_run.items():
        line = {"run": run}
        line |= {key: row[key] for key in row if key.endswith("_per_parameter")}
        if run in STATE_TARGETS:
            expected = STATE_TARGETS[run] + row["weights_per_parameter"]
            line["states_percent_above_target"] = 100 * (row["states_per_parameter"] / expected - 1)
            line["states_met"] = line["states_percent_above_target"] <= STATE_TOLERANCE
        if base_peaks and row["peak_bytes"] is not None:
            line["peak_percent_below_base"] = 100 * (1 - row["peak_bytes"] / min(base_peaks))
            if run in STATE_TARGETS:
                line["peak_met"] = line["peak_percent_below_base"] >= PEAK_TARGET
        lines.append(line)
    return lines


def show(result: dict) -> None:
    """Print the table."""
    settings, rows = result["settings"], {row["run"]: row for row in result["rows"]}
    numel = next(iter(rows.values()))["parameters"]
    print(
        f"\nBytes a parameter on each of {settings['ranks']} rank(s), {numel / 1e9:.3f} B parameters, micro-batch "
        f"{settings['micro_batch']} x {settings['sequence']} tokens. Targets: states 6 + weights, at most "
        f"{STATE_TOLERANCE:g} % more; peak at least {PEAK_TARGET:g} % below bf16 with fp32 AdamW"
    )
    print(
        f"{'':<14}{'weights':>9}{'states':>9}{'of':>9}{'codes':>9}{'after':>9}{'peak':>9}{'peak':>9}{'peak':>12}\n"
        f"{'':<14}{'':>9}{'':>9}{'target':>9}{'alone':>9}{'a step':>9}{'':>9}{'GiB':>9}{'below base':>12}"
    )
    for line in result["comparison"]:
        row = rows[line["run"]]
        above, below = line.get("states_percent_above_target"), line.get("peak_percent_below_base")
        print(
            f"{line['run']:<14}{line['weights_per_parameter']:>9.3f}{line['states_per_parameter']:>9.3f}"
            f"{'-' if above is None else f'{above:+.1f} %':>9}{cell(line['codes_per_parameter'], 3, width=9)}"
            f"{line['rest_per_parameter']:>9.3f}"
            f"{cell(line['peak_per_parameter'], 2, width=9)}{cell(row['peak_bytes'], 2, 2**30, 9)}"
            f"{'-' if below is None else f'{below:.1f} %':>12}{verdict(line):>9}"
        )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = command(__doc__, "fp8_lm_memory", SECTIONS, SIZES, "4b" if on_gpu else "tiny")
    add_batch(parser, sequence=1024 if on_gpu else 64)
    add_checkpointing(parser, default=True)
    add_memory(parser)
    parser.add_argument("--side-by-side", type=whole(1), help="groups of ranks at a time (default: as there are GPUs)")
    args = parser.parse_args(argv)
    args.gbit, args.rounds = None, 1
    cut_into_nodes(args, parser)
    args.side_by_side = args.side_by_side or max(1, torch.cuda.device_count() // args.ranks)
    choose_sections(args, parser, SECTIONS)
    return args


QUESTION = Question(
    name="fp8_lm_memory",
    parse=parse,
    settings=("size", "ranks", "nodes", "gbit", "micro_batch", "sequence", "checkpointing", "gib"),
    jobs=runs_apart,
    work=measure,
    line=lambda row: f"{row['run']}: {row['states_per_parameter']:.3f} bytes per parameter",
    compared=lambda result: {"comparison": compare(result["rows"])},
    show=show,
)

if __name__ == "__main__":
    QUESTION.answer()
