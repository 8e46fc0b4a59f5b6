"""LoRA over frozen weights that rest as codes: memory, speed and traffic against bf16 ZeRO-3 and bitsandbytes.

    python benchmarks/frozen.py memory --side-by-side 4 --out runs/frozen_memory.json
    python benchmarks/frozen.py memory --ranks 4 --runs stock-lora,nf4-dq --out runs/frozen_memory_4.json
    python benchmarks/frozen.py throughput --ranks 4 --gbit 25 --out runs/frozen_25gbit.json         (root: namespaces)
    python benchmarks/frozen.py limits --runs stock-lora,nf4-dq,bnb --out runs/frozen_batch.json
    python benchmarks/frozen.py dequantize --out runs/frozen_dequantize.json
    python benchmarks/frozen.py show --read runs/frozen_*.json

On GPUs over NCCL a Llama of 8 billion random parameters; without one a tiny model on the CPU over gloo. The runs are
those of frozen_runs.py. The parts:

    memory       bytes of a rank: by the CUDA allocator (on a CPU the sum over living tensors). "Frozen" is what the
                 model takes once it is made under zero.Init, without the 16 bits of embedding, lm_head and norms, per
                 weight of the linear layers of all blocks. Then the engine, after steps, and the peaks while the model
                 is made and of a step. With checkpointing, small buffers, one fresh process (group of ranks) a run.
                 Groups that share a GPU (--side-by-side) have no meaningful step time, and report none.
    throughput   step time, tokens/s, bytes on the wire by the ledger and by the interface, in steps after the warm-up.
                 Every run is built and timed in every round, forwards in even rounds and backwards in odd ones: on one
                 GPU in fresh processes, else one after the other in the same. The link is shaped once a run is built.
    limits       the largest micro-batch (--axis batch) or sequence that fits, by doubling until memory is out, then
                 --refine times by halving the interval, each in a fresh process; and the speed there (limits.py).
                 --gib makes the GPU smaller.
    dequantize   decoding the weights of a block beside a copy (frozen_dequantize.py).

--timeout bounds everything; each finished row is in --out at once, and `show --read` prints what there is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the package, where it is not installed
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import frozen_dequantize
import limits
import torch
from emulated_nodes import GBIT, cut_into_nodes, set_rate_everywhere, two_nodes
from environment import append_to, describe, join, read_result
from frozen_runs import (
    BNB,
    SECTIONS,
    SIZES,
    STOCK,
    BnbRun,
    LoraRun,
    sharded_llama,
    without_bnb_where_it_cannot_run,
)
from frozen_tables import compared, short_line, show
from jobs import Job, announce, begin_result, choose_gpus, end_result, run_jobs
from measuring import limit_memory, random_tokens, timed_steps
from options import finite, new_file, whole
from torch import Tensor
from zero3 import without_refused

SMALL = 1024  # hidden size of a model whose tensors are all below ZeRO-3's usual limits
LEAN_PARTS = ("memory", "limits")

# -- measuring, in every rank ----------------------------------------------------------------------------------------


def made(run: str, args, device: torch.device) -> LoraRun | BnbRun:
    """The training of a run."""
    size = SIZES[args.size]
    if run == BNB:
        return BnbRun(size, device, checkpointing=args.checkpointing)
    return LoraRun(
        SECTIONS[run],
        lambda config: sharded_llama(size, config),
        device,
        micro_batch=args.micro_batch,
        leaf=run == STOCK,
        small=size.hidden < SMALL,
        lean=args.part in LEAN_PARTS,
        checkpointing=args.checkpointing,
    )


def tokens_of(args, micro_batch: int, sequence: int, device: torch.device) -> Iterator[Tensor]:
    return random_tokens(SIZES[args.size].vocabulary, micro_batch, sequence, device)


def speed(step_ms: float, micro_batch: int, sequence: int, args) -> dict:
    """tokens/s of all ranks."""
    return {"tokens_per_s": 1e3 * args.ranks * micro_batch * sequence / step_ms}


def measure(run: str, number: int, args, device: torch.device) -> dict:
    """The row of one run in one round; bytes are those of the rank that has most."""
    if args.gbit is not None:
        set_rate_everywhere(None)  # what is sent while it is built is not measured
    trainer = made(run, args, device)
    if args.gbit:
        set_rate_everywhere(args.gbit)
    batches = tokens_of(args, args.micro_batch, args.sequence, device)
    first = timed_steps(trainer, batches, 0, args.warmup, device)
    before = trainer.sent()
    trainer.meter.bytes()  # frees what is cached
    trainer.meter.start_peak()
    timed = timed_steps(trainer, batches, 0, args.steps, device)
    row = {
        "run": run,
        "round": number,
        "parameters": trainer.parameters,
        "frozen_parameters": trainer.frozen_parameters,
        **bytes_of(trainer),
        "losses": first["losses"] + timed.pop("losses"),
        "found_bytes": trainer.meter.found,
    }
    row["frozen_per_parameter"] = row["frozen_bytes"] * args.ranks / trainer.frozen_parameters
    if not args.shared:
        row |= {"first_ms": first["times_ms"][0], **timed}
        row |= speed(row["step_ms"], args.micro_batch, args.sequence, args)
    if args.gbit is None:
        row["tx_bytes_per_node_step"] = None
    if before is not None:
        row["wire"] = wire_of(before, trainer.sent(), args)
        if args.gbit:
            row["floor_ms"] = 1e3 * row["wire"]["inter"] / (args.gbit * GBIT)  # what the bytes need that one node sends
    trainer.close()
    return row


def bytes_of(trainer: LoraRun | BnbRun) -> dict[str, int | None]:
    """What a rank had and has, the most over the ranks."""
    mine = {
        "frozen_bytes": trainer.frozen_bytes,
        "model_bytes": trainer.model_bytes,
        "making_peak_bytes": trainer.making_peak,
        "engine_bytes": trainer.engine_bytes,
        "engine_peak_bytes": trainer.engine_peak,
        "peak_bytes": trainer.meter.peak(),
        "rest_bytes": trainer.meter.bytes(),
    }
    everyones = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyones, mine)
    return {name: None if mine[name] is None else max(other[name] for other in everyones) for name in mine}


def wire_of(before: dict[str, float], after: dict[str, float], args) -> dict[str, float]:
    """Bytes that one node sends in a timed step, and that it sent in the steps before."""
    sent = {link: (after[link] - before[link]) / args.steps / args.nodes for link in after}
    return sent | {f"{link}_before": before[link] / args.nodes for link in before}


def worker(args) -> None:
    """Do the runs of a job in this group of ranks."""
    choose_gpus(args)
    device = join()
    limit_memory(args.gib, device)

    def write(row: dict) -> None:
        append_to(args.out, "rows", row)
        print(short_line(row), flush=True)

    for run in args.runs:
        announce(args, run)
        if args.part == "dequantize":
            frozen_dequantize.measure(args, device, write)
        elif args.part == "limits":
            limits.measure(
                run,
                args,
                device,
                make=lambda run=run: made(run, args, device),
                batches=lambda *shape: tokens_of(args, *shape, device),
                speed=lambda step_ms, *shape: speed(step_ms, *shape, args),
            )
        else:
            row = measure(run, args.round, args, device)
            if torch.distributed.get_rank() == 0:
                write({"part": args.part, **row})
    torch.distributed.destroy_process_group()


# -- the parts, from one process --------------------------------------------------------------------------------------


def measure_part(args) -> dict:
    """Do one part; what is in args.out at the end."""
    head = describe("benchmarks/frozen.py", sys.argv[1:])
    names = ("part", "size", "ranks", "nodes", "gbit", "micro_batch", "sequence", "checkpointing", "steps", "warmup")
    settings = {name: getattr(args, name) for name in (*names, "gib", "shared", "parts", "repeats")}
    settings["model"] = vars(SIZES[args.size])
    begin_result(args.out, {**head, "settings": settings})
    deadline = time.monotonic() + args.timeout
    namespaces = args.gbit is not None
    with two_nodes() if namespaces else contextlib.nullcontext():
        if args.part == "limits":
            limits.search(__file__, args, deadline)
        elif args.part == "dequantize":
            run_jobs(__file__, [Job("dequantize", ["dequantize"])], args, deadline)
        else:
            apart = args.part == "memory" or args.ranks == 1  # each run in processes of its own
            jobs = []
            for number in range(args.rounds):
                order = args.runs[:: -1 if number % 2 else 1]
                groups = [[run] for run in order] if apart else [order]
                jobs += [Job(f"round {number}, {'+'.join(group)}", group, {"round": number}) for group in groups]
            run_jobs(__file__, jobs, args, deadline, side_by_side=args.side_by_side, namespaces=namespaces)
    return end_result(args.out)


# -- command line ----------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("memory", "throughput", "limits", "dequantize", "show"))
    parser.add_argument("--runs", help=f"some of {','.join(SECTIONS)} (default: all that there are)")
    parser.add_argument("--size", choices=SIZES, default="8b" if on_gpu else "tiny", help="default: %(default)s")
    parser.add_argument("--ranks", type=whole(1), default=1)
    parser.add_argument(
        "--gbit",
        type=finite(least=0),
        help="two emulated nodes with so much between them (0: not shaped); else one node",
    )
    parser.add_argument("--micro-batch", type=whole(1), default=1, help="sequences of a rank")
    parser.add_argument(
        "--sequence", type=whole(1), default=1024 if on_gpu else 64, help="tokens (default %(default)s)"
    )
    parser.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        help="keep of every layer nothing but its input (default: in memory and limits)",
    )
    parser.add_argument("--rounds", type=whole(1), default=1, help="of throughput")
    parser.add_argument(
        "--steps", type=whole(1), help="timed steps of a run in a round (default 4; memory and limits 2)"
    )
    parser.add_argument("--warmup", type=whole(0), help="steps before them (default 2; limits 1)")
    parser.add_argument("--axis", choices=("batch", "sequence"), default="batch", help="what limits makes larger")
    parser.add_argument(
        "--start", type=whole(1), help="first size on that axis (default 1 sequence, or --sequence tokens)"
    )
    parser.add_argument("--stop", type=whole(1), help="last size (default 1024 sequences, or 2^20 tokens)")
    parser.add_argument("--refine", type=whole(0), default=1, help="times that limits halves the interval")
    parser.add_argument("--gib", type=finite(above=0), help="memory that a process may have")
    parser.add_argument(
        "--side-by-side",
        type=whole(1),
        help="groups of ranks at a time; more than fit the GPUs share them (memory only)",
    )
    parser.add_argument(
        "--parts", type=whole(1), default=4, help="ranks that a decoded payload comes from, in dequantize"
    )
    parser.add_argument("--repeats", type=whole(1), default=30 if on_gpu else 3, help="of dequantize")
    parser.add_argument(
        "--timeout", type=finite(above=0), default=570, help="seconds for everything (default: %(default)g)"
    )
    parser.add_argument("--out", type=new_file, help="JSON file; default frozen_PART.json")
    parser.add_argument("--read", nargs="+", metavar="JSON", help="with show: results to print")
    args = parser.parse_args(argv)
    if args.part == "show":
        if not args.read:
            parser.error("show needs --read")
        return args
    cut_into_nodes(args, parser)
    complete(args)
    if args.gbit is not None and args.part in ("limits", "dequantize"):
        parser.error(f"{args.part} has no link between nodes: leave --gbit out")
    if args.shared and args.part != "memory":
        parser.error(
            f"--side-by-side {args.side_by_side}: groups that share a GPU have no time of their own; memory only"
        )
    unknown = [run for run in args.runs if run not in SECTIONS]
    if unknown:
        parser.error(f"unknown run {unknown[0]}; runs are {', '.join(SECTIONS)}")
    taken = without_bnb_where_it_cannot_run(args.runs, args.ranks)
    args.runs = without_refused({run: SECTIONS[run] for run in taken})
    return args


def complete(args) -> None:
    """Fill in what depends on the part and the machine."""
    places = max(1, torch.cuda.device_count() // args.ranks)
    if args.checkpointing is None:
        args.checkpointing = args.part in LEAN_PARTS
    args.steps = args.steps or (2 if args.part in LEAN_PARTS else 4)
    args.warmup = args.warmup or (1 if args.part == "limits" else 2)
    args.start = args.start or (1 if args.axis == "batch" else args.sequence)
    args.stop = args.stop or (1024 if args.axis == "batch" else 1 << 20)
    args.side_by_side = args.side_by_side or (1 if args.part == "throughput" else places)
    args.shared = args.side_by_side > places
    args.out = args.out or f"frozen_{args.part}.json"
    args.runs = args.runs.split(",") if args.runs else list(SECTIONS)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(argparse.Namespace(**json.loads(sys.argv[2])))
        return
    args = parse()
    if args.part == "show":
        for path in args.read:
            show(compared(read_result(path)))
        return
    result = compared(measure_part(args))
    end_result(args.out, **result)
    show(result)
    sys.exit(1 if result["failed"] else 0)


if __name__ == "__main__":
    main()
