"""One rank meets a fault: how the job ends, for every recipe, every kind of fault and every place.

    python -m benchmarks.faults --out faults.json
    python -m benchmarks.faults --device cuda --margin 60 --recipes zeropp --faults kill stop --out faults.json

The job builds an engine over a tiny Llama, loads the checkpoint that is there, and then trains a step, evaluates,
generates and saves, again and again. One run of a recipe without a fault says what is right. A case is a start from
that run's second step in which the rank --struck (the last one) is struck when it first comes to the place; then comes
the next start, without a fault. A case is well when

    every other rank has ended at most --timeout (the process group's) + --margin seconds after the fault, with a status
    that is not 0 and an error that names the cause; so has, in its own time, a rank that was stopped, which goes on
    when the others have ended;
    NaN, which ends no rank: all ranks have skipped the same steps, or the next loss of all is NaN;
    the next start loads `latest`, and its losses, evaluations and generated tokens are, bit for bit, those of the run
    without a fault.

Ranks that still are there after that time are ended. They are on the CPU (gloo), or on a GPU each (NCCL). The exit
status is 1 unless every case is well.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

from benchmarks.harness.environment import describe
from benchmarks.harness.results import write_result
from benchmarks.harness.small_job import VOCABULARY, WAYS, engine_of, evaluate, generate, step_of
from examples.options import finite, new_file, whole
from tests.ranks import forkserver_context

PLACES = ("build", "load", "forward", "backward", "step", "evaluate", "generate", "save")
FAULTS = {  # kind: places where it can be
    "kill": PLACES,  # SIGKILL
    "exception": PLACES,
    "exit": PLACES,  # os._exit(0): no word, and status 0
    "return": PLACES,  # SystemExit(0): the same, but Python ends in order
    "stop": PLACES,  # SIGSTOP for longer than the process group waits, then SIGCONT
    "nan": ("forward", "backward"),
}
LAST, SAVED = 4, 2  # steps of the run without a fault, and after how many of them a case begins
STARTING = 600  # seconds in which a start must come to its fault, or end
# What an error holds that names the cause: a peer that is gone, one that does not come, or what another rank raised.
CAUSE = re.compile(
    r"closed by peer|reset by peer|remote process|Broken pipe|Connection refused|"
    r"[Tt]imed out|[Tt]imeout|rank \d+: "
)


# -- the job, on every rank ------------------------------------------------------------------------------------------


class Strike:
    """The fault of this rank (None: it has none), which comes once, when the place is reached."""

    def __init__(self, fault: str | None, place: str | None, note: Path) -> None:
        self.fault, self.place, self._note = fault, place, note

    def at(self, place: str, tensor=None):
        """`tensor`, unless the fault changes it."""
        if self.fault is None or place != self.place:
            return tensor
        fault, self.fault = self.fault, None
        part = self._note.with_suffix(".part")
        part.write_text(repr(time.monotonic()))  # one clock for all processes of a host
        part.replace(self._note)
        if fault in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        elif fault == "exit":
            os._exit(0)
        elif fault == "return":
            raise SystemExit(0)
        elif fault == "exception":
            raise RuntimeError("the fault of this case")
        return tensor * math.nan if fault == "nan" else tensor

    def before(self, owner, name: str, place: str) -> None:
        """Come when `owner.name` is called."""
        original = getattr(owner, name)

        def reached(*args, **kwargs):
            self.at(place)
            return original(*args, **kwargs)

        setattr(owner, name, reached)


def join(args, rank: int, store: Path):
    """Make this process a rank; its device."""
    host = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": args.ranks, "LOCAL_SIZE": args.ranks, "DS_ACCELERATOR": args.device}
    host |= {"RANK": rank, "WORLD_SIZE": args.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    # All ranks are on this host; NVLink multicast is off as in emulated_nodes.py; cuBLAS is deterministic.
    host |= {"NCCL_NVLS_ENABLE": 0, "NCCL_IB_DISABLE": 1, "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update({name: str(value) for name, value in host.items()}, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    import torch
    import torch.distributed as dist

    import zeropp_fp8

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    device = torch.device(args.device, *([rank] if args.device == "cuda" else []))
    if args.device == "cuda":
        torch.cuda.set_device(device)
    zeropp_fp8.enable()
    import deepspeed

    backend, limit = {"cpu": "gloo", "cuda": "nccl"}[args.device], timedelta(seconds=args.timeout)
    store = dist.FileStore(str(store), args.ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=args.ranks, timeout=limit)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
    return device


def job(args, way: str, strike: Strike, saves: bool, rank: int, folder: Path, device, told: dict) -> None:
    """One start; `told` gets what the driver is to know, by and by."""
    from tests.models import batches
    from zeropp_fp8.zero import session

    strike.before(session, "make_topology", "build")
    engine = engine_of(way, args.ranks)
    strike.before(engine.checkpoint_engine, "load", "load")
    strike.before(engine.checkpoint_engine, "save", "save")
    strike.before(engine.optimizer, "step", "step")
    doing = None

    def in_last_block(block, given):
        hidden = strike.at(doing, given[0])
        if doing == "forward":
            hidden.register_hook(lambda gradient: strike.at("backward", gradient))
        return hidden, *given[1:]

    blocks = [module for module in engine.module.modules() if type(module).__name__ == "LlamaDecoderLayer"]
    blocks[-1].register_forward_pre_hook(in_last_block)
    if (folder / "latest").exists():
        engine.load_checkpoint(str(folder))
    told["loaded"] = engine.global_steps
    for tokens in list(batches(LAST, rank, vocab=VOCABULARY))[engine.global_steps :]:
        tokens = tokens.to(device)
        doing = "forward"
        found = [step_of(engine, tokens)]
        doing = "evaluate"
        found.append(evaluate(engine, tokens))
        doing = "generate"
        found.append(generate(engine, tokens[:, :8]))
        told["steps"][engine.global_steps] = found
        told["skipped"] = engine.skipped_steps
        if saves:
            engine.save_checkpoint(str(folder))


def live(args, way: str, fault: str | None, place: str | None, rank: int, start: Path, folder: Path) -> None:
    """A process: one rank of one start."""
    log = os.open(start / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    told = {"steps": {}}
    strike = Strike(fault if rank == args.struck else None, place, start / "struck")
    try:
        device = join(args, rank, start / "store")
        job(args, way, strike, fault != "nan", rank, folder, device, told)
    except BaseException as error:
        told["error"] = f"{type(error).__name__}: {error}".replace(str(folder.parent), "")[:300]
        raise
    finally:
        (start / f"rank{rank}").write_text(json.dumps(told))


# -- starting it, and judging ------------------------------------------------------------------------------------------


def run(args, way: str, start: Path, folder: Path, fault: str | None = None, place: str | None = None) -> list[dict]:
    """Return what each rank of one start told, with its exit status and how many seconds after the fault it ended."""
    start.mkdir()
    context = forkserver_context()
    all_ranks = range(args.ranks)
    processes = [context.Process(target=live, args=(args, way, fault, place, r, start, folder)) for r in all_ranks]
    for process in processes:
        process.start()
    struck_at, ends, deadline = None, {}, time.monotonic() + STARTING
    hung = stopped = False
    while len(ends) < args.ranks:
        time.sleep(0.02)
        now = time.monotonic()
        ends |= {r: now for r in all_ranks if r not in ends and processes[r].exitcode is not None}
        if struck_at is None and (start / "struck").exists():
            struck_at = float((start / "struck").read_text())
            deadline, stopped = struck_at + args.timeout + args.margin, fault == "stop"
        if stopped and len(ends) == args.ranks - 1:
            # Where it meets nobody any more while it makes a process group, gloo was seen to try for five time limits.
            stopped, deadline = False, now + 6 * args.timeout + args.margin
            os.kill(processes[args.struck].pid, signal.SIGCONT)
        if now > deadline and not hung:
            hung = [r for r in all_ranks if r not in ends]
            for r in hung:
                processes[r].kill()
    found = []
    for r, process in enumerate(processes):
        process.join()
        told = start / f"rank{r}"
        found.append(json.loads(told.read_text()) if told.exists() else {"steps": {}})
        found[r] |= {"status": process.exitcode, "hung": bool(hung) and r in hung}
        found[r]["seconds"] = None if struck_at is None else round(ends[r] - struck_at, 2)
    return found


def tail(start: Path, rank: int) -> str:
    return "\n".join((start / f"log{rank}").read_text(errors="replace").splitlines()[-25:])


def wrong_in(args, fault: str, ranks: list[dict], start: Path) -> str | None:
    """Return what is not well in the start that was struck."""
    for r, told in enumerate(ranks):
        if told["seconds"] is None:
            return f"the place was never reached\n{tail(start, r)}"
        if told["hung"]:
            return f"rank {r} was still there after {told['seconds']} s\n{tail(start, r)}"
    if fault == "nan":
        for told in ranks:
            if told["status"]:
                return f"a rank ended: {told.get('error')}"
        if len({told["skipped"] for told in ranks}) > 1:
            return f"ranks skipped {[told['skipped'] for told in ranks]} steps"
        finite_losses = {math.isfinite(told["steps"][str(LAST)][0]) for told in ranks}
        return None if finite_losses == {bool(ranks[0]["skipped"])} else "a later loss is NaN on some ranks, or on none"
    for r, told in enumerate(ranks):
        if r == args.struck and fault != "stop":
            continue
        if told["status"] == 0:
            return f"rank {r} ended with status 0"
        # A rank that NCCL's watchdog ends has raised nothing; it has printed why.
        if not CAUSE.search(told.get("error") or (start / f"log{r}").read_text(errors="replace")):
            return f"rank {r} does not name the cause: {told.get('error')}\n{tail(start, r)}"
    return None


def wrong_after(ranks: list[dict], right: list[dict], start: Path) -> str | None:
    """Return what is not well in the next start."""
    for r, (told, of_right) in enumerate(zip(ranks, right)):
        if told["status"]:
            return f"next start: rank {r} ended with {told['status']}: {told.get('error')}\n{tail(start, r)}"
        wanted = {step: of for step, of in of_right["steps"].items() if int(step) > told["loaded"]}
        if told["loaded"] < SAVED or told["steps"] != wanted:
            return f"next start: rank {r}, from step {told['loaded']}: {told['steps']} instead of {wanted}"
    return None


def one(args, case: tuple[str, str, str], right: list[dict], saved: Path) -> dict:
    """A case's row."""
    way, fault, place = case
    with tempfile.TemporaryDirectory() as name:
        first, next_, folder = Path(name, "first"), Path(name, "next"), Path(name, "saved")
        shutil.copytree(saved, folder)
        struck = run(args, way, first, folder, fault, place)
        wrong = wrong_in(args, fault, struck, first)
        after = run(args, way, next_, folder)
        wrong = wrong or wrong_after(after, right, next_)
    others = [told for r, told in enumerate(struck) if r != args.struck]
    row = {"recipe": way, "fault": fault, "place": place, "well": wrong is None}
    row |= {"seconds": max((told["seconds"] for told in others if told["seconds"] is not None), default=None)}
    row["ranks"] = [{key: told.get(key) for key in ("status", "seconds", "error", "skipped")} for told in struck]
    row["resumed_from"] = after[0].get("loaded")
    return row | ({"wrong": wrong} if wrong else {})


def table(rows: list[dict]) -> str:
    """Seconds until the last of the other ranks had ended; of NaN, what came of it."""
    found = {(row["recipe"], row["fault"], row["place"]): row for row in rows}

    def cell(way: str, fault: str, place: str) -> str:
        if place not in FAULTS[fault]:
            return "-"
        row = found.get((way, fault, place))
        if row is None:
            return ""
        if not row["well"]:
            return "FAILED"
        return f"{row['seconds']:.1f}" if fault != "nan" else "skipped" if row["ranks"][0]["skipped"] else "NaN"

    lines = [f"{'':<16}{'':<10}" + "".join(f"{place:>10}" for place in PLACES)]
    for way, fault in dict.fromkeys((row["recipe"], row["fault"]) for row in rows):
        lines.append(f"{way:<16}{fault:<10}" + "".join(f"{cell(way, fault, place):>10}" for place in PLACES))
    return "\n".join(lines)


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=whole(2), default=2)
    parser.add_argument("--struck", type=whole(0), metavar="RANK", help="default: the last")
    parser.add_argument("--recipes", nargs="+", choices=WAYS, default=list(WAYS), metavar="RECIPE")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--timeout", type=finite(above=0), default=10, help="seconds that the process group waits")
    parser.add_argument("--margin", type=finite(above=0), default=30, help="seconds that ranks may take beyond it")
    parser.add_argument("--side-by-side", type=whole(1), default=1, help="cases at a time")
    parser.add_argument("--out", type=new_file, default="runs/faults.json")
    args = parser.parse_args(argv)
    args.struck = args.ranks - 1 if args.struck is None else args.struck
    if args.struck >= args.ranks:
        parser.error(f"--struck {args.struck}: there are {args.ranks} ranks")
    return args


def main() -> None:
    args = parse()
    # The server that ranks are forked from must not start CUDA; with NVML it can count GPUs without.
    os.environ.update(DS_ACCELERATOR=args.device, PYTORCH_NVML_BASED_CUDA_CHECK="1")
    rows, head = [], describe("faults")
    result = {
        **head,
        "finished": False,
        "ranks": args.ranks,
        "struck": args.struck,
        "timeout": args.timeout,
        "rows": rows,
    }
    with ThreadPoolExecutor(args.side_by_side) as pool, tempfile.TemporaryDirectory() as name:
        for way in args.recipes:
            folder, saved = Path(name, way), Path(name, f"{way} saved")
            start = Path(name, f"{way} start")
            right = run(args, way, start, folder)
            for r, told in enumerate(right):
                if told["status"]:
                    raise SystemExit(f"{way} without a fault: {told.get('error')}\n{tail(start, r)}")
            shutil.copytree(folder / f"global_step{SAVED}", saved / f"global_step{SAVED}")
            (saved / "latest").write_text(f"global_step{SAVED}")
            cases = [(way, fault, place) for fault in args.faults for place in args.places if place in FAULTS[fault]]
            for row in pool.map(lambda case: one(args, case, right, saved), cases):  # noqa: B023 (done before the next)
                rows.append(row)
                print(f"{row['recipe']:<16}{row['fault']:<10}{row['place']:<10}{row.get('wrong', 'well')}", flush=True)
                write_result(args.out, result)
    write_result(args.out, result | {"finished": True})
    well = sum(row["well"] for row in rows)
    print(f"\n{table(rows)}\n{well} of {len(rows)} cases are well, {len(rows) - well} are not")
    sys.exit(0 if well == len(rows) else 1)


if __name__ == "__main__":
    main()
