"""Step time, bytes and memory on one node, over NVLink, or as without it: PCIe, consumer cards.

    python -m benchmarks.one_node --ranks 2 --out runs/one_node.json
    python -m benchmarks.one_node --ranks 4 --links pcie,64,128 --out runs/pcie.json      (root: namespaces)

A link of `nvlink` is the node as it is. On `pcie` it has NCCL_P2P_DISABLE=1: GPUs exchange through the host's memory. A
number is a link of so many Gbit/s for what each rank sends: each is in a network namespace of its own on one bridge,
and NCCL has sockets only (NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1). 64 and 128 are PCIe 3.0 and 4.0 with 8 lanes. All
ranks are one node to NCCL and to the recipes. Without a GPU a small model trains over gloo, to which `nvlink` and
`pcie` are the host's loopback.

One host moves the bytes of all ranks through its CPUs: a rate may be more than it can move. So each row says what an
all-gather has reached on the link as it was ("link", Gbit/s that a rank sends), which is what its times are to be
compared with; the shaped rate bounds it, and is the link only where both agree. Where ranks have an interface, what it
counted stands beside what the ledger counted.

Every run trains the same Llama on the same data in bf16, clips gradients at 1.0 and uses AdamW with fp32 master
weights (harness/peers.py). Every run is built and timed in every round, forwards in even rounds and backwards in odd
ones, all in the same processes. Each is compared with the fastest peer that is compiled as it is. The targets: without
NVLink `zeropp-pcie` is twice as fast; over NVLink `lossless` and `zeropp` are no slower, and FP8 takes at most 0.8 of
the time of `zeropp`.

    stock-zero2, stock            DeepSpeed ZeRO-2, ZeRO-3
    fsdp2, fsdp2-compiled         fully_shard; with decoder layers compiled
    fsdp2-torchao, ...            fully_shard of torchao's float8 training
    zeropp, zeropp-pcie, ...      ZeRO-3 with this project's recipes
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics

import torch

from benchmarks.harness.command import add_batch, add_steps, choose_runs, command
from benchmarks.harness.environment import forget_memory
from benchmarks.harness.jobs import Job
from benchmarks.harness.measuring import Steps, micro_batches, random_tokens, reached_gbit, timed_steps
from benchmarks.harness.nodes import PLACES, ranks_apart, set_rate_everywhere
from benchmarks.harness.peers import MODELS, SECTIONS, TORCHAO, made, wire_of
from benchmarks.harness.question import Question
from benchmarks.harness.sizes import EVERY_SIZE
from benchmarks.harness.tables import cell, verdict
from examples.options import whole

NVLINK, PCIE = "nvlink", "pcie"
AS_IT_IS = {NVLINK: "over NVLink", PCIE: "through the host's memory"}
COMPILED = "-compiled"
PEERS = ("stock-zero2", "stock", "fsdp2", "fsdp2-compiled")  # in bf16: what others are compared with
IN_FP8 = (*TORCHAO, *(recipe + mode for recipe in ("fp8-lm-o1", "fp8-lm") for mode in ("", COMPILED)))
OWN = ("zeropp", "zeropp-pcie", "zeropp-compiled", "zeropp-pcie-compiled")
RUNS = (*PEERS, *OWN)
EVERY = tuple(dict.fromkeys((*RUNS, *TORCHAO, *SECTIONS)))
OVER_NVLINK = ("fsdp2", "fsdp2-compiled", "lossless", "lossless-compiled", "zeropp", "zeropp-compiled", *IN_FP8)
# (runs, what they are compared with: None for the fastest peer, how many times as fast they have to be), of a link
TARGETS: dict[bool, list[tuple[tuple[str, ...], str | None, float]]] = {
    True: [(("lossless", "zeropp"), None, 1.0), (("fp8-lm-o1", "fp8-lm"), "zeropp", 1 / 0.8)],
    False: [(("zeropp-pcie",), None, 2.0)],
}


def measure(run: str, args, device: torch.device) -> dict:
    """The row of one run on one link in one round."""
    shaped = args.link not in AS_IT_IS
    if shaped:
        set_rate_everywhere(None)  # what is sent while it is built is not measured
    found = forget_memory(device)
    trainer = made(run, args, device)
    if shaped:
        set_rate_everywhere(args.link or None)
    reached = reached_gbit(device)
    forget_memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    tokens = random_tokens(EVERY_SIZE[args.size].vocabulary, args.micro_batch, args.sequence, device)
    batches = micro_batches(tokens, args.accumulation)
    row = {"run": run, "link": args.link, "round": args.round, "reached_gbit": reached}
    row |= timed_steps(Steps(trainer), batches, args.warmup, args.steps, device)
    row["tx_bytes_per_rank_step"] = row.pop("tx_bytes_per_node_step") if shaped else None
    tokens = args.ranks * args.micro_batch * args.accumulation * args.sequence
    row["tokens_per_s"] = 1e3 * tokens / row["step_ms"]
    if device.type == "cuda":
        # Engines leave memory behind after destroy(): a run's peak is counted from what it found.
        row |= {"peak_gib": (torch.cuda.max_memory_allocated() - found) / 2**30, "found_gib": found / 2**30}
    if trainer.session is not None:
        row |= wire(trainer.session)
    if shaped:
        set_rate_everywhere(None)
    trainer.close()
    return row


def wire(engine) -> dict:
    """Return what the ledger has counted of a step, and what this rank keeps."""
    report = wire_of(engine)
    session = engine.zeropp_fp8_session
    by_all = sum(sum(kind.values()) for kind in report["per_step"].values())
    return {
        "wire": report,
        "ledger_bytes_per_rank_step": by_all / session.topology.world_size,
        "secondary_bytes": sum(u.secondary.numel() for u in engine.optimizer.gatherer.units if u.secondary is not None),
        "residual_bytes": engine.optimizer.reducer.residual_bytes(engine.module.parameters()),
    }


def compare(rows: list[dict], settings: dict) -> list[dict]:
    """A line per link and run over its rounds; its speed over the fastest peer on that link."""
    lines = []
    for link, run in dict.fromkeys((row["link"], row["run"]) for row in rows):
        mine = [row for row in rows if (row["link"], row["run"]) == (link, run)]
        line = {"link": link, "run": run, "step_ms": statistics.median(row["step_ms"] for row in mine)}
        line["step_ms_by_round"] = [row["step_ms"] for row in mine]
        line["step_ms_range"] = [min(row["min_ms"] for row in mine), max(row["max_ms"] for row in mine)]
        line["reached_gbit"] = statistics.median(row["reached_gbit"] for row in mine)
        line["losses"] = [mine[0]["losses"][0], mine[0]["losses"][-1]]
        for key in ("tx_bytes_per_rank_step", "ledger_bytes_per_rank_step", "peak_gib", "secondary_bytes"):
            line[key] = mine[-1].get(key)
        line["tokens_per_s"] = statistics.median(row["tokens_per_s"] for row in mine)
        lines.append(line)
    for line in lines:
        name, compiled = line["run"].removesuffix(COMPILED), line["run"].endswith(COMPILED)
        others = [o for o in lines if o["link"] == line["link"]]
        if line["link"] == NVLINK:
            others = [other for other in others if other["run"].endswith(COMPILED) == compiled]
        by_run = {other["run"].removesuffix(COMPILED): other for other in others}
        best = min((o for o in others if o["run"] in PEERS), key=lambda other: other["step_ms"], default=None)
        line["best_peer"] = best and best["run"]
        line["times_best_peer"] = best and best["step_ms"] / line["step_ms"]
        for runs, than, times in TARGETS[line["link"] == NVLINK]:
            other = by_run.get(than) if than else best
            if name in runs and other and not EVERY_SIZE[settings["size"]].small:
                line["target_met"] = other["step_ms"] / line["step_ms"] >= times
    return lines


def show(result: dict) -> None:
    """A table a link."""
    settings = result["settings"]
    shape = f"{settings['micro_batch']} x {settings['sequence']} tokens per rank"
    if settings["accumulation"] > 1:
        shape = f"{settings['accumulation']} micro-batches of {shape}"
    for link in dict.fromkeys(line["link"] for line in result["comparison"]):
        what = f"as it is, {AS_IT_IS[link]}" if link in AS_IT_IS else f"{link:g} Gbit/s per rank"
        print(f"\n{settings['ranks']} ranks in one node, {what}; {settings['size']}, {shape}, bf16")
        print(
            f"{'':<22}{'ms':>9}{'fastest..slowest':>24}{'tokens/s':>10}{'x peer':>8}{'interface':>11}{'ledger':>9}"
            f"{'copies':>8}{'peak':>8}{'link':>8}  loss\n{'':<73}{'MB/rank':>11}{'MB/rank':>9}{'GB':>8}{'GiB':>8}"
            f"{'Gbit/s':>8}"
        )
        for line in (line for line in result["comparison"] if line["link"] == link):
            fastest, slowest = line["step_ms_range"]
            steps = f"{fastest:.1f}..{slowest:.1f}"
            print(
                f"{line['run']:<22}{line['step_ms']:>9.1f}{steps:>24}{line['tokens_per_s']:>10.0f}"
                f"{cell(line['times_best_peer'], 2, width=8)}{cell(line['tx_bytes_per_rank_step'], 1, 1e6, 11)}"
                f"{cell(line['ledger_bytes_per_rank_step'], 1, 1e6, 9)}{cell(line['secondary_bytes'], 2, 1e9, 8)}"
                f"{cell(line['peak_gib'], 2, width=8)}{line['reached_gbit']:>8.1f}"
                f"  {line['losses'][0]:.4f} -> {line['losses'][1]:.4f}  {verdict(line)}"
            )


# By NCCL's default, one socket a channel, a rank may move less than the link is shaped to: "link" says what it moves.
SOCKETS = {"NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}


def jobs(args) -> list[Job]:
    """A job a link and round, of all runs in one group of ranks; odd rounds backwards."""
    found = []
    for link in args.links:
        environment = ({} if link == NVLINK else {"NCCL_P2P_DISABLE": "1"}) | ({} if link in AS_IT_IS else SOCKETS)
        for number in range(args.rounds):
            runs = args.runs[:: -1 if number % 2 else 1]
            more = {"link": link, "round": number}
            label = f"{link}, round {number}"
            found.append(Job(label, runs, more, environment=environment, apart=link not in AS_IT_IS))
    return found


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = command(__doc__, "one_node", EVERY, MODELS, "1.3b" if on_gpu else "tiny")
    parser.set_defaults(ranks=4)
    parser.add_argument(
        "--links", default=NVLINK, help=f"{', '.join(AS_IT_IS)}, or Gbit/s of a rank (0: not shaped), with commas"
    )
    parser.add_argument("--accumulation", type=whole(1), default=1, help="micro-batches a step (default 1)")
    add_batch(parser, sequence=1024 if on_gpu else 64)
    add_steps(parser, steps=8 if on_gpu else 2, warmup=4 if on_gpu else 1, rounds=2)
    parser.add_argument("--fsdp-reduce-dtype", choices=("bf16", "fp32"), default="bf16", help="gradients of fsdp2")
    args = parser.parse_args(argv)
    args.links = [_link(text, parser) for text in args.links.split(",")]
    default = OVER_NVLINK if args.links == [NVLINK] else RUNS
    choose_runs(args, parser, default if args.runs is None else EVERY)
    if any(link not in AS_IT_IS for link in args.links):
        if os.geteuid():
            parser.error("--links: a rate needs namespaces, and they need root")
        if args.ranks > PLACES:
            parser.error(f"--links: at most {PLACES} ranks in namespaces of their own")
    if on_gpu and torch.cuda.device_count() < args.ranks:
        parser.error(f"{args.ranks} GPUs are needed, {torch.cuda.device_count()} found")
    args.nodes, args.gbit = 1, None
    args.model, args.tokens = args.size, args.sequence  # what harness/peers.py asks for
    return args


def _link(text: str, parser: argparse.ArgumentParser) -> str | float:
    if text in AS_IT_IS:
        return text
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate < float("inf"):
        parser.error(f"--links: {text} is neither {' nor '.join(AS_IT_IS)} nor a rate in Gbit/s")
    return rate


def links(args) -> contextlib.AbstractContextManager:
    """The namespaces, where a link is a rate."""
    return ranks_apart(args.ranks) if any(link not in AS_IT_IS for link in args.links) else contextlib.nullcontext()


QUESTION = Question(
    name="one_node",
    parse=parse,
    settings=("size", "ranks", "links", "micro_batch", "sequence", "accumulation", "steps", "warmup", "rounds"),
    jobs=jobs,
    work=measure,
    line=lambda r: f"{r['run']}, {r['link']}, round {r['round']}: {r['step_ms']:.1f} ms, link {r['reached_gbit']:.1f}",
    compared=lambda result: {"comparison": compare(result["rows"], result["settings"])},
    show=show,
    links=links,
)

if __name__ == "__main__":
    QUESTION.answer()
