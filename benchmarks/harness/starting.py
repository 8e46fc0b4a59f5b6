"""A rank that trains two steps as a user's script does, and keeps how long each part of its start took.

    python -m benchmarks.harness.starting JSON

It imports nothing before it is to be timed: what a benchmark has imported, a script would still have to.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# In their order. "python" is what passes until this file runs, "model" has the optimizer too.
FIRST_STEP = ("python", "torch", "deepspeed", "plugin", "group", "model", "initialize", "first_step")
PARTS = (*FIRST_STEP, "second_step")
STOCK, COMPILED = "stock", "-compiled"
SECTIONS: dict[str, dict[str, Any] | None] = {STOCK: None}
SECTIONS |= {recipe: {"recipe": recipe} for recipe in ("lossless", "zeropp", "fp8-lm")}
SECTIONS |= {
    run + COMPILED: {**section, "compile": "blocks"} for run, section in list(SECTIONS.items()) if section is not None
}


class Parts:
    """Seconds of each part, one after the other; the first begins with the process."""

    def __init__(self) -> None:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # field 22, in ticks
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter() - age

    def ended(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part], self._last = now - self._last, now


def start(args: argparse.Namespace) -> None:
    """Train two steps; rank 0 adds the row of the rank that was last. In a round below 0 the row is not kept."""
    (run,) = args.runs
    section, parts = SECTIONS[run], Parts()
    parts.ended("python")
    import torch

    parts.ended("torch")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # 30 s of gcc on a CPU, which the plugin spares
    parts.ended("deepspeed")
    if section is not None:
        import zeropp_fp8

        zeropp_fp8.enable()
        parts.ended("plugin")
    from benchmarks.harness.environment import join
    from benchmarks.harness.jobs import announce
    from benchmarks.harness.llama import Llama
    from benchmarks.harness.measuring import random_tokens, synchronize
    from benchmarks.harness.results import append_to
    from benchmarks.harness.sizes import SIZES
    from benchmarks.harness.zero3 import ds_config

    device = join()
    announce(args, run)
    parts.ended("group")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = Llama(SIZES[args.size])
    torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    synchronize(device)
    parts.ended("model")
    # What the plugin says by default is a part of its start.
    config = ds_config(
        section and {**section, "report": {}}, args.micro_batch, small=SIZES[args.size].small, lean=False
    )
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    synchronize(device)
    parts.ended("initialize")
    batches = random_tokens(SIZES[args.size].vocabulary, args.micro_batch, args.sequence, device)
    losses, kernels = [], []
    for part in PARTS[-2:]:
        loss = engine(next(batches))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        synchronize(device)
        parts.ended(part)
        kernels.append(compiled_kernels())
    row = {"run": run, "cache": args.cache, "round": args.round, "seconds": parts.seconds, "losses": losses}
    row |= {"total_s": sum(parts.seconds.get(part, 0.0) for part in FIRST_STEP), "kernels": kernels}
    rows: list = [None] * args.ranks
    torch.distributed.all_gather_object(rows, row)
    if torch.distributed.get_rank() == 0 and args.round >= 0:
        append_to(args.out, "rows", max(rows, key=lambda each: each["total_s"]))
    engine.destroy()
    torch.distributed.destroy_process_group()


def compiled_kernels() -> int:
    """Kernels in Triton's cache, which a job's ranks share: each counts once, however many ranks have compiled it."""
    return len({path.parent for path in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")})


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):  # the plugin's table is made, and not shown once per start
        start(argparse.Namespace(**json.loads(sys.argv[2])))
