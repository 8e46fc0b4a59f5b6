"""Memory, speed and communication of training with FP8-LM under ZeRO-3, against bf16 with fp32 AdamW.

    python benchmarks/fp8_lm.py memory --out runs/fp8_lm_memory.json
    python benchmarks/fp8_lm.py throughput --rounds 2 --out runs/fp8_lm_one_gpu.json
    python benchmarks/fp8_lm.py throughput --ranks 4 --gbit 25 --out runs/fp8_lm_25gbit.json      (root: namespaces)
    python benchmarks/fp8_lm.py exchange --ranks 4 --gbit 25 --out runs/fp8_lm_exchange.json      (root)
    python benchmarks/fp8_lm.py limits --runs lossless,fp8-lm-o2 --axis batch --out runs/fp8_lm_limits.json
    python benchmarks/fp8_lm.py profile --runs lossless,fp8-lm-o2 --out runs/fp8_lm_profile.json
    python benchmarks/fp8_lm.py show --read runs/fp8_lm_*.json

On GPUs over NCCL; without one a tiny model on the CPU over gloo. The trainings and the Llama are those of
fp8_lm_runs.py. The parts:

    memory       bytes a parameter on a rank, by the CUDA allocator (on a CPU: the sum over living tensors): weights;
                 model states (weights, gradients, master weights, moments) once the engine is made; what is left after
                 a step, buffers for some layers' weights and gradients included; the peak of a step. "codes" is what
                 the states say of themselves. One fresh process (or group of ranks) a run.
    throughput   step time, tokens/s, model-FLOP utilisation, bytes on the wire. Every run is built and timed in every
                 round, forwards in even rounds and backwards in odd ones, so that a drift of the machine shows: on one
                 GPU in fresh processes, else one after the other in the same.
    exchange     the gradient exchange alone, in 32, 16 and 8 bits (fp8_lm_exchange.py).
    limits       the largest micro-batch (--axis batch) or sequence (--axis sequence, micro-batch 1) that fits, by
                 doubling until memory is out, then --refine times by halving the interval, each in a fresh process; and
                 the speed there. Several GPUs take several runs side by side. --gib makes the GPU smaller.
    profile      throughput's steps, and device time of one more by kind of kernel (fp8_lm_profile.py).

Model-FLOP utilisation counts 6 floating-point operations for every multiplied weight and token, and the causal half of
attention; not what checkpointing computes again. Its base is the GPU's dense bf16 peak (--peak-tflops) in every run, so
that figures compare; the peak in FP8 is twice as high.

--timeout bounds everything; each finished row is in --out at once, and `show --read` prints what there is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the package, where it is not installed
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import fp8_lm_exchange
import fp8_lm_profile
import limits
import torch
from emulated_nodes import GBIT, cut_into_nodes, two_nodes
from environment import append_to, describe, forget_memory, join, read_result
from fp8_lm_runs import (
    PEAK_FLOPS,
    SECTIONS,
    SIZES,
    EngineRun,
    flops_per_token,
)
from fp8_lm_tables import compared, short_line, show
from jobs import Job, announce, begin_result, choose_gpus, end_result, run_jobs
from measuring import limit_memory, live_bytes, random_tokens, timed_steps
from options import finite, new_file, whole
from zero3 import without_refused

# -- measuring, in every rank ----------------------------------------------------------------------------------------


def made(run: str, args, device: torch.device, lean: bool = False) -> EngineRun:
    """The engine of a run."""
    return EngineRun(
        SECTIONS[run],
        SIZES[args.size],
        device,
        leaf=run == "stock-leaf",
        micro_batch=args.micro_batch,
        checkpointing=args.checkpointing,
        lean=lean,
    )


def measure_memory(run: str, args, device: torch.device) -> dict:
    """The row of one run; bytes are those of the rank that has most."""
    trainer = made(run, args, device, lean=True)
    optimizer = trainer.engine.optimizer
    built = live_bytes(device) - trainer.found_bytes - moment_bytes(optimizer)
    batches = random_tokens(SIZES[args.size].vocabulary, args.micro_batch, args.sequence, device)
    tokens = next(batches)
    losses = [trainer.step(tokens).item() for _ in range(2)]
    rest = live_bytes(device) - trainer.found_bytes
    peak = None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        losses.append(trainer.step(tokens).item())
        peak = torch.cuda.max_memory_allocated() - trainer.found_bytes
    # torch's AdamW may make its moments in the first step; low-precision states are there from the beginning.
    states = built + moment_bytes(optimizer)
    everyones = [None] * args.ranks
    torch.distributed.all_gather_object(everyones, (states, rest, peak or 0))
    states, rest, peak_of_all = (max(column) for column in zip(*everyones))
    shard = trainer.parameters / args.ranks
    row = {
        "run": run,
        "parameters": trainer.parameters,
        "shard_parameters": shard,
        "weights_bytes": trainer.weight_bytes / args.ranks,  # before they are sharded, a rank has all
        "states_bytes": states,
        "rest_bytes": rest,
        "peak_bytes": None if peak is None else peak_of_all,
        "codes_bytes": None,
        "losses": losses,
    }
    parts = [getattr(optimizer, name, None) for name in ("states", "store")]
    if any(parts):
        row["codes_bytes"] = sum(part.num_bytes() for part in parts if part is not None)
    for name in ("weights", "states", "rest", "peak", "codes"):
        size = row[f"{name}_bytes"]
        row[f"{name}_per_parameter"] = None if size is None else size / shard
    return row


def moment_bytes(optimizer) -> int:
    """Bytes of what the user's optimizer keeps inside a ZeRO-3 optimizer."""
    kept = [x for state in optimizer.optimizer.state.values() for x in state.values() if torch.is_tensor(x)]
    return sum(x.nbytes for x in kept)


def speed(step_ms: float, micro_batch: int, sequence: int, args) -> dict:
    """tokens/s of all ranks, and the share of the peak of their GPUs."""
    tokens_per_s = 1e3 * args.ranks * micro_batch * sequence / step_ms
    flops = tokens_per_s * flops_per_token(SIZES[args.size], sequence) / args.ranks
    return {"tokens_per_s": tokens_per_s, "model_tflops": flops / 1e12, "mfu": flops / (args.peak_tflops * 1e12)}


def measure_throughput(run: str, number: int, args, device: torch.device) -> dict:
    """The row of one run in one round."""
    found = forget_memory(device)
    trainer = made(run, args, device)
    batches = random_tokens(SIZES[args.size].vocabulary, args.micro_batch, args.sequence, device)
    forget_memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    row = {"run": run, "round": number, "parameters": trainer.parameters}
    row |= timed_steps(trainer, batches, args.warmup, args.steps, device)
    row |= speed(row["step_ms"], args.micro_batch, args.sequence, args)
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
        make = fp8_lm_profile.device_profile if device.type == "cuda" else fp8_lm_profile.host_profile
        row["profile"] = make(lambda: trainer.step(tokens), args.profile)  # on every rank, or they would wait
    trainer.close()
    return row


def gradient_bytes(wire: dict) -> dict:
    """Bytes of gradients a step of all ranks, and by how many percent they are below rings in 32 and 16 bits."""
    sent = sum(wire["per_step"]["gradients"].values())
    stock = sum(wire["stock_per_step"]["gradients"].values())
    below = {"below_fp32": 100 * (1 - sent / (2 * stock)), "below_bf16": 100 * (1 - sent / stock)} if stock else {}
    return {"sent": sent, "stock_bf16": stock, **below}


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
        if args.part == "exchange":
            fp8_lm_exchange.measure(args, device, write)
        elif args.part == "limits":
            limits.measure(
                run,
                args,
                device,
                make=lambda run=run: made(run, args, device),
                batches=lambda *shape: random_tokens(SIZES[args.size].vocabulary, *shape, device),
                speed=lambda step_ms, *shape: speed(step_ms, *shape, args),
            )
        else:
            if args.part == "memory":
                row = measure_memory(run, args, device)
            else:
                row = measure_throughput(run, args.round, args, device)
            if torch.distributed.get_rank() == 0:
                write({"part": args.part, **row})
    torch.distributed.destroy_process_group()


# -- the parts, from one process --------------------------------------------------------------------------------------


def measure(args) -> dict:
    """Do one part; what is in args.out at the end."""
    head = describe("benchmarks/fp8_lm.py", sys.argv[1:])
    names = ("part", "size", "ranks", "nodes", "gbit", "micro_batch", "sequence", "checkpointing", "steps", "warmup")
    settings = {name: getattr(args, name) for name in (*names, "peak_tflops", "gib")}
    settings["model"] = vars(SIZES[args.size])
    begin_result(args.out, {**head, "settings": settings})
    deadline = time.monotonic() + args.timeout
    namespaces = args.gbit is not None
    link = two_nodes(args.gbit or None) if namespaces else contextlib.nullcontext()
    with link:
        if args.part == "limits":
            limits.search(__file__, args, deadline)
        elif args.part == "exchange":
            run_jobs(__file__, [Job("exchange", ["exchange"])], args, deadline, namespaces=namespaces)
        elif args.part == "memory":
            jobs = [Job(run, [run], {"round": 0}) for run in args.runs]
            run_jobs(__file__, jobs, args, deadline, side_by_side=args.side_by_side, namespaces=namespaces)
        else:
            jobs = []
            for number in range(args.rounds):
                order = args.runs[:: -1 if number % 2 else 1]
                groups = [[run] for run in order] if args.ranks == 1 else [order]
                jobs += [Job(f"round {number}, {'+'.join(group)}", group, {"round": number}) for group in groups]
            run_jobs(__file__, jobs, args, deadline, namespaces=namespaces)
    return end_result(args.out)


# -- command line ----------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("memory", "throughput", "exchange", "limits", "profile", "show"))
    parser.add_argument("--runs", help=f"some of {','.join(SECTIONS)} (default: all that this version has)")
    parser.add_argument("--size", choices=SIZES, help="default: 4b (memory, limits) or 1.3b; on a CPU tiny")
    parser.add_argument("--ranks", type=whole(1), default=1)
    parser.add_argument(
        "--gbit",
        type=finite(least=0),
        help="two emulated nodes with so much between them (0: not shaped); else one node",
    )
    parser.add_argument(
        "--micro-batch", type=whole(1), help="sequences of a rank (default 1; 8 for the speed of one GPU)"
    )
    parser.add_argument("--sequence", type=whole(1), help=f"tokens (default {1024 if on_gpu else 64})")
    parser.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        help="keep of every layer nothing but its input (default: in memory and limits)",
    )
    parser.add_argument("--rounds", type=whole(1), default=2, help="of throughput and exchange")
    parser.add_argument("--steps", type=whole(1), help="timed steps of a run in a round (default 8; limits 2)")
    parser.add_argument("--warmup", type=whole(0), help="steps before them (default 4; limits 1)")
    parser.add_argument(
        "--profile", type=whole(0), metavar="N", help="N kernels with most time (default 15 in profile)"
    )
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
        help="groups of ranks at a time, in memory and limits (default: as there are GPUs)",
    )
    parser.add_argument(
        "--peak-tflops", type=finite(above=0), default=PEAK_FLOPS / 1e12, help="default: %(default)g, an H200"
    )
    parser.add_argument(
        "--timeout", type=finite(above=0), default=570, help="seconds for everything (default: %(default)g)"
    )
    parser.add_argument("--out", type=new_file, help="JSON file; default fp8_lm_PART.json")
    parser.add_argument("--read", nargs="+", metavar="JSON", help="with show: results to print")
    args = parser.parse_args(argv)
    if args.part == "show":
        if not args.read:
            parser.error("show needs --read")
        return args
    cut_into_nodes(args, parser)
    complete(args, on_gpu)
    if args.part == "limits" and args.gbit is not None:
        parser.error("limits has no link between nodes: leave --gbit out")
    unknown = [run for run in args.runs if run not in SECTIONS]
    if unknown:
        parser.error(f"unknown run {unknown[0]}; runs are {', '.join(SECTIONS)}")
    args.runs = without_refused({run: SECTIONS[run] for run in args.runs})
    return args


def complete(args, on_gpu: bool) -> None:
    """Fill in what depends on the part and the machine."""
    searching = args.part == "limits"
    args.size = args.size or ({"memory": "4b", "limits": "4b"}.get(args.part, "1.3b") if on_gpu else "tiny")
    speed_of_one = args.part in ("throughput", "profile") and args.ranks == 1 and on_gpu
    args.micro_batch = args.micro_batch or (8 if speed_of_one else 1)
    args.sequence = args.sequence or (1024 if on_gpu else 64)
    if args.checkpointing is None:
        args.checkpointing = args.part in ("memory", "limits")
    args.steps = args.steps or ((2 if searching else 8) if on_gpu else 2)
    args.warmup = (1 if searching or not on_gpu else 4) if args.warmup is None else args.warmup
    args.profile = (15 if args.part == "profile" else 0) if args.profile is None else args.profile
    if args.part == "profile":
        args.rounds = 1
    args.start = args.start or (1 if args.axis == "batch" else args.sequence)
    args.stop = args.stop or (1024 if args.axis == "batch" else 1 << 20)
    args.side_by_side = args.side_by_side or max(1, torch.cuda.device_count() // args.ranks)
    args.out = args.out or f"fp8_lm_{args.part}.json"
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
    result = compared(measure(args))
    end_result(args.out, **result)
    show(result)
    sys.exit(1 if result["failed"] else 0)


if __name__ == "__main__":
    main()
