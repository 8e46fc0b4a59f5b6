"""Step time, tokens/s and bytes on the wire of FP8-LM under ZeRO-3, against bf16 with fp32 AdamW.

    python -m benchmarks.fp8_lm_step --rounds 2 --out runs/fp8_lm_one_gpu.json
    python -m benchmarks.fp8_lm_step --ranks 4 --gbit 25 --out runs/fp8_lm_25gbit.json      (root: namespaces)

On GPUs over NCCL; without one a tiny model on the CPU over gloo. The trainings and the Llama are those of
harness/engines.py. Every run is built and timed in every round, forwards in even rounds and backwards in odd ones, so
that a drift of the machine shows: on one GPU in fresh processes, else one after the other in the same. With --profile
device time of one more step by kind of kernel.

Model-FLOP utilisation counts 6 floating-point operations for every multiplied weight and token, and the causal half of
attention; not what checkpointing computes again. Its base is the GPU's dense bf16 peak (--peak-tflops) in every run, so
that figures compare; the peak in FP8 is twice as high.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from benchmarks.harness import profiling
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
from benchmarks.harness.engines import SECTIONS, STOCK, base_of, made
from benchmarks.harness.environment import forget_memory
from benchmarks.harness.measuring import random_tokens, timed_steps
from benchmarks.harness.nodes import GBIT, set_rate_everywhere
from benchmarks.harness.question import Question, rounds
from benchmarks.harness.sizes import PEAK_FLOPS, SIZES, flops_per_token
from benchmarks.harness.tables import cell, link_of
from examples.options import finite, whole

MAX_SLOWDOWN = 10.0  # percent that fp8-lm may be slower than fp8-lm-o2 between nodes


def measure(run: str, args, device: torch.device) -> dict:
    """The row of one run in one round."""
    size = SIZES[args.size]
    if args.gbit is not None:
        set_rate_everywhere(None)  # what is sent while it is built is not measured
    found = forget_memory(device)
    trainer = made(run, args, size, device)
    if args.gbit:
        set_rate_everywhere(args.gbit)
    batches = random_tokens(size.vocabulary, args.micro_batch, args.sequence, device)
    forget_memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    row = {"run": run, "round": args.round, "parameters": trainer.parameters}
    row |= timed_steps(trainer, batches, args.warmup, args.steps, device)
    tokens_per_s = 1e3 * args.ranks * args.micro_batch * args.sequence / row["step_ms"]
    flops = tokens_per_s * flops_per_token(size, args.sequence) / args.ranks
    row |= {"tokens_per_s": tokens_per_s, "model_tflops": flops / 1e12, "mfu": flops / (args.peak_tflops * 1e12)}
    if args.gbit is None:
        row["tx_bytes_per_node_step"] = None
    if device.type == "cuda":
        # Engines leave memory behind after destroy(): a run's peak is counted from what it found.
        row |= {"peak_gib": (torch.cuda.max_memory_allocated() - found) / 2**30, "found_gib": found / 2**30}
    wire = trainer.wire()
    if wire is not None:
        row["wire"] = wire
        row["gradient_bytes"] = gradient_bytes(wire)
        if args.gbit:
            inter = sum(kind["inter"] for kind in wire["per_step"].values()) / args.nodes
            row["floor_ms"] = 1e3 * inter / (args.gbit * GBIT)  # what the bytes need that one node sends
    row["gradient_scales"] = trainer.gradient_scales()
    if args.profile:
        tokens = next(batches)
        make = profiling.device_profile if device.type == "cuda" else profiling.operators
        row["profile"] = make(lambda: trainer.step(tokens), args.profile)  # on every rank, or they would wait
    trainer.close()
    return row


def gradient_bytes(wire: dict) -> dict:
    """Bytes of gradients a step of all ranks, and by how many percent they are below rings in 32 and 16 bits."""
    sent = sum(wire["per_step"]["gradients"].values())
    stock = sum(wire["stock_per_step"]["gradients"].values())
    below = {"below_fp32": 100 * (1 - sent / (2 * stock)), "below_bf16": 100 * (1 - sent / stock)} if stock else {}
    return {"sent": sent, "stock_bf16": stock, **below}


def compare(rows: list[dict], settings: dict) -> list[dict]:
    """A line per run over its rounds; its speed against the faster stock, `lossless` and FP8 compute alone."""
    lines = []
    for run in dict.fromkeys(row["run"] for row in rows):
        mine = [row for row in rows if row["run"] == run]
        medians = [row["step_ms"] for row in mine]
        line = {
            "run": run,
            "step_ms": statistics.median(medians),
            "step_ms_by_round": medians,
            "tokens_per_s": statistics.median(row["tokens_per_s"] for row in mine),
            "mfu": statistics.median(row["mfu"] for row in mine),
            "losses": [mine[0]["losses"][0], mine[0]["losses"][-1]],
        }
        for key in ("peak_gib", "floor_ms", "tx_bytes_per_node_step", "gradient_bytes", "gradient_scales"):
            line[key] = mine[-1].get(key)
        if "communication_ms" in mine[-1].get("profile", ()):
            line |= {key: mine[-1]["profile"][key] for key in ("communication_ms", "exposed_ms")}
        if "wire" in mine[-1]:
            per_step = mine[-1]["wire"]["per_step"].values()
            line["inter_bytes_per_node_step"] = sum(kind["inter"] for kind in per_step) / settings["nodes"]
        lines.append(line)
    by_run = {line["run"]: line for line in lines}
    stock = min((by_run[run] for run in STOCK if run in by_run), key=lambda line: line["step_ms"], default=None)
    others = {"times_stock": stock, "times_bf16": base_of(by_run), "times_fp8_compute": by_run.get("fp8-compute")}
    for name, other in others.items():
        for line in lines:
            line[name] = None if other is None else other["step_ms"] / line["step_ms"]
    if {"fp8-lm", "fp8-lm-o2"} <= set(by_run) and settings["gbit"]:
        slower = 100 * (by_run["fp8-lm"]["step_ms"] / by_run["fp8-lm-o2"]["step_ms"] - 1)
        by_run["fp8-lm"] |= {"percent_slower_than_o2": slower, "slowdown_met": slower <= MAX_SLOWDOWN}
    return lines


def show(result: dict) -> None:
    """Print the table, and the profiles asked for."""
    settings = result["settings"]
    print(
        f"\n{result['rows'][0]['parameters'] / 1e9:.3f} B parameters, {settings['ranks']} rank(s) in "
        f"{link_of(settings)}, {settings['micro_batch']} x {settings['sequence']} tokens per rank"
    )
    print(
        f"{'':<14}{'ms':>9}{'lowest..highest round':>24}{'tokens/s':>11}{'MFU':>8}{'x stock':>9}"
        f"{'x bf16':>8}{'x FP8':>8}{'GiB':>8}{'MB per node':>12}{'interface':>11}{'floor':>8}"
        f"{'gradients below fp32/bf16':>27}  loss"
    )
    for line in result["comparison"]:
        below = line["gradient_bytes"] or {}
        gradients = f"{below['below_fp32']:.1f} % / {below['below_bf16']:.1f} %" if "below_fp32" in below else "-"
        medians = line["step_ms_by_round"]
        print(
            f"{line['run']:<14}{line['step_ms']:>9.1f}{f'{min(medians):.1f} .. {max(medians):.1f}':>24}"
            f"{line['tokens_per_s']:>11.0f}{100 * line['mfu']:>6.1f} %{cell(line['times_stock'], 3, width=9)}"
            f"{cell(line['times_bf16'], 3, width=8)}"
            f"{cell(line['times_fp8_compute'], 3, width=8)}{cell(line['peak_gib'], 2, width=8)}"
            f"{cell(line.get('inter_bytes_per_node_step'), 1, 1e6, 12)}"
            f"{cell(line['tx_bytes_per_node_step'], 1, 1e6, 11)}{cell(line['floor_ms'], width=8)}{gradients:>27}"
            f"  {line['losses'][0]:.4f} -> {line['losses'][1]:.4f}"
        )
        if "slowdown_met" in line:
            print(
                f"  {line['percent_slower_than_o2']:+.1f} % against fp8-lm-o2, at most {MAX_SLOWDOWN:g} %: "
                + ("met" if line["slowdown_met"] else "MISSED")
            )
    with_times = [line for line in result["comparison"] if "communication_ms" in line]
    base = base_of({line["run"]: line for line in with_times})
    for line in with_times:
        below = 100 * (1 - line["communication_ms"] / base["communication_ms"]) if base else None
        print(
            f"  {line['run']}: communication {line['communication_ms']:.1f} ms of a step, {cell(below)} % below "
            f"{base['run'] if base else '-'} (the paper: 63-65 %), exposed {line['exposed_ms']:.1f} ms"
        )
    for row in result["rows"]:
        if "profile" in row:
            profiling.show(f"{row['run']}, round {row['round']}", row["profile"])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = command(__doc__, "fp8_lm_step", SECTIONS, SIZES, "1.3b" if on_gpu else "tiny")
    add_link(parser)
    add_batch(parser, sequence=1024 if on_gpu else 64, micro_batch=None)
    add_checkpointing(parser, default=False)
    add_steps(parser, steps=8 if on_gpu else 2, warmup=4 if on_gpu else 1, rounds=2)
    add_memory(parser)
    parser.add_argument("--profile", type=whole(0), default=0, metavar="N", help="N kernels with most time")
    parser.add_argument(
        "--peak-tflops", type=finite(above=0), default=PEAK_FLOPS / 1e12, help="default: %(default)g, an H200"
    )
    args = parser.parse_args(argv)
    cut_into_nodes(args, parser)
    args.micro_batch = args.micro_batch or (8 if args.ranks == 1 and on_gpu else 1)  # one GPU has to be busy
    choose_sections(args, parser, SECTIONS)
    return args


QUESTION = Question(
    name="fp8_lm_step",
    parse=parse,
    settings=("size", "ranks", "nodes", "gbit", "micro_batch", "sequence", "checkpointing", "steps", "warmup")
    + ("peak_tflops", "gib"),
    jobs=rounds,
    work=measure,
    line=lambda r: f"{r['run']}, round {r['round']}: {r['step_ms']:.1f} ms per step, {r['tokens_per_s']:.0f} tokens/s",
    compared=lambda result: {"comparison": compare(result["rows"], result["settings"])},
    show=show,
)

if __name__ == "__main__":
    QUESTION.answer()
