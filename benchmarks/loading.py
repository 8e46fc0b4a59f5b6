"""The peak of each rank's host memory while a checkpoint of a mixture of experts is loaded and an engine made.

    python -m benchmarks.loading --ranks 2 --out runs/loading.json

transformers saves a Qwen3-MoE with random weights in files of at most --gb, with matrices of each expert. Fresh ranks
load it by `from_pretrained` under DeepSpeed's configuration, add LoRA and make an engine (harness/lora.py): stock
ZeRO-3 in bf16, and with frozen weights as codes. The largest packed parameter is a fifth of a file of 1 GB, as that of
Qwen3-30B-A3B is of its files of 4 GB.

Anonymous memory counts, above that before (harness/host_memory.py). Pages of the mapped files, which the system may
drop, are a column of their own. The target: beside its shards, no rank has more than 1.2 times the largest file. The
last column has the same in units of the largest parameter, which is gathered whole.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from benchmarks.harness.command import choose_sections, command
from benchmarks.harness.hf_llama import maker_of, save_random
from benchmarks.harness.host_memory import PeakOfMemory
from benchmarks.harness.lora import QLORA, SECTIONS, STOCK, LoraRun
from benchmarks.harness.question import Question, runs_apart
from benchmarks.harness.sizes import MIXTURES
from benchmarks.harness.tables import cell, verdict
from examples.options import finite
from zeropp_fp8 import enable, sharded

TARGET = 1.2  # times the largest file
RUNS = {run: SECTIONS[run] for run in (STOCK, "int8", QLORA)}


@contextlib.contextmanager
def checkpoint(args) -> Iterator[None]:
    """The checkpoint in args.folder, made by a process whose memory is free again when ranks need theirs."""
    with tempfile.TemporaryDirectory() as args.folder:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            pool.submit(save_random, MIXTURES[args.size], args.gb, args.folder).result()
        yield


def measure(run: str, args, device: torch.device) -> dict:
    """The row of one run; lists have a number per rank."""
    import peft  # noqa: F401 - as all imports here, before memory counts
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    size, known = MIXTURES[args.size], []
    maker_of(size)  # classes of mixtures are imported before zero.Init
    enable()  # LoraRun takes the plugin out again for stock

    def loaded(config: dict) -> torch.nn.Module:
        known.append(HfDeepSpeedConfig(config))  # transformers knows it as long as it is there
        return AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.bfloat16)

    started = time.perf_counter()
    with PeakOfMemory() as memory:
        trainer = LoraRun(RUNS[run], loaded, device, leaf=run == STOCK, small=size.small, lean=True)
    mine = {"seconds": time.perf_counter() - started, "peak_bytes": memory.peak, "mapped_bytes": memory.mapped}
    parameters = list(trainer.engine.module.parameters())
    mine["rest_bytes"] = sum(sharded.shard(param).nbytes for param in parameters)
    ranks: list = [None] * args.ranks
    torch.distributed.all_gather_object(ranks, mine)
    row = {"run": run, "parameters": trainer.parameters, **{name: [each[name] for each in ranks] for name in mine}}
    row["largest_bytes"] = 2 * max(math.prod(sharded.shape(param)) for param in parameters)
    row["file_bytes"] = [path.stat().st_size for path in sorted(Path(args.folder).glob("*.safetensors"))]
    trainer.close()
    return row


def compare(rows: list[dict]) -> list[dict]:
    """Peak beside what rests, of the rank that has most of it, in largest files and largest parameters."""
    lines = []
    for row in rows:
        beside = max(peak - rest for peak, rest in zip(row["peak_bytes"], row["rest_bytes"]))
        line = {"run": row["run"], "beside_bytes": beside, "of_file": beside / max(row["file_bytes"])}
        line["of_largest"] = beside / row["largest_bytes"]
        lines.append(line if row["run"] == STOCK else {**line, "met": line["of_file"] <= TARGET})
    return lines


def show(result: dict) -> None:
    """Print the table, of the rank that has most."""
    some = result["rows"][0]
    print(
        f"\nGB of host memory, {result['settings']['ranks']} rank(s), {some['parameters'] / 1e9:.2f} B parameters in "
        f"{len(some['file_bytes'])} files of at most {max(some['file_bytes']) / 1e9:.3f}, the largest of "
        f"{some['largest_bytes'] / 1e9:.3f}; target: {TARGET:g} files beside what rests\n{'':<12}"
        + "".join(f"{name:>9}" for name in ("peak", "mapped", "rests", "beside", "files", "largest", "s"))
    )
    for row, line in zip(result["rows"], result["comparison"]):
        found = [max(row[name]) / 1e9 for name in ("peak_bytes", "mapped_bytes", "rest_bytes")]
        found += [line["beside_bytes"] / 1e9, line["of_file"], line["of_largest"], max(row["seconds"])]
        print(f"{row['run']:<12}{''.join(cell(value, 2, width=9) for value in found)}  {verdict(line)}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command(__doc__, "loading", RUNS, MIXTURES, "2b-moe")
    parser.add_argument("--gb", type=finite(above=0), default=1.0, help="the most in a file (default %(default)g)")
    args = parser.parse_args(argv)
    args.nodes, args.rounds, args.gbit = 1, 1, None
    choose_sections(args, parser, RUNS)
    return args


QUESTION = Question(
    name="loading",
    parse=parse,
    settings=("size", "ranks", "nodes", "gbit", "gb"),
    jobs=runs_apart,
    work=measure,
    line=lambda row: f"{row['run']}: at most {max(row['peak_bytes']) / 1e9:.3f} GB",
    compared=lambda result: {"comparison": compare(result["rows"])},
    show=show,
    links=checkpoint,
)

if __name__ == "__main__":
    QUESTION.answer()
