"""What CUDA graphs of a unit's way, and of the optimizer, save the host: launched one by one, and replayed.

    python -m benchmarks.cuda_graphs --ranks 2 --out runs/cuda_graphs.json

Nothing else runs. All decoder layers of a model are fetched one after the other, forward and backward:

    fetch             a rank's slices are encoded (INT8, block 256), gathered over all ranks, decoded into bf16
    fetch-graph       a graph of each layer that does the same, with memory of its own for codes and values
    optimizer         torch's fused AdamW of a rank's slices as one fp32 tensor
    optimizer-graph   a graph of it

`host_ms` is until the host has started all of it, what a step waits for where the host bounds it; `ms` until the device
is done. `mb`: memory that must stay where it is between steps, which otherwise is shared by all layers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.harness.command import add_link, choose_runs, command, cut_into_nodes
from benchmarks.harness.llama import Llama
from benchmarks.harness.question import Question
from benchmarks.harness.sizes import SIZES, Size
from examples.options import whole
from zeropp_fp8.comm.all_gather import start_level
from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder
from zeropp_fp8.comm.topology import INTRA, Level
from zeropp_fp8.formats import make_format

GRAPH = "-graph"
RUNS = ("fetch", f"fetch{GRAPH}", "optimizer", f"optimizer{GRAPH}")
SHARED = 3  # layers whose codes, or whose values, are there at once
WARM_UP = 3


class Layer:
    """One decoder layer: this rank's slices, and the way of all into values."""

    def __init__(self, shapes: list[torch.Size], level: Level, device: torch.device) -> None:
        ranks, self.level = level.size, level
        numels = [-(-shape.numel() // ranks) for shape in shapes]
        self.slices = [torch.randn(n, device=device, dtype=torch.float32).bfloat16() for n in numels]
        self.numels = [n * ranks for n in numels]
        formats = [make_format("int8", block_size=256)] * len(shapes)
        self.layout = PayloadLayout(numels, formats, [torch.bfloat16] * len(shapes), device)
        self.own, self.all = SliceOrder([0], device), SliceOrder(list(range(ranks)), device)

    def codes(self) -> torch.Tensor:
        rows = (self.level.size, self.layout.row_bytes)
        return torch.empty(rows, dtype=torch.uint8, device=self.slices[0].device)

    def values(self) -> list[torch.Tensor]:
        """In one buffer, each at a multiple of 16 bytes."""
        places = [-(-n // 8) * 8 for n in self.numels]
        flat = torch.empty(sum(places), dtype=torch.bfloat16, device=self.slices[0].device)
        return [part[:n] for part, n in zip(flat.split(places), self.numels)]

    def fetch(self, codes: torch.Tensor, values: list[torch.Tensor]) -> None:
        rank = dist.get_rank()
        own = codes[rank : rank + 1]
        self.layout.encode(self.slices, self.own, own)
        work = start_level(codes.view(-1), own.view(-1), self.level, None)
        if work is not None:
            work.wait()
        self.layout.decode(codes, self.all, values, None)


def graph_of(do: Callable[[], None], pool) -> torch.cuda.CUDAGraph:
    """`do`, which has been done before, as a graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        do()
    return graph


def fetches(size: Size, level: Level, device: torch.device, by_graph: bool) -> tuple[Callable[[], None], int]:
    """(what fetches all layers forward and backward, bytes of memory that stays)."""
    with torch.device("meta"):
        shapes = [p.shape for p in Llama(size).layers[0].parameters() if p.dim() > 1]
    layers = [Layer(shapes, level, device) for _ in range(size.layers)]
    order = [*layers, *reversed(layers)]
    if not by_graph:
        codes = [layers[0].codes() for _ in range(SHARED)]

        def one_by_one() -> None:
            for i, layer in enumerate(order):
                layer.fetch(codes[i % SHARED], layer.values())

        return one_by_one, sum(c.numel() for c in codes)
    before, graphs = torch.cuda.memory_allocated(device), {}
    stays = [(layer.codes(), layer.values()) for layer in layers]
    for layer, memory in zip(layers, stays):
        layer.fetch(*memory)  # tables are made, kernels compiled
        graphs[layer] = graph_of(lambda layer=layer, memory=memory: layer.fetch(*memory), None)
    replayed = [graphs[layer] for layer in order]

    def replay() -> None:
        for graph in replayed:
            graph.replay()

    replay.kept = stays
    return replay, torch.cuda.memory_allocated(device) - before


def optimizer_step(size: Size, level: Level, device: torch.device, by_graph: bool) -> tuple[Callable[[], None], int]:
    """(a step of the optimizer over this rank's part, bytes of memory that stays besides)."""
    with torch.device("meta"):
        numel = sum(p.numel() for p in Llama(size).parameters()) // level.size
    weight = torch.nn.Parameter(torch.zeros(numel, device=device, dtype=torch.float32))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=1e-4, fused=True, capturable=by_graph)
    if not by_graph:
        return optimizer.step, 0
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            optimizer.step()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph_of(optimizer.step, None).replay, weight.grad.numel() * weight.grad.element_size()


def measure(run: str, args, device: torch.device) -> dict:
    """The row of one run in one round."""
    level = Level(dist.group.WORLD, args.ranks, INTRA)
    made = fetches if run.startswith("fetch") else optimizer_step
    do, stays = made(SIZES[args.size], level, device, run.endswith(GRAPH))
    host, all_of_it = [], []
    for _ in range(WARM_UP + args.steps):
        _finish(device)
        start = time.perf_counter()
        do()
        host.append(1e3 * (time.perf_counter() - start))
        _finish(device, barrier=False)
        all_of_it.append(1e3 * (time.perf_counter() - start))
    return {
        "run": run,
        "round": args.round,
        "host_ms": statistics.median(host[WARM_UP:]),
        "ms": statistics.median(all_of_it[WARM_UP:]),
        "mb": stays / 1e6,
    }


def _finish(device: torch.device, barrier: bool = True) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    if barrier:
        dist.barrier()


def compare(rows: list[dict]) -> list[dict]:
    """A line a run: medians over rounds, and what a graph saves the host."""
    lines = []
    for run in dict.fromkeys(row["run"] for row in rows):
        mine = [row for row in rows if row["run"] == run]
        lines.append({"run": run, **{key: statistics.median(r[key] for r in mine) for key in ("host_ms", "ms", "mb")}})
    by_run = {line["run"]: line for line in lines}
    for line in lines:
        launched = by_run.get(line["run"].removesuffix(GRAPH))
        if line["run"].endswith(GRAPH) and launched:
            line["saves_host_ms"] = launched["host_ms"] - line["host_ms"]
    return lines


def show(lines: list[dict]) -> None:
    """Print the table."""
    print(f"\n{'':<18}{'host ms':>10}{'ms':>10}{'MB that stay':>14}{'saves the host':>16}")
    for line in lines:
        saves = f"{line['saves_host_ms']:.2f} ms" if "saves_host_ms" in line else ""
        print(f"{line['run']:<18}{line['host_ms']:>10.2f}{line['ms']:>10.2f}{line['mb']:>14.1f}{saves:>16}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    runs = RUNS if on_gpu else [run for run in RUNS if not run.endswith(GRAPH)]
    parser = command(__doc__, "cuda_graphs", runs, SIZES, "1.3b" if on_gpu else "tiny")
    add_link(parser)
    parser.add_argument("--rounds", type=whole(1), default=2, help="odd ones backwards (default %(default)s)")
    parser.add_argument("--steps", type=whole(1), default=10, help="that are timed (default %(default)s)")
    args = parser.parse_args(argv)
    cut_into_nodes(args, parser)
    if args.nodes != 1:
        parser.error("--gbit: graphs are of one node, whose ranks are one level")
    choose_runs(args, parser, runs)
    return args


QUESTION = Question(
    name="cuda_graphs",
    parse=parse,
    settings=("size", "ranks", "nodes", "gbit", "steps"),
    work=measure,
    line=lambda row: f"{row['run']}: {row['host_ms']:.2f} ms of the host",
    compared=lambda result: {"comparison": compare(result["rows"])},
    show=lambda result: show(result["comparison"]),
)

if __name__ == "__main__":
    QUESTION.answer()
