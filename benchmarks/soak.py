"""Thousands of steps of a tiny model with saves, loads, evaluations and generations: does anything grow?

    python -m benchmarks.soak --recipes zeropp fp8-lm --steps 5000 --out soak.json

Ranks on the CPU, over gloo. Every --every steps they evaluate, generate, save a checkpoint (the last two are kept) and
load it again; then each notes its resident memory, open file descriptors, threads, the bytes of all tensors that Python
can reach, and the seconds of a step since the last time. In the end the median of the last quarter of these notes is
compared with that of the first one (its first note left out: by then not all has been made that is made once):

    descriptors, threads, tensors   may not have grown at all (single notes find more tensors, or fewer descriptors)
    memory                          may have grown by 1 KiB a step between the quarters, 1/8 of the input of one layer,
                                    and by 8 MiB: while the allocator's lists fill, it was seen to rise by 2 to 4 MiB in
                                    300 steps, and then to stay

The exit status is 1 if anything grew.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path

import psutil

from benchmarks.harness.environment import describe
from benchmarks.harness.results import write_result
from benchmarks.harness.small_job import VOCABULARY, WAYS, engine_of, evaluate, generate, step_of
from examples.options import finite, new_file, whole
from tests.ranks import run_ranks

FREE_LISTS, A_STEP = 8 << 20, 1 << 10
EXACT = ("descriptors", "threads", "tensor_bytes")


def noted(step: int, seconds: float) -> dict:
    import torch

    gc.collect()
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    process = psutil.Process()
    row = {"step": step, "seconds_a_step": round(seconds, 4), "rss": process.memory_info().rss}
    counts = {"descriptors": process.num_fds(), "threads": process.num_threads()}
    return row | counts | {"tensor_bytes": sum(storages.values())}


def soak(way: str, steps: int, every: int, folder: str) -> list[dict]:
    """A rank's notes."""
    import torch.distributed as dist

    import zeropp_fp8
    from tests.models import batches

    zeropp_fp8.enable()
    engine = engine_of(way, dist.get_world_size())
    all_tokens = cycle(list(batches(64, dist.get_rank(), vocab=VOCABULARY)))
    notes, start = [], time.perf_counter()
    for step in range(1, steps + 1):
        tokens = next(all_tokens)
        step_of(engine, tokens)
        if step % every:
            continue
        seconds = (time.perf_counter() - start) / every
        evaluate(engine, tokens)
        generate(engine, tokens[:, :8])
        engine.save_checkpoint(folder)
        engine.load_checkpoint(folder)
        if dist.get_rank() == 0:
            shutil.rmtree(Path(folder, f"global_step{step - 2 * every}"), ignore_errors=step <= 2 * every)
        notes.append(noted(step, seconds))
        start = time.perf_counter()
    return notes


def growth(notes: list[dict]) -> dict:
    """By how much each quantity of one rank grew from the first to the last quarter, and which it may not."""
    quarter = max(1, len(notes) // 4)
    first, last = notes[1 : quarter + 1], notes[-quarter:]
    medians = [{name: statistics.median(n[name] for n in part) for name in (*EXACT, "rss")} for part in (first, last)]
    grown = {name: round(medians[1][name] - medians[0][name]) for name in medians[0]}
    bound = dict.fromkeys(EXACT, 0) | {"rss": FREE_LISTS + A_STEP * (last[0]["step"] - first[0]["step"])}
    return {"grown": grown, "bound": bound, "too_much": [name for name in grown if grown[name] > bound[name]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=WAYS, default=list(WAYS), metavar="RECIPE")
    parser.add_argument("--ranks", type=whole(2), default=2)
    parser.add_argument("--steps", type=whole(4), default=5000)
    parser.add_argument("--every", type=whole(1), default=50, help="steps; at least 4 times until --steps")
    parser.add_argument("--timeout", type=finite(above=0), default=7200, help="seconds for one recipe")
    parser.add_argument("--out", type=new_file, default="runs/soak.json")
    args = parser.parse_args()
    if args.steps < 4 * args.every:
        parser.error(f"--every {args.every} is less than 4 times in {args.steps} steps")
    result, well = {**describe("soak"), "finished": False, "ranks": args.ranks, "recipes": {}}, True
    for way in args.recipes:
        with tempfile.TemporaryDirectory() as folder:
            job = {"way": way, "steps": args.steps, "every": args.every, "folder": folder}
            ranks = run_ranks(soak, world=args.ranks, ranks_per_node=1, timeout=args.timeout, **job)
        result["recipes"][way] = [{"notes": notes, **growth(notes)} for notes in ranks]
        result["finished"] = len(result["recipes"]) == len(args.recipes)
        write_result(args.out, result)
        for rank, of_rank in enumerate(result["recipes"][way]):
            well = well and not of_rank["too_much"]
            said = ", ".join(f"{name} {grown:+d}" for name, grown in of_rank["grown"].items())
            print(
                f"{way}, rank {rank}, {args.steps} steps: {said}: {of_rank['too_much'] or 'nothing'} grew", flush=True
            )
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
