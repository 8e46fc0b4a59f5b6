"""Does it learn the same? Held-out loss of a model trained with each recipe's wire formats, over several seeds.

    python -m benchmarks.wire_convergence --runs lossless,zeropp,zeropp-exact --seeds 0,1,2 --folder runs/wire
    python -m benchmarks.wire_convergence --case sft --runs lossless,zeropp --seeds 0,1,2 --folder runs/wire
    python -m benchmarks.wire_convergence --size 25m --steps 450 --ranks 2 --seconds 400 --folder runs/wire
    python -m benchmarks.wire_convergence --size 255m-a85m --runs lossless,zeropp --ranks 2 --folder runs/wire
    python -m benchmarks.wire_convergence --show --folder runs/wire

Ranks are two nodes of half of them each, over NCCL, or gloo on a CPU with a tiny model. With fewer GPUs than ranks,
ranks share them and talk through sockets: the same numbers, at 2 ms a collective, so that few large units
(--unit-layers) and large batches pay. All runs of one seed begin with the same weights and see the same batches in the
same order, in bf16 with fp32 master weights, AdamW, gradients clipped at 1, a linear warm-up and a cosine down to
--least-rate; so their differences can be taken seed by seed, which is much sharper than means. Runs:

    stock                  DeepSpeed's ZeRO-3, the units as z3 leaf modules
    lossless               this project with nothing rounded: bit for bit what stock gives
    zeropp, zeropp-4bit    weights in INT8 or INT4, gradients in INT8 and INT4
    zeropp-exact           weights as exact differences, gradients as with zeropp
    lossless-muon, ...     the same with Muon of the layers' matrices, at --muon-lr, on owners of whole matrices;
                           zeropp-int8-muon with gradients in INT8 between nodes too
    in-tree                DeepSpeed's own ZeRO++ (quantized weights and gradients, hpZ); GPUs with nvcc only

Cases:

    pretrain               bytes of the Python standard library's source
    sft                    goes on from the weights of the `lossless` pretraining of that seed, which is done first
                           where --weights does not hold them, with docstrings of torch, at --sft-lr

Each finished run is a file of --folder with its curves, settings, commit and hardware, and is not done again: seeds and
recipes may come one invocation after the other. Losses are those that the engine itself computes, with weights as they
arrive; `checkpoint_loss` is that of the 16-bit weights that a checkpoint would hold. Training losses are of rank 0's
part of the batches. All recipes of the first seed come first, then those of the next. With --seconds no run starts that
would end later, as long as the longest so far; one that fails is named, the others go on, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from unittest import mock

import torch

from benchmarks.harness.engine_trainer import EngineTrainer
from benchmarks.harness.environment import NO_IN_TREE, build_in_tree_op, describe, forget_in_tree_groups, join
from benchmarks.harness.hf_llama import with_loss
from benchmarks.harness.jobs import announce, choose_gpus, dealt_jobs, run_jobs
from benchmarks.harness.learning import docstrings, load_data, sequences_of, train_steps
from benchmarks.harness.results import append_to, begin_result, end_result, finished_result, write_result
from benchmarks.harness.sizes import EVERY_SIZE, MIXTURES
from benchmarks.harness.wire_runs import IN_TREE, LOSSLESS, SECTIONS, groups_of
from benchmarks.harness.zero3 import in_tree_zero, without_refused
from examples.options import finite, new_file, new_folder, refusals, several, whole
from examples.pretrain.data import Sequences

QUESTION = "wire_convergence"
PRETRAIN, SFT = "pretrain", "sft"
NODES = 2
# Elements: all gradients of 85 M parameters in one collective.
BUCKETS = {"reduce_bucket_size": 10**8, "stage3_prefetch_bucket_size": 10**8}
# What makes runs comparable.
TRAINING = ("steps", "batch", "sequence", "lr", "warmup", "least_rate", "eval_sequences")
SETTINGS = ("ranks", "unit_layers", "compile", *TRAINING)


# -- what there is to do ----------------------------------------------------------------------------------------------


def of_case(args: argparse.Namespace, case: str) -> argparse.Namespace:
    """The arguments with the length and rate of a case."""
    steps, lr = (args.steps, args.lr) if case == PRETRAIN else (args.sft_steps, args.sft_lr)
    warmup, eval_every = max(1, steps // 10), max(1, -(-steps // args.evaluations))
    return argparse.Namespace(**{**vars(args), "steps": steps, "lr": lr, "warmup": warmup, "eval_every": eval_every})


def settings(args: argparse.Namespace, case: str) -> dict:
    """Return the settings of a case, as its files hold them."""
    chosen = {name: getattr(of_case(args, case), name) for name in SETTINGS}
    chosen |= {"case": case, "size": args.size, "model": vars(EVERY_SIZE[args.size]), "nodes": NODES}
    return chosen | ({"from": settings(args, PRETRAIN)} if case == SFT else {})


def place(args: argparse.Namespace, case: str, run: str, seed: int) -> Path:
    """The file of a run."""
    return Path(args.folder, f"{args.machine}-{case}-{args.size}-{run}-{seed}.json")


def machine(ranks: int) -> str:
    """HARDWARE-RANKS-LINK, as results are named."""
    gpus = torch.cuda.device_count()
    link = "gloo" if not gpus else "nvlink" if gpus >= ranks else "sockets"
    # "NVIDIA H200", "NVIDIA A100-SXM4-80GB"
    hardware = torch.cuda.get_device_name(0).split()[1].partition("-")[0].lower() if gpus else "cpu"
    return f"{hardware}-{ranks}-{link}"


def weights_of(args: argparse.Namespace, seed: int) -> Path:
    """Where the weights of a pretraining are; its settings are in the name."""
    known = hashlib.sha256(json.dumps([settings(args, PRETRAIN), args.data], sort_keys=True).encode()).hexdigest()
    return Path(args.weights, f"{args.size}-{seed}-{known[:12]}.pt")


def waiting(args: argparse.Namespace) -> list[list[str]]:
    """The runs to be done, CASE:RUN:SEED, in lists of those that must come one after the other.

    Raises:
        ValueError: a file is there of a run with other settings.
    """
    found = []
    for seed in args.seeds:
        names = [name for name in args.runs if not is_done(args, args.case, name, seed)]
        of_seed = [f"{args.case}:{name}:{seed}" for name in names]
        if of_seed and args.case == SFT and not weights_of(args, seed).exists():
            is_done(args, PRETRAIN, LOSSLESS, seed)  # its file will be written anew
            found.append([f"{PRETRAIN}:{LOSSLESS}:{seed}", *of_seed])
        else:
            found += [[name] for name in of_seed]
    return found


def is_done(args: argparse.Namespace, case: str, run: str, seed: int) -> bool:
    """Whether the file of a run is there.

    Raises:
        ValueError: with other settings.
    """
    path = place(args, case, run, seed)
    if not path.exists():
        return False
    there, wanted = finished_result(path)["settings"], settings(args, case)
    other = sorted(key for key in wanted if there.get(key) != wanted[key])
    if other:
        raise ValueError(f"{path} is of a run with another {', '.join(other)}: give these, or another --folder")
    return True


# -- training, on every rank ------------------------------------------------------------------------------------------


def read_data(case: str, args: argparse.Namespace, device: torch.device) -> tuple[Sequences, Sequences]:
    """(training, held-out) sequences of a case."""
    if case == PRETRAIN:
        return load_data(args, device)
    return sequences_of(docstrings(args.sft_data), args.sequence, device)


def evaluated(held_out: Sequences, args: argparse.Namespace) -> int:
    """Sequences of a held-out loss, each of them once."""
    return min(args.eval_sequences, held_out.count)


def described(case: str, args: argparse.Namespace, data: tuple[Sequences, Sequences]) -> dict:
    """Return what the text is, for a result."""
    training, held_out = data
    return {
        "sources": [Path(source).name for source in (args.data if case == PRETRAIN else args.sft_data)],
        "training_tokens": len(training.tokens),
        "held_out_tokens": len(held_out.tokens),
        "evaluated_tokens": max(1, evaluated(held_out, args) // args.batch) * args.batch * args.sequence,
        "sha256": hashlib.sha256(training.tokens.cpu().numpy().tobytes()).hexdigest(),
    }


def section_of(run: str, args: argparse.Namespace) -> dict | None:
    """The plugin's section of a run; None for DeepSpeed without it."""
    section = SECTIONS[run]
    if section is None:
        return None
    return {**section, "topology": {"ranks_per_node": args.ranks // NODES}, "compile": args.compile}


@contextlib.contextmanager
def in_tree(args: argparse.Namespace):
    """DeepSpeed's own ZeRO++ takes a node for as many ranks as a rank sees GPUs; yields its keys."""
    from deepspeed.accelerator import get_accelerator

    build_in_tree_op()
    per_node = args.ranks // NODES
    with mock.patch.object(get_accelerator(), "device_count", lambda: per_node):
        yield in_tree_zero(per_node)


def train(case: str, run: str, seed: int, args, data: tuple[Sequences, Sequences], device: torch.device) -> dict:
    """One run; its row of results."""
    began, weights_file = time.perf_counter(), weights_of(args, seed) if args.weights else None
    training, held_out = data
    args = of_case(args, case)
    args.eval_sequences = evaluated(held_out, args)
    data = Sequences(training.tokens, training.length, seed), held_out
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    forget_in_tree_groups()
    with in_tree(args) if run == IN_TREE else contextlib.nullcontext({}) as zero:
        trainer = EngineTrainer(
            section_of(run, args),
            EVERY_SIZE[args.size],
            seed,
            args,
            device,
            leaf=SECTIONS[run] is None,
            unit_layers=args.unit_layers,
            weights=str(weights_file) if case == SFT else None,
            zero={**BUCKETS, **zero},
            muon_lr=args.muon_lr if run.endswith("-muon") else None,
        )
        row = {
            "run": run,
            "seed": seed,
            "section": section_of(run, args),
            **({"muon_lr": args.muon_lr} if run.endswith("-muon") else {}),
            "parameters": trainer.engine_run.parameters,
            "tokens": args.steps * args.batch * args.sequence,
            "epochs": args.steps * args.batch / training.count,
            "seconds": 0.0,
            "train": [],
            "held_out": [[0, trainer.held_out_loss(held_out, args.eval_sequences, args.batch)]],
        }
        train_steps(trainer, 0, args.steps, args, data, row)
    row["held_out_loss"] = row["held_out"][-1][1]
    row["wire"] = trainer.engine_run.wire()
    weights = trainer.full_weights()
    model = with_loss(EVERY_SIZE[args.size], unit_layers=args.unit_layers)
    model.load_state_dict(weights)
    model.to(device, torch.bfloat16)
    row["checkpoint_loss"] = trainer.held_out_loss(held_out, args.eval_sequences, args.batch, model)
    if weights_file and case == PRETRAIN and run == LOSSLESS and torch.distributed.get_rank() == 0:
        save(weights, weights_file)
    row["tokens_per_s"] = row["tokens"] / row["seconds"]
    if device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    del model, weights
    trainer.engine_run.close()
    row["all_seconds"] = time.perf_counter() - began
    return row


def save(weights: dict, path: Path) -> None:
    """All at once, so that nobody finds half of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    torch.save(weights, part)
    part.replace(path)


def worker(args: argparse.Namespace) -> None:
    """The runs of a job in this group of ranks."""
    choose_gpus(args)
    device = join()
    first = torch.distributed.get_rank() == 0
    if not first:  # all ranks would print the same
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    data, longest = {}, 0.0
    for name in args.runs:
        late = torch.tensor(int(args.until is not None and time.time() + longest > args.until), device=device)
        torch.distributed.broadcast(late, 0)
        if late:
            break
        announce(args, name)
        case, run, seed = name.split(":")
        if case not in data:
            data[case] = read_data(case, args, device)
        row = train(case, run, int(seed), args, data[case], device)
        longest = max(longest, row["all_seconds"])
        if first:
            result = args.head | {"settings": settings(args, case), "data": described(case, args, data[case]), **row}
            write_result(place(args, case, run, int(seed)), result | {"finished": True})
            append_to(args.out, "rows", {key: row[key] for key in ("run", "seed", "held_out_loss")} | {"case": case})
            print(f"{name}: held out {row['held_out_loss']:.5f}, {row['all_seconds']:.0f} s", flush=True)
    torch.distributed.destroy_process_group()


# -- what they say ----------------------------------------------------------------------------------------------------


def kept(args: argparse.Namespace) -> list[dict]:
    """All results of the folder."""
    return [finished_result(path) for path in sorted(Path(args.folder).glob("*.json"))]


def show(groups: list[dict]) -> None:
    """Print the comparison of each group."""

    def cell(value: float | None, form: str, unit: str = "") -> str:
        return "" if value is None else f"{value:{form}}{unit}"

    for group in groups:
        row, chosen = group["rows"][0], group["settings"]
        print(
            f"\n{chosen['case']}, {row['parameters'] / 1e6:.1f} million parameters, {row['tokens'] / 1e6:.2f} million "
            f"tokens ({row['epochs']:.2f} epochs), {chosen['ranks']} ranks as {NODES} nodes, up to {chosen['lr']:g}\n"
            f"{'run':<18}{'seeds':>6}{'held-out loss':>15}{'+-':>9}{'above ref.':>12}{'inside':>8}{'target':>8}"
            f"{'paired':>11}{'+-':>9}"
        )
        for line in group["comparison"]:
            said = {True: "yes", False: "NO", None: ""}
            print(
                f"{line['run']:<18}{len(line['seeds']):>6}{line['mean']:>15.5f}{cell(line['half_width'], '.5f'):>9}"
                f"{cell(line.get('percent'), '+.3f', ' %'):>12}{said[line.get('inside_interval')]:>8}"
                f"{said[line.get('within_target')]:>8}{cell(line.get('paired_percent'), '+.3f', ' %'):>11}"
                f"{cell(line.get('paired_half_width'), '.3f'):>9}"
            )
    sys.stdout.flush()


# -- command line -----------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{QUESTION}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = [run for run, section in SECTIONS.items() if section and not run.endswith("-muon")]
    parser.add_argument("--case", choices=(PRETRAIN, SFT), default=PRETRAIN)
    parser.add_argument("--runs", default=",".join(default), help="default: %(default)s")
    parser.add_argument("--seeds", type=several(whole(0)), default="0", help="separated by commas")
    parser.add_argument(
        "--size", choices=EVERY_SIZE, default="100m" if on_gpu else "tiny-bytes", help="default: %(default)s"
    )
    parser.add_argument("--ranks", type=whole(2), default=4, help="of both nodes together (default 4)")
    parser.add_argument("--steps", type=whole(1), default=900 if on_gpu else 20, help="of a pretraining")
    parser.add_argument("--batch", type=whole(1), default=32 if on_gpu else 4, help="sequences in a step, of all ranks")
    parser.add_argument("--sequence", type=whole(1), default=1024 if on_gpu else 64, help="tokens in a sequence")
    parser.add_argument("--lr", type=finite(above=0), default=6e-4, help="of a pretraining, after the warm-up")
    parser.add_argument("--least-rate", type=finite(least=0, most=1), default=0.01, help="of --lr, at the end")
    parser.add_argument("--data", nargs="+", default=["stdlib"], help="as examples/pretrain/train.py takes it")
    parser.add_argument("--sft-steps", type=whole(1), default=160 if on_gpu else 10)
    parser.add_argument("--sft-lr", type=finite(above=0), default=2e-5)
    parser.add_argument(
        "--muon-lr", type=finite(above=0), default=0.02, help="of Muon's matrices (default %(default)g)"
    )
    parser.add_argument(
        "--sft-data",
        nargs="+",
        default=[str(Path(torch.__file__).parent)],
        help="Python files; default: those of torch",
    )
    parser.add_argument("--evaluations", type=whole(1), default=5, help="held-out losses on the way (default 5)")
    parser.add_argument(
        "--eval-sequences", type=whole(1), default=512 if on_gpu else 8, help="at most, for one of them"
    )
    parser.add_argument("--unit-layers", type=whole(1), default=1, help="layers that are gathered at once (default 1)")
    parser.add_argument("--compile", choices=("none", "blocks"), default="none", help="as the plugin's section has it")
    parser.add_argument("--side-by-side", type=whole(1), default=1, help="groups of ranks at a time (default 1)")
    parser.add_argument("--seconds", type=finite(above=0), help="no run starts that would end later; default: no limit")
    parser.add_argument(
        "--timeout", type=finite(above=0), default=3600, help="seconds after which all end (default 3600)"
    )
    parser.add_argument(
        "--folder", type=new_folder, default=f"runs/{QUESTION}", help="of results (default: %(default)s)"
    )
    parser.add_argument(
        "--weights",
        type=new_folder,
        help="where a pretraining leaves weights; default: runs/weights with sft",
    )
    parser.add_argument("--show", action="store_true", help="train nothing: compare what is in --folder")
    parser.add_argument("--out", type=new_file, default=f"runs/{QUESTION}.json", help="the comparison, and what failed")
    args = parser.parse_args(argv)
    args.until = None if args.seconds is None else time.time() + args.seconds
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    args.runs = args.runs.split(",")
    for run in args.runs:
        if run not in SECTIONS:
            parser.error(f"unknown run {run}; runs are {', '.join(SECTIONS)}")
        if run == IN_TREE and not on_gpu:
            parser.error(f"--runs {run}: {NO_IN_TREE}")
        if SECTIONS[run] is None and args.compile != "none":
            parser.error(f"--compile {args.compile}: {run} has no such setting, and its rounding would be another")
    if args.ranks % NODES or args.batch % args.ranks:
        parser.error(f"{args.ranks} ranks must be {NODES} equal nodes, and share --batch {args.batch}")
    if args.size in MIXTURES and (args.unit_layers > 1 or any(run.endswith("-muon") for run in args.runs)):
        parser.error(f"--size {args.size}: a mixture trains with AdamW and --unit-layers 1")
    args.nodes, args.machine = NODES, machine(args.ranks)
    if args.case == SFT:
        args.weights = args.weights or "runs/weights"
    for name in ("folder", "out", "weights"):
        if getattr(args, name) is not None:
            setattr(args, name, str(Path(getattr(args, name)).resolve()))
    return args


def measure(args: argparse.Namespace, todo: list[list[str]]) -> None:
    """Do the runs; those of a list in one group."""
    jobs = dealt_jobs(todo, args.side_by_side)
    for job in jobs:
        job.runs = [name for in_order in job.runs for name in in_order]
    deadline = time.monotonic() + args.timeout
    run_jobs(f"benchmarks.{QUESTION}", jobs, args, deadline, side_by_side=args.side_by_side)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(argparse.Namespace(**json.loads(sys.argv[2])))
        return
    args = parse()
    if args.show:
        show(groups_of(kept(args)))
        return
    args.runs = without_refused({run: SECTIONS[run] for run in args.runs})
    with refusals():
        todo = waiting(args)
    args.head = describe(QUESTION)
    begin_result(args.out, args.head)
    measure(args, todo)
    groups = groups_of(kept(args))
    result = end_result(args.out, groups=[{**group, "rows": len(group["rows"])} for group in groups])
    show(groups)
    ended = {f"{row['case']}:{row['run']}:{row['seed']}" for row in result["rows"]}
    ended |= {failure["run"] for failure in result["failed"]}
    left = [name for in_order in todo for name in in_order if name not in ended]
    if left:
        print(f"not done: {', '.join(left)}")
    for failure in result["failed"]:
        print(f"failed: {failure['run']}: {failure['error']}")
    sys.exit(1 if result["failed"] else 0)


if __name__ == "__main__":
    main()
