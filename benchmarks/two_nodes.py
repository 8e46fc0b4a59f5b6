"""Step time, bytes and losses of this project and its peers on two emulated nodes, at one or more link rates.

    python -m benchmarks.two_nodes --gbit nvlink,25,10 --quantized-gbit 6,4 --equivalence

Runs as root (namespaces); 4 ranks as 2 nodes x 2, on GPUs over NCCL, else over gloo on the CPU with a small model.
Every run trains the same model on the same data in bf16, clips gradients at 1.0 and uses AdamW with fp32 master
weights. Runs follow one another in the same processes, because starting them anew takes 35 s a run on GPUs; each is
built once and then timed at every rate, the link being reshaped in between. "link" is what an all-gather has reached on
it just before: a busy host may move less than the rate, and times are then of that link.

    stock, stock-leaf        DeepSpeed ZeRO-3; with every decoder layer as a z3 leaf module
    lossless, zeropp, ...    ZeRO-3 with this project's recipes
    in-tree, in-tree-leaf    DeepSpeed's own ZeRO++ (quantized weights and gradients, hpZ in a node); GPUs only
    fsdp2, hsdp              fully_shard over all ranks; sharded in a node and replicated between nodes
Only where --runs names them:
    zeropp-exact             weights in 16 bits that are sent as exact differences, gradients as with `zeropp`
    lossless-exact           `lossless` with such differences; their bytes depend on --lr
    zeropp-whole, fp8-lm-zeropp-whole
                             `zeropp` and `fp8-lm-zeropp` without differences of their codes
    zeropp-owners, zeropp-muon, zeropp-exact-owners, zeropp-exact-muon, stock-muon
                             tensors with one owner each; with Muon; DeepSpeed's own Muon (see harness/peers.py)
    fp8-lm, ...              ZeRO-3 with FP8 compute, gradients and states
    fsdp2-torchao            fully_shard of torchao's float8 training
    ...-compiled             with decoder layers compiled
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness.environment import NO_IN_TREE, describe, forget_memory, join
from benchmarks.harness.measuring import Steps, micro_batches, random_tokens, reached_gbit, timed_steps
from benchmarks.harness.nodes import GBIT, launch, set_rate_everywhere, two_nodes
from benchmarks.harness.peers import (
    EXACT,
    FSDP,
    IN_FP8,
    IN_TREE,
    LR,
    MODELS,
    ONE_NODE_RUNS,
    OWNERS,
    QUANTIZED,
    RUNS,
    STOCK_MUON,
    TORCHAO,
    UNDER_FSDP,
    WHOLE,
    WORLD,
    made,
    wire_of,
)
from benchmarks.harness.results import append_to, begin_result, end_result, read_result, write_result
from benchmarks.harness.sizes import EVERY_SIZE
from examples.options import finite, new_file, whole

ONE_NODE = "nvlink"  # all ranks in one node
SETTINGS = ("model", "micro_batch", "accumulation", "tokens", "lr")


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = "on GPUs {}, on a CPU {}"
    parser.add_argument(
        "--gbit",
        help=f"rates between the nodes in Gbit/s, separated by commas; 0: not shaped; {ONE_NODE}: one node, no link "
        f"(default {on_gpu.format('nvlink,25,10', '0.2,0.5')})",
    )
    parser.add_argument(
        "--quantized-gbit",
        metavar="GBIT",
        help=f"more rates, for {' and '.join(QUANTIZED)} only: the low ones that --equivalence needs, where a step of "
        "stock takes 20 s and more",
    )
    parser.add_argument("--runs", help=f"some of {','.join(RUNS)} (default: all that run here)")
    parser.add_argument("--model", choices=MODELS, help=f"default {on_gpu.format('1.3b', 'small')}")
    parser.add_argument("--ranks", type=whole(2), default=4, help="of both nodes together (default 4)")
    parser.add_argument("--micro-batch", type=whole(1), default=1, help="sequences per rank and micro-batch")
    parser.add_argument("--accumulation", type=whole(1), default=1, help="micro-batches a step (default 1)")
    parser.add_argument("--tokens", type=whole(1), help=f"tokens in a sequence (default {on_gpu.format(1024, 128)})")
    parser.add_argument("--lr", type=finite(above=0), default=LR, help="learning rate (default %(default)g)")
    parser.add_argument("--steps", type=whole(1), default=6, help="timed steps at each rate")
    parser.add_argument(
        "--warmup", type=whole(0), default=3, help="steps before the first rate; one step before each other"
    )
    parser.add_argument(
        "--fsdp-reduce-dtype", choices=("bf16", "fp32"), default="bf16", help="gradients of fsdp2, hsdp"
    )
    parser.add_argument(
        "--equivalence",
        type=finite(least=0),
        nargs="?",
        const=math.inf,
        metavar="GBIT",
        help="the lowest rate at which each other run is as fast as stock at this rate, interpolated (default: the "
        "highest rate measured)",
    )
    parser.add_argument("--timeout", type=finite(above=0), default=3600, help="seconds for everything")
    parser.add_argument("--out", type=new_file, default="runs/two_nodes.json")
    args = parser.parse_args(argv)
    _complete(args, parser)
    return args


def _complete(args, parser) -> None:
    """Fill in what depends on the machine, and refuse what it cannot do."""
    import torch

    on_gpu = torch.cuda.is_available()
    args.model = args.model or ("1.3b" if on_gpu else "small")
    args.tokens = args.tokens or (1024 if on_gpu else 128)
    names = args.runs.split(",") if args.runs else [run for run in RUNS if _by_default(run, args, on_gpu)]
    for run in names:
        if run not in RUNS:
            parser.error(f"--runs: {run} is none of {', '.join(RUNS)}")
        if run in IN_TREE and not on_gpu:
            parser.error(f"--runs {run}: {NO_IN_TREE}")
    if args.ranks % 2:
        parser.error("--ranks: as many in both nodes")
    if on_gpu and torch.cuda.device_count() < args.ranks:
        parser.error(f"{args.ranks} GPUs are needed, {torch.cuda.device_count()} found")
    args.runs = names
    args.gbit = _rates(args.gbit or ("nvlink,25,10" if on_gpu else "0.2,0.5"), parser)
    args.quantized_gbit = _rates(args.quantized_gbit, parser) if args.quantized_gbit else []


def _by_default(run: str, args, on_gpu: bool) -> bool:
    """Whether a run is measured where none is named."""
    named = ("zeropp-exact", *EXACT, *WHOLE, *OWNERS, STOCK_MUON, *IN_FP8, *TORCHAO, *UNDER_FSDP, *ONE_NODE_RUNS)
    if run.endswith("-compiled") or run in named:
        return False
    return (on_gpu or run not in IN_TREE) and (args.accumulation > 1 or run not in WORLD)


def _rates(text: str, parser) -> list:
    rates = []
    for part in text.split(","):
        try:
            rates.append(part if part == ONE_NODE else float(part))
        except ValueError:
            parser.error(f"{part} is no rate")
        if part != ONE_NODE and not 0 <= rates[-1] < math.inf:
            parser.error(f"{part} Gbit/s: 0 (not shaped) or more")
    return rates


# --- measuring, in every rank


def measure(run: str, args, device) -> None:
    """Build one run and time it at every rate; rank 0 writes a row for each."""
    import torch

    found = forget_memory(device)
    trainer = made(run, args, device, args.lr)
    forget_memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    tokens = random_tokens(EVERY_SIZE[args.model].vocabulary, args.micro_batch, args.tokens, device)
    batches, engine = micro_batches(tokens, args.accumulation), trainer.session
    counters = {"ledger_bytes_per_node_step": lambda: _ledger_bytes(engine)} if engine else {}
    more = args.quantized_gbit if run in QUANTIZED and ONE_NODE not in args.gbit else []
    for index, rate in enumerate([*args.gbit, *more]):
        _set_rate(rate)
        row = {"run": run, "gbit": rate, "reached_gbit": None if rate == ONE_NODE else reached_gbit(device)}
        row["ledger_bytes_per_node_step"] = None  # without the plugin
        warmup = args.warmup if index == 0 else 1
        row |= timed_steps(Steps(trainer), batches, warmup, args.steps, device, counters)
        row |= _bytes_and_floor(trainer.session, row, rate)
        if device.type == "cuda":
            # DeepSpeed's engines leave about 5 GiB behind after destroy(): a run's peak is counted from what it found.
            row["peak_gib"] = (torch.cuda.max_memory_allocated() - found) / 2**30
            row["found_gib"] = found / 2**30
        if run in FSDP:
            row["reduce_dtype"] = args.fsdp_reduce_dtype
        if torch.distributed.get_rank() == 0:
            append_to(args.out, "rows", row)
            print(line(row, {}), flush=True)
    _set_rate(0)  # what the next run sends while it is built is not measured
    trainer.close()


def _set_rate(rate) -> None:
    if rate != ONE_NODE and os.environ["NODE_INTERFACE"] != "lo":
        set_rate_everywhere(rate or None)


def _ledger_bytes(engine) -> float:
    """Bytes that one node has sent to the other in finished steps, by the plugin's count."""
    report = wire_of(engine)
    inter = sum(kind["inter"] for kind in report["per_step"].values()) * report["steps"]
    return inter * int(os.environ["LOCAL_WORLD_SIZE"]) / int(os.environ["WORLD_SIZE"])


def _bytes_and_floor(engine, row: dict, rate) -> dict:
    """Return what depends on the link: with the plugin on a shaped one, the time that its bytes alone take."""
    more = {}
    if rate == ONE_NODE:
        more = {"tx_bytes_per_node_step": None, "ledger_bytes_per_node_step": None}
    elif engine is not None and rate:
        floor = 1e3 * row["ledger_bytes_per_node_step"] / (rate * GBIT)
        more = {"floor_ms": floor, "times_floor": row["step_ms"] / floor}
    if engine is not None:
        more["wire"] = wire_of(engine)
    return more


def worker(args) -> None:
    import torch

    device = join()
    for run in args.runs:
        if torch.distributed.get_rank() == 0:
            append_to(args.out, "started", run)
        measure(run, args, device)
    torch.distributed.destroy_process_group()


# --- starting the ranks, and keeping what they measured


def run_all(args) -> dict:
    """Measure everything; a run that fails is recorded and left out, the others go on in new processes."""
    head = describe("two_nodes")
    settings = {key: getattr(args, key) for key in (*SETTINGS, "ranks", "steps", "warmup")}
    begin_result(args.out, {**head, **settings, "dtype": "bf16"})
    deadline = time.monotonic() + args.timeout
    shaped = [rate for rate in args.gbit if rate != ONE_NODE]
    try:
        if ONE_NODE in args.gbit:
            # One node has nothing to replicate over: hsdp would be fsdp2.
            _run_group([run for run in args.runs if run != "hsdp"], [ONE_NODE], args, deadline)
        if shaped:
            with two_nodes():
                _run_group(args.runs, shaped, args, deadline)
    except TimeoutError as error:
        append_to(args.out, "failed", {"error": str(error)})
    return end_result(args.out)


def _run_group(runs: list, rates: list, args, deadline: float) -> None:
    """Start the ranks once for all runs; again, without it, after a run that failed."""
    while runs:
        job = json.dumps({**vars(args), "runs": runs, "gbit": rates})
        with_link = rates != [ONE_NODE]
        before = len(read_result(args.out)["started"])
        with tempfile.TemporaryDirectory() as folder:
            try:
                launch(
                    "benchmarks.two_nodes",
                    ["--worker", job],
                    args.ranks,
                    Path(folder, "store"),
                    deadline - time.monotonic(),
                    nodes=2 if with_link else 1,
                    namespaces=with_link,
                )
                return
            except RuntimeError as error:
                started = read_result(args.out)["started"][before:]
                if not started:  # the ranks did not even find each other: no run's fault, and no use to try again
                    append_to(args.out, "failed", {"gbit": rates, "error": str(error)})
                    return
                print(f"{started[-1]}: {error}; going on without it", flush=True)
                append_to(args.out, "failed", {"run": started[-1], "gbit": rates, "error": str(error)})
                runs = runs[len(started) :]


# --- showing results


def line(row: dict, first: dict) -> str:
    def number(value, digits=1, unit=1.0):
        return "-" if value is None else f"{value / unit:.{digits}f}"

    speed = first["step_ms"] / row["step_ms"] if first else None
    cells = (
        f"{row['run']:<34}",
        f"{number(row['step_ms']):>9}{number(row['min_ms']):>9}{number(row['max_ms']):>9}",
        f"{number(speed, 2):>8}",
        f"{number(row['tx_bytes_per_node_step'], 2, 1e6):>10}{number(row['ledger_bytes_per_node_step'], 2, 1e6):>10}",
        f"{number(row.get('floor_ms')):>9}{number(row.get('times_floor'), 2):>8}{number(row.get('reached_gbit')):>8}",
        f"{number(sum(row['tcp_timeouts']) if 'tcp_timeouts' in row else None, 0):>9}",
        f"{number(row.get('peak_gib'), 2):>7}",
        f"  {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}",
    )
    return "".join(cells)


HEAD = (
    f"{'':<34}{'median':>9}{'min':>9}{'max':>9}{'x first':>8}{'sent':>10}{'ledger':>10}{'floor':>9}{'x':>8}"
    f"{'link':>8}{'timeouts':>9}{'peak':>7}  loss\n"
    f"{'':<34}{'ms':>9}{'ms':>9}{'ms':>9}{'':>8}{'MB/node':>10}{'MB/node':>10}{'ms':>9}{'floor':>8}"
    f"{'Gbit/s':>8}{'of TCP':>9}{'GiB':>7}"
)


def rates_of(result: dict) -> list:
    rates = {row["gbit"] for row in result["rows"]}
    return sorted(rates, key=lambda rate: (math.inf, 1) if rate in (ONE_NODE, 0) else (rate, 0), reverse=True)


def show(result: dict) -> None:
    for rate in rates_of(result):
        rows = [row for row in result["rows"] if row["gbit"] == rate]
        link = "one node" if rate == ONE_NODE else f"{rate:g} Gbit/s between the nodes" if rate else "not shaped"
        print(
            f"\n{link}, {result['model']}, {result['micro_batch']} x {result['tokens']} tokens per rank, bf16\n{HEAD}"
        )
        print("\n".join(line(row, rows[0]) for row in rows))
    for failure in result["failed"]:
        print(f"\nfailed: {failure.get('run', '')} {failure['error']}")


def equivalences(result: dict, at: float, against: str = "stock") -> list[dict]:
    """For every other run, the lowest rate at which it takes no longer a step than `against` at the rate `at`."""
    times = {(row["run"], row["gbit"]): row["step_ms"] for row in result["rows"]}
    if at == math.inf:
        at = max((rate for run, rate in times if run == against and rate != ONE_NODE), default=at)
    target = times.get((against, at))
    if target is None:
        print(f"\n--equivalence: no row of {against} at {at:g} Gbit/s")
        return []
    found = []
    for run in dict.fromkeys(row["run"] for row in result["rows"]):
        points = sorted((rate, ms) for (name, rate), ms in times.items() if name == run and rate not in (ONE_NODE, 0))
        if run != against and points:
            bound, rate = rate_of(points, target)
            found.append(
                {"run": run, "against": against, "at_gbit": at, "target_ms": target, "bound": bound, "gbit": rate}
            )
    return found


def rate_of(points: list[tuple[float, float]], target: float) -> tuple[str, float]:
    """The lowest rate with a time of `target`, on straight lines between (rate, time) with both axes logarithmic."""
    if points[0][1] <= target:
        return "at most", points[0][0]
    for (rate_a, time_a), (rate_b, time_b) in itertools.pairwise(points):
        if time_a > target >= time_b:
            share = math.log(time_a / target) / math.log(time_a / time_b)
            return "about", rate_a * (rate_b / rate_a) ** share
    return "more than", points[-1][0]


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(argparse.Namespace(**json.loads(sys.argv[2])))
        return
    args = parse()
    result = run_all(args)
    show(result)
    if args.equivalence:
        result["equivalence"] = equivalences(result, args.equivalence)
        for found in result["equivalence"]:
            print(
                f"{found['run']} is as fast as {found['against']} at {found['at_gbit']:g} Gbit/s "
                f"({found['target_ms']:.0f} ms) from {found['bound']} {found['gbit']:.3g} Gbit/s on"
            )
        write_result(args.out, result)
    sys.exit(1 if result["failed"] else 0)


if __name__ == "__main__":
    main()
