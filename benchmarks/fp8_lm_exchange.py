"""The gradient exchange of a Llama by itself: bytes and time in 32, 16 and 8 bits, nothing else running.

    python -m benchmarks.fp8_lm_exchange --ranks 4 --gbit 25 --out runs/fp8_lm_exchange.json      (root: namespaces)

All layers are reduced one after the other without waiting in between, then the ranks wait for the last: what a step
costs where nothing hides it.

    fp32, bf16     one reduce-scatter over all ranks a layer, as stock ZeRO-3 has it
    bf16-two-hop   the two hops of this project, nothing quantized
    fp8            the same in FP8 with scales that all ranks share, stored in FP8 (the levels of FP8-LM)
    int8-int4      the same in INT8 and INT4, blocks of 128 (`zeropp`)
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.command import add_link, choose_runs, command, cut_into_nodes
from benchmarks.harness.llama import Llama
from benchmarks.harness.nodes import sent_bytes, set_rate_everywhere
from benchmarks.harness.question import Question
from benchmarks.harness.sizes import SIZES, Size
from examples.options import whole
from zeropp_fp8.comm import Topology, WireLedger, make_topology
from zeropp_fp8.comm.lanes import Lane
from zeropp_fp8.comm.reduce_scatter import ReduceScatterPlan, Reduction, Rings
from zeropp_fp8.formats import SharedScaleFormat, make_format
from zeropp_fp8.formats.scale_table import SharedScales

WAYS = ("fp32", "bf16", "bf16-two-hop", "fp8", "int8-int4")
LARGEST_CODE = 448.0  # of FP8 E4M3


def layer_gradients(size: Size, device: torch.device) -> list[list[Tensor]]:
    """bf16 numbers in the shapes of a Llama, a list for each layer and one for what is outside of layers."""
    with torch.device("meta"):
        model = Llama(size)
    layers = [[p.shape for p in layer.parameters()] for layer in model.layers]
    layers.append([p.shape for name, p in model.named_parameters() if not name.startswith("layers.")])
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    return [
        [torch.randn(shape, generator=generator, device=device).mul_(1e-3).to(torch.bfloat16) for shape in shapes]
        for shapes in layers
    ]


class FlatExchange:
    """A reduce-scatter over all ranks for each layer, in `dtype`."""

    def __init__(self, layers: list[list[Tensor]], dtype: torch.dtype, ranks: int) -> None:
        self._layers, self._dtype, self._ranks = layers, dtype, ranks

    def __call__(self, ledger: WireLedger) -> None:
        pending = []
        for grads in self._layers:
            flat = torch.cat([grad.reshape(-1).to(self._dtype) for grad in grads])
            flat = torch.nn.functional.pad(flat, (0, -flat.numel() % self._ranks))
            own = torch.empty(flat.numel() // self._ranks, dtype=self._dtype, device=flat.device)
            work = dist.reduce_scatter_tensor(own, flat.mul_(1 / self._ranks), async_op=True)
            ledger.sent_around_ring(flat.numel() * flat.element_size())
            pending.append((work, flat, own))
        for work, _, _ in pending:
            work.wait()


class TwoHopExchange:
    """This project's reduction, in a format for both hops; with scales that ranks share where the format has none."""

    def __init__(self, layers: list[list[Tensor]], formats: tuple, topology: Topology, device: torch.device) -> None:
        self._layers, self._device, self._topology = layers, device, topology
        self._plans = [
            ReduceScatterPlan([g.shape for g in grads], [g.dtype for g in grads], topology, *formats, device)
            for grads in layers
        ]
        self._rings = Rings.on(device)
        self._lanes = Lane(device), Lane(device)
        shared = isinstance(formats[1], SharedScaleFormat)
        self._scales = [self._shared_scales(grads) if shared else None for grads in layers]
        self._results = [
            [
                torch.empty(numel, dtype=torch.uint8 if shared and g.dim() > 1 else g.dtype, device=device)
                for g, numel in zip(grads, plan.slice_numels)
            ]
            for grads, plan in zip(layers, self._plans)
        ]

    def _shared_scales(self, grads: list[Tensor]) -> SharedScales:
        amax = torch.stack([grad.float().abs().amax() for grad in grads])
        dist.all_reduce(amax, op=dist.ReduceOp.MAX)
        decode = amax / LARGEST_CODE
        encode = 1 / (decode * self._topology.world_size)  # pre-scaled: the sum stays in range
        counts = torch.zeros(3, 2, dtype=torch.int64, device=self._device)
        return SharedScales(encode, decode, torch.zeros_like(amax), counts)

    def __call__(self, ledger: WireLedger) -> None:
        for plan, grads, results, scales in zip(self._plans, self._layers, self._results, self._scales):
            reduction = Reduction(self._rings, *self._lanes, ledger, shared=scales)
            for _ in plan.run(grads, results, reduction):
                pass
        for lane in self._lanes:
            lane.before_current()
        if self._scales[0] is not None:  # once per step: the amax of all tensors, and the counts
            for table in (torch.cat([scales.amax for scales in self._scales]), self._scales[0].counts):
                dist.all_reduce(table, op=dist.ReduceOp.MAX)
                ledger.sent_around_ring(table.numel() * table.element_size(), rounds=2)


def make_exchange(
    way: str, layers: list[list[Tensor]], topology: Topology, device: torch.device
) -> Callable[[WireLedger], None]:
    """The exchange with this name of WAYS."""
    if way in ("fp32", "bf16"):
        return FlatExchange(layers, torch.float32 if way == "fp32" else torch.bfloat16, topology.world_size)
    if way == "fp8":
        formats = (SharedScaleFormat("fp8_e4m3"),) * 2
    elif way == "int8-int4":
        formats = (make_format("int8", block_size=128), make_format("int4", block_size=128, hadamard=True))
    else:
        formats = (None, None)
    return TwoHopExchange(layers, formats, topology, device)


def measure(run: str, args, device: torch.device) -> dict:
    """The row of one way in one round."""
    if args.gbit is not None:
        set_rate_everywhere(args.gbit or None)
    size, per_node = SIZES[args.size], args.ranks // args.nodes
    topology = make_topology(None, per_node)
    layers = layer_gradients(size, device)
    exchange = make_exchange(run, layers, topology, device)
    exchange(WireLedger(args.nodes, per_node))  # warm-up
    ledger = WireLedger(args.nodes, per_node)
    _finish(device)
    before, start = sent_bytes(), time.perf_counter()
    with ledger.counting("gradients"):
        exchange(ledger)
    _finish(device)
    ms = 1e3 * (time.perf_counter() - start)
    sent = [0] * args.ranks
    dist.all_gather_object(sent, sent_bytes() - before)
    ledger.end_step()
    return {
        "run": run,
        "round": args.round,
        "elements": sum(grad.numel() for grads in layers for grad in grads),
        "ms": ms,
        "wire_bytes_per_rank": ledger.report()["per_step"]["gradients"],
        # Of the node that sent more; without a link there is nothing to see.
        "tx_bytes_per_node": None if args.gbit is None else max(sent),
    }


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def compare(rows: list[dict]) -> list[dict]:
    """A line per way: median time, bytes per element, and what both are below 32 and 16 bits, in percent."""
    lines = []
    for way in dict.fromkeys(row["run"] for row in rows):
        mine = [row for row in rows if row["run"] == way]
        sent = mine[0]["wire_bytes_per_rank"]
        lines.append(
            {
                "run": way,
                "ms": statistics.median(row["ms"] for row in mine),
                "min_ms": min(row["ms"] for row in mine),
                "max_ms": max(row["ms"] for row in mine),
                "megabytes": sum(sent.values()) / 1e6,
                "megabytes_between_nodes": sent["inter"] / 1e6,
            }
        )
    by_way = {line["run"]: line for line in lines}
    for line in lines:
        for base in ("fp32", "bf16"):
            if base in by_way:
                line[f"bytes_below_{base}"] = 100 * (1 - line["megabytes"] / by_way[base]["megabytes"])
                line[f"time_below_{base}"] = 100 * (1 - line["ms"] / by_way[base]["ms"])
    return lines


def show(lines: list[dict]) -> None:
    """Print the table."""
    print(
        "\nGradient exchange by itself; MB that a rank sends. Targets for fp8: bytes 74 % below fp32, 48 % below bf16; "
        "the paper's 63-65 % less communication"
    )
    print(
        f"{'':<14}{'ms':>9}{'min':>9}{'max':>9}{'MB':>10}{'inter':>10}"
        f"{'bytes below fp32/bf16':>24}{'time below fp32/bf16':>24}"
    )
    for line in lines:
        bytes_below, time_below = (
            " / ".join(f"{line[key]:.1f} %" for key in (f"{what}_below_fp32", f"{what}_below_bf16") if key in line)
            for what in ("bytes", "time")
        )
        print(
            f"{line['run']:<14}{line['ms']:>9.1f}{line['min_ms']:>9.1f}{line['max_ms']:>9.1f}{line['megabytes']:>10.2f}"
            f"{line['megabytes_between_nodes']:>10.2f}{bytes_below:>24}{time_below:>24}"
        )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command(__doc__, "fp8_lm_exchange", WAYS, SIZES, "1.3b" if torch.cuda.is_available() else "tiny")
    add_link(parser)
    parser.add_argument("--rounds", type=whole(1), default=2, help="odd ones backwards (default %(default)s)")
    args = parser.parse_args(argv)
    cut_into_nodes(args, parser)
    choose_runs(args, parser, WAYS)
    return args


QUESTION = Question(
    name="fp8_lm_exchange",
    parse=parse,
    settings=("size", "ranks", "nodes", "gbit"),
    work=measure,
    line=lambda row: f"{row['run']}: {row['ms']:.1f} ms",
    compared=lambda result: {"comparison": compare(result["rows"])},
    show=lambda result: show(result["comparison"]),
)

if __name__ == "__main__":
    QUESTION.answer()
