"""The largest micro-batch or sequence that fits, found by doubling and then halving the interval; and its speed.

A try that does not fit ends its processes, so every run has its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.harness.environment import forget_memory
from benchmarks.harness.jobs import Job, run_jobs
from benchmarks.harness.measuring import out_of_memory, timed_steps
from benchmarks.harness.results import append_to, read_result

KEPT = ("micro_batch", "sequence", "tokens_per_s", "mfu", "step_ms", "peak_gib")  # of a row in the comparison
ROUNDED_TO = 128  # tokens that a refined sequence is a multiple of: FP8 GEMMs take multiples of 16


def measure(
    run: str,
    args,
    device: torch.device,
    make: Callable[[], object],
    batches: Callable[[int, int], Iterator],
    speed: Callable[[float, int, int], dict],
) -> None:
    """Try args.tries of (micro-batch, sequence) in turn; a row each, the last perhaps of one that does not fit.

    Args:
        make: makes the training, with `step` and `parameters`.
        batches: of its micro-batches of so many sequences and tokens.
        speed: what a row says of the speed, from the milliseconds of a step, micro-batch and sequence.
    """
    trainer = None
    for micro_batch, sequence in args.tries:
        row = {"part": "limits", "axis": args.axis, "run": run, "micro_batch": micro_batch, "sequence": sequence}
        try:
            trainer = trainer or make()
            if device.type == "cuda":
                forget_memory(device)
                torch.cuda.reset_peak_memory_stats()
            timed = timed_steps(trainer, batches(micro_batch, sequence), args.warmup, args.steps, device)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            row["parameters"] = None if trainer is None else trainer.parameters
            # Torch's message says how much was allocated, and how much it had that was in too small pieces.
            append_to(args.out, "rows", row | {"fits": False, "error": str(error).partition("\n")[0][:600]})
            append_to(args.out, "started", {"label": args.label, "run": run, "ended": True})
            what = f"{micro_batch} x {sequence} tokens do" if trainer else "the model alone does"
            print(f"{run}: {what} not fit", flush=True)
            # The engine is in the middle of a step, and other ranks wait for this one: end them all.
            raise SystemExit(1) from None
        row |= {"parameters": trainer.parameters, "fits": True} | timed
        row |= speed(row["step_ms"], micro_batch, sequence)
        if device.type == "cuda":
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if torch.distributed.get_rank() == 0:
            append_to(args.out, "rows", row)
            print(f"{run}: {micro_batch} x {sequence} tokens fit, {row['tokens_per_s']:.0f} tokens/s", flush=True)


def search(module: str, args, deadline: float, folders: Sequence[str] = ()) -> None:
    """Double until a run does not fit any more, then halve the interval args.refine times.

    With expandable segments unless the environment says otherwise: what fits is then not a matter of how the allocator
    happened to cut gigabytes of logits.
    """
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

    def shape(units: int) -> tuple[int, int]:
        return (units, args.sequence) if args.axis == "batch" else (args.micro_batch, units)

    def tried(run: str) -> dict[int, bool]:
        column = "micro_batch" if args.axis == "batch" else "sequence"
        rows = read_result(args.out)["rows"]
        return {row[column]: row["fits"] for row in rows if row["run"] == run}

    sizes = [args.start]
    while sizes[-1] < args.stop:
        sizes.append(sizes[-1] * 2)
    jobs = [Job(run, [run], {"tries": [shape(units) for units in sizes]}) for run in args.runs]
    run_jobs(module, jobs, args, deadline, side_by_side=args.side_by_side, folders=folders)
    for number in range(args.refine):
        jobs = []
        for run in args.runs:
            fits = [units for units, fit in tried(run).items() if fit]
            too_large = [units for units, fit in tried(run).items() if not fit]
            if fits and too_large:
                middle = (max(fits) + min(too_large)) // 2
                if args.axis == "sequence":
                    middle -= middle % ROUNDED_TO
                if max(fits) < middle < min(too_large):
                    jobs.append(Job(f"{run}, refined {number}", [run], {"tries": [shape(middle)]}))
        run_jobs(module, jobs, args, deadline, side_by_side=args.side_by_side, folders=folders)


def compare(rows: list[dict]) -> list[dict]:
    """For each run the largest that fits, and the smallest that does not."""
    lines = []
    for run in dict.fromkeys(row["run"] for row in rows):
        fits = [row for row in rows if row["run"] == run and row["fits"]]
        not_any_more = [row for row in rows if row["run"] == run and not row["fits"]]
        line = {"run": run, "largest": None, "fastest": None, "too_large": None}
        if fits:
            for name, row in (
                ("largest", max(fits, key=_tokens_of)),
                ("fastest", max(fits, key=lambda row: row["tokens_per_s"])),
            ):
                line[name] = {key: row.get(key) for key in KEPT}
        if not_any_more:
            smallest = min(not_any_more, key=_tokens_of)
            line["too_large"] = {key: smallest[key] for key in KEPT[:2]}
        lines.append(line)
    return lines


def _tokens_of(row: dict) -> int:
    return row["micro_batch"] * row["sequence"]


def show(result: dict) -> None:
    """Print the table."""
    settings = result["settings"]
    numel = max(row["parameters"] or 0 for row in result["rows"])
    print(
        f"\nLargest {result['rows'][0]['axis']} that fits, {numel / 1e9:.3f} B parameters, checkpointing "
        f"{'on' if settings['checkpointing'] else 'off'}" + (f", {settings['gib']:g} GiB" if settings["gib"] else "")
    )
    print(f"{'':<14}{'fits':>14}{'does not':>14}{'tokens/s':>11}{'MFU':>9}{'GiB':>8}{'fastest at':>14}{'tokens/s':>11}")
    for line in result["comparison"]:
        shapes = [f"{r['micro_batch']} x {r['sequence']}" if r else "-" for r in (line["largest"], line["too_large"])]
        text = f"{line['run']:<14}{shapes[0]:>14}{shapes[1]:>14}"
        if line["largest"]:
            large, fast = line["largest"], line["fastest"]
            mfu = "-" if large["mfu"] is None else f"{100 * large['mfu']:.1f} %"
            peak = "-" if large["peak_gib"] is None else f"{large['peak_gib']:.1f}"
            text += f"{large['tokens_per_s']:>11.0f}{mfu:>9}{peak:>8}"
            text += f"{fast['micro_batch']} x {fast['sequence']}".rjust(14) + f"{fast['tokens_per_s']:>11.0f}"
        print(text)
