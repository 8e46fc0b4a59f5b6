"""Held-out loss of a 100M-class Llama trained with FP8-LM, against bf16 with fp32 AdamW; and what becomes of mu.

    python -m benchmarks.fp8_lm_convergence --out runs/levels.json
    python -m benchmarks.fp8_lm_convergence --runs table --out runs/fp8_lm_table.json
    python -m benchmarks.fp8_lm_convergence --ranks 4 --runs bf16,fp8-lm-o1 --out a.json
    python -m benchmarks.fp8_lm_convergence --merge a.json b.json --out all.json

Text, order of the data, initial weights, schedule, clipping and weight decay are those of convergence.py (33 million
bytes; --steps and others change them). Every run is a ZeRO-3 engine, so all code is what users run. Without --ranks
each has one GPU (world size 1: nothing is sent, gradients become FP8 codes all the same), and as many runs go side by
side as there are GPUs. With --ranks N the ranks of one node share each batch, and FP8 sums over ranks are part of the
result. On a CPU a tiny model. Runs:

    bf16                          lossless: bf16 with fp32 AdamW
    fp8-compute, fp8-lm-o1, -o2, fp8-lm      the levels; fp8-lm differs from fp8-lm-o2 only with more than one rank
    e5m2                          fp8-lm-o1 with gradients in E5M2
    master_*, exp_avg_*, exp_avg_sq_*, ...   fp8-lm-o2 with that part of the optimizer changed (the paper's ablation)
    levels, table, all  several of them

The mu of every step, and the shares of FP8 numbers that lay at the largest code and that became zero, are in the row
as "trace". --timeout bounds everything; a finished run is
in --out at once. Single runs of one seed differ by chance, see the spread of bf16's seeds (--seeds 0,1,2).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

from benchmarks.harness.engine_trainer import EngineTrainer
from benchmarks.harness.environment import describe, join
from benchmarks.harness.jobs import announce, choose_gpus, dealt_jobs, run_jobs
from benchmarks.harness.learning import BF16, compare, load_data, merge, show, train_steps
from benchmarks.harness.results import append_to, begin_result, end_result, write_result
from benchmarks.harness.sizes import SIZES
from benchmarks.harness.zero3 import without_refused
from examples.options import finite, new_file, several, whole
from examples.pretrain.data import Sequences


def o1(**gradients) -> dict:
    return {"recipe": "fp8-lm-o1", "gradients": gradients}


def o2(**optimizer) -> dict:
    return {"recipe": "fp8-lm-o2", "optimizer": optimizer}


E5M2 = {f"{part}_format": "fp8_e5m2" for part in ("intra", "inter", "store")}
SECTIONS = {
    BF16: {"recipe": "lossless"},
    "fp8-compute": {"recipe": "lossless", "compute": {"format": "fp8"}},
    "fp8-lm-o1": {"recipe": "fp8-lm-o1"},
    "fp8-lm-o2": {"recipe": "fp8-lm-o2"},
    "fp8-lm": {"recipe": "fp8-lm"},
    "e5m2": o1(**E5M2),
    "master_fp32": o2(master_format="fp32"),
    "master_bf16": o2(master_format="bf16"),
    "master_fp8": o2(master_format="fp8_e4m3"),
    "exp_avg_fp16": o2(exp_avg_format="fp16"),
    "exp_avg_sq_bf16": o2(exp_avg_sq_format="bf16"),
    "exp_avg_sq_fp8": o2(exp_avg_sq_format="fp8_e4m3"),
    "scales_block": o2(scales="block"),
    "exp_avg_sq_fp8_scales_block": o2(exp_avg_sq_format="fp8_e4m3", scales="block"),
}
LEVELS = (BF16, "fp8-compute", "fp8-lm-o1", "fp8-lm-o2", "fp8-lm")
SEVERAL = {
    "levels": LEVELS,
    "table": (BF16, "fp8-lm-o2", *[run for run in SECTIONS if run not in (*LEVELS, "e5m2")]),
    "all": tuple(SECTIONS),
}
TARGET_PERCENT = 0.3  # by which the loss of a level may be above bf16's; others are a table, not a promise
TRACED = ("mu", "saturated", "vanished")
TOLERATED_SHARE = 1e-5  # of saturated numbers, above which mu is halved
SETTINGS = ("steps", "batch", "sequence", "lr", "warmup", "eval_sequences", "ranks")


def train(run: str, seed: int, args, data: tuple, device: torch.device) -> dict:
    """One run; its row of results."""
    training, held_out = data
    data = Sequences(training.tokens, training.length, seed), held_out
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer = EngineTrainer(SECTIONS[run], SIZES[args.size], seed, args, device)
    row = {
        "run": run,
        "seed": seed,
        "section": SECTIONS[run],
        "parameters": trainer.engine_run.parameters,
        "tokens": args.steps * args.batch * args.sequence,
        "epochs": args.steps * args.batch / training.count,
        "seconds": 0.0,
        "train": [],
        "held_out": [],
    }
    train_steps(trainer, 0, args.steps, args, data, row)
    row["held_out_loss"] = row["held_out"][-1][1]
    row["tokens_per_s"] = row["tokens"] / row["seconds"]
    row["trace"] = trainer.trace
    row["wire"] = trainer.engine_run.wire()
    if device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    trainer.engine_run.close()
    return row


def worker(args) -> None:
    """Do the runs of a job in this group of ranks; each is named RUN:SEED."""
    choose_gpus(args)
    device = join()
    if torch.distributed.get_rank():  # all ranks would print the same
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    data = load_data(args, device)
    for name in args.runs:
        announce(args, name)
        run, _, seed = name.partition(":")
        row = train(run, int(seed), args, data, device)
        if torch.distributed.get_rank() == 0:
            append_to(args.out, "rows", row)
    torch.distributed.destroy_process_group()


def measure(args) -> dict:
    """Do all runs; what is in args.out at the end."""
    head = describe("fp8_lm_convergence")
    settings = {name: getattr(args, name) for name in SETTINGS}
    settings |= {"size": vars(SIZES[args.size]), "engine": f"ZeRO-3, {args.ranks} rank(s) in one node"}
    training, held_out = load_data(args, torch.device("cpu"))
    data = {
        "sources": [Path(source).name for source in args.data],
        "training_tokens": len(training.tokens),
        "held_out_tokens": len(held_out.tokens),
        "evaluated_tokens": max(1, args.eval_sequences // args.batch) * args.batch * args.sequence,
    }
    begin_result(args.out, {**head, "settings": settings, "data": data})
    jobs = dealt_jobs([f"{run}:{seed}" for seed in args.seeds for run in args.runs], args.side_by_side)
    run_jobs(
        "benchmarks.fp8_lm_convergence", jobs, args, time.monotonic() + args.timeout, side_by_side=args.side_by_side
    )
    return end_result(args.out)


# -- results ---------------------------------------------------------------------------------------------------------


def target_of(run: str) -> float | None:
    """By how many percent the loss of a run may be above bf16's; None where nothing is promised."""
    return TARGET_PERCENT if run in LEVELS and run != BF16 else None


def finish(result: dict, args) -> None:
    """Compare, write, print and draw."""
    order = list(SECTIONS)
    result["rows"].sort(key=lambda row: (order.index(row["run"]), row["seed"]))
    result["comparison"] = compare(result["rows"], target_of)
    for line in result["comparison"]:
        traces = [row["trace"] for row in result["rows"] if row["run"] == line["run"] and row["trace"]]
        if traces:
            line["gradients"] = summary(traces[0])
    if args.out:
        write_result(args.out, result)
    if not result["rows"]:
        return
    show(result)
    show_gradients(result["comparison"])


def summary(trace: dict[str, list[float]]) -> dict:
    """Of mu and the shares of all steps."""
    mu, saturated, vanished = (trace[name] for name in TRACED)
    return {
        "mu_first": mu[0],
        "mu_least": min(mu),
        "mu_last": mu[-1],
        "saturated_mean": statistics.fmean(saturated),
        "saturated_most": max(saturated),
        "steps_above_tolerance": sum(share > TOLERATED_SHARE for share in saturated),
        "vanished_mean": statistics.fmean(vanished),
        "vanished_most": max(vanished),
    }


def show_gradients(lines: list[dict]) -> None:
    """Print what became of FP8 gradients."""
    lines = [line for line in lines if "gradients" in line]
    if not lines:
        return
    print(
        "\nFP8 gradients: mu; shares of numbers at the largest code and of those that became zero\n"
        f"{'run':<30}{'mu least':>10}{'last':>10}{'saturated':>12}{'most':>10}{'steps':>7}{'vanished':>12}{'most':>10}"
    )
    for line in lines:
        g = line["gradients"]
        print(
            f"{line['run']:<30}{g['mu_least']:>10.4g}{g['mu_last']:>10.4g}{g['saturated_mean']:>12.2e}"
            f"{g['saturated_most']:>10.1e}{g['steps_above_tolerance']:>7}{g['vanished_mean']:>12.2e}"
            f"{g['vanished_most']:>10.1e}"
        )
    sys.stdout.flush()


# -- command line ----------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="levels", help=f"some of {','.join(SECTIONS)}; {','.join(SEVERAL)}")
    parser.add_argument(
        "--seeds", type=several(whole(0)), default="0", help="of initial weights and the order of the data"
    )
    parser.add_argument("--size", choices=SIZES, default="100m" if on_gpu else "tiny-bytes")
    parser.add_argument("--ranks", type=whole(1), default=1, help="that share a batch, in one node")
    parser.add_argument("--steps", type=whole(1), default=1000 if on_gpu else 20)
    parser.add_argument("--batch", type=whole(1), default=32 if on_gpu else 4, help="sequences in a step, of all ranks")
    parser.add_argument("--sequence", type=whole(1), default=1024 if on_gpu else 64, help="tokens in a sequence")
    parser.add_argument("--lr", type=finite(above=0), default=6e-4, help="after the warm-up")
    parser.add_argument("--warmup", type=whole(0), help="steps; default: a tenth of all")
    parser.add_argument("--data", nargs="+", default=["stdlib"], help="as examples/pretrain/train.py takes it")
    parser.add_argument("--eval-every", type=whole(1), help="steps between held-out losses; default: a tenth of all")
    parser.add_argument("--eval-sequences", type=whole(1), default=512 if on_gpu else 4, help="for a held-out loss")
    parser.add_argument("--side-by-side", type=whole(1), help="groups of ranks at a time; default: as there are GPUs")
    parser.add_argument(
        "--timeout", type=finite(above=0), default=570, help="seconds for everything (default: %(default)g)"
    )
    parser.add_argument("--merge", nargs="+", metavar="JSON", help="train nothing: compare these results")
    parser.add_argument("--out", type=new_file, help="JSON file; default fp8_lm_convergence.json (with --merge: none)")
    args = parser.parse_args(argv)
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    args.nodes = 1
    args.warmup = max(1, args.steps // 10) if args.warmup is None else args.warmup
    args.eval_every = max(1, args.steps // 10) if args.eval_every is None else args.eval_every
    if args.merge:
        return args
    args.out = args.out or "runs/fp8_lm_convergence.json"
    named = [run for part in args.runs.split(",") for run in SEVERAL.get(part, (part,))]
    unknown = [run for run in named if run not in SECTIONS]
    if unknown:
        parser.error(f"unknown run {unknown[0]}; runs are {', '.join(SECTIONS)} and {', '.join(SEVERAL)}")
    if args.batch % args.ranks:
        parser.error(f"--batch {args.batch} cannot be shared by {args.ranks} ranks")
    if on_gpu and torch.cuda.device_count() < args.ranks:
        parser.error(f"{args.ranks} GPUs are needed, {torch.cuda.device_count()} found")
    args.side_by_side = args.side_by_side or max(1, torch.cuda.device_count() // args.ranks)
    args.runs = without_refused({run: SECTIONS[run] for run in named})
    return args


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(argparse.Namespace(**json.loads(sys.argv[2])))
        return
    args = parse()
    result = merge(args.merge, SECTIONS) if args.merge else measure(args)
    finish(result, args)
    for failure in result["failed"]:
        print(f"failed: {failure['run']}: {failure['error']}")
    sys.exit(1 if result["failed"] else 0)


if __name__ == "__main__":
    main()
