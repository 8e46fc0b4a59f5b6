"""The abilities of this machine for training, and what stands in the way: alone, or on all ranks under a launcher.

python -m zeropp_fp8 doctor
torchrun --nnodes 2 --nproc-per-node 8 ... -m zeropp_fp8 doctor --model meta-llama/Llama-3.1-8B
deepspeed --hostfile hosts --module zeropp_fp8 doctor

Exit status 1 where something would make training wrong or impossible, else 0.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from statistics import median
from typing import Any

from zeropp_fp8.config import PluginConfig
from zeropp_fp8.doctor.compared import differences, missing_problems, nodes_of, own_problems, ranks_by, ranks_text
from zeropp_fp8.doctor.facts import facts_of
from zeropp_fp8.doctor.problems import Problem, exit_status, problem_lines
from zeropp_fp8.doctor.ranks import GRACE_S, Ranks, Unanswered, joined, place_in_job
from zeropp_fp8.outputs import STDOUT, Parser, file_to_write, json_at, labelled, number, said, whole
from zeropp_fp8.plan import PRESETS, Cluster, Hardware, Job, PlanError, StepEstimate
from zeropp_fp8.plan import __main__ as plan
from zeropp_fp8.plan.hardware import preset_of
from zeropp_fp8.plan.recommend import Advice, recommend

UNEVEN = 0.7  # of the median: a group this slow is named
# Of an all-gather's rate: an all-to-all this slow is named. By NCCL's default it reached about 15 of 25 Gbit/s, and a
# step took 275 ms that took 221 with 16 sockets per channel (benchmarks/results/two_nodes/h100-2-25gbit*).
SLOW_EXCHANGE = 0.8
LEVELS = ("within", "between")
DAY = 86_400.0
START_S = 30  # for what is not waiting: imports, and the report


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("doctor", __doc__)
    parser.add_argument("--ranks-per-node", type=whole(), help="as topology.ranks_per_node; default: ranks of one host")
    links, silent = "of measuring links; 0: leave it out", "seconds until a rank that is silent is named"
    parser.add_argument("--seconds", type=number(least=0, most=DAY), default=2.0, help=links)
    parser.add_argument("--timeout", type=number(above=0, most=DAY), default=120.0, help=silent)
    parser.add_json(read=str)  # rank 0 looks at it: hosts of other ranks need not have the folder
    plan.add_job(parser)
    arguments = parser.parse_args(argv)
    plan.check_job(parser, arguments)
    return arguments


@dataclass
class Diagnosis:
    """The facts that rank 0 has at the end.

    Attributes:
        facts, links: what each rank has said of itself, and measured.
        nodes: their number, and ranks on each; (0, 0) where that is not known.
        nodes_from: in words, where that comes from.
    """

    facts: dict[int, dict] = field(default_factory=dict)
    links: dict[int, dict] = field(default_factory=dict)
    nodes: tuple[int, int] = (0, 0)
    nodes_from: str = ""
    problems: list[Problem] = field(default_factory=list)
    job: Job | None = None
    hardware: Hardware | None = None
    estimates: list[StepEstimate] = field(default_factory=list)
    advice: Advice | None = None


def diagnose(ranks: Ranks, local_rank: int, arguments: argparse.Namespace) -> int:
    """Look, tell, compare, measure and report. On every rank.

    Returns:
        The exit status, the same on all ranks. A thread may still wait in a collective.

    Raises:
        Unanswered: rank 0 is gone.
    """
    try:
        return _diagnosed(ranks, local_rank, arguments)
    except BaseException:
        if ranks.rank == 0:  # the others must not wait for it
            ranks.decide("measuring", 0)
            ranks.decide("status", 1)
            ranks.hear("end", GRACE_S)
        raise


def _diagnosed(ranks: Ranks, local_rank: int, arguments: argparse.Namespace) -> int:
    config = PluginConfig(topology={"ranks_per_node": arguments.ranks_per_node or "detect"})
    try:
        own = facts_of(ranks.rank, local_rank, config)
    except Exception as error:  # rank 0 reports it
        own = {"failed": f"{type(error).__name__}: {error}"}
    ranks.tell("facts", own)
    found = Diagnosis()
    if ranks.rank == 0:
        _compare(found, ranks, arguments)
    # Rank 0 begins to wait when it has looked itself, which may be later than here.
    per_node = ranks.decided("measuring", 2 * ranks.limit_s + START_S)
    if per_node:
        given = (ranks.for_a_thread(), local_rank, per_node, arguments.seconds)
        threading.Thread(target=_tell_links, args=given, daemon=True).start()
    if ranks.rank == 0:
        if per_node:
            _hear_links(found, ranks, arguments)
        _plan(found, arguments)
        with json_at(arguments.json) as written:
            written |= known(found)
            print("\n".join(report(found)), flush=True)
        ranks.decide("status", exit_status(found.problems))
    status = ranks.decided("status", 2 * ranks.limit_s + arguments.seconds + START_S)
    ranks.tell("end", None)
    if ranks.rank == 0:
        ranks.hear("end", GRACE_S)  # rank 0 may serve the store
    return status


def _compare(found: Diagnosis, ranks: Ranks, arguments: argparse.Namespace) -> None:
    """Compare the ranks' facts. Links can be measured where all go by the same ranks per node; else that is 0."""
    said = ranks.hear("facts")
    found.facts = {rank: one for rank, one in said.items() if "failed" not in one}
    found.problems = missing_problems(said, ranks.world_size, "themselves")
    for rank in said.keys() - found.facts.keys():
        found.problems.append(Problem(f"rank {rank} cannot look at itself: {said[rank]['failed']}", "mend that first"))
    found.problems += own_problems(found.facts)
    found.problems += differences(found.facts)
    if len(found.facts) == ranks.world_size:
        per_node, found.nodes_from, wrong = nodes_of(found.facts)
        found.problems += wrong
        if per_node:
            found.nodes = (ranks.world_size // per_node, per_node)
    measures = ranks.world_size > 1 and arguments.seconds > 0 and not exit_status(found.problems)
    ranks.decide("measuring", found.nodes[1] if measures else 0)


def _tell_links(ranks: Ranks, local_rank: int, per_node: int, seconds: float) -> None:
    """Measure in a thread of its own: in a collective it may wait for ever for a rank that is gone."""
    try:
        ranks.tell("links", measured(ranks, local_rank, per_node, seconds))
    except Exception as error:  # of any backend; rank 0 reports it, and the others are not waited for
        ranks.tell("links", {"failed": f"{type(error).__name__}: {error}"}, failed=True)


def measured(ranks: Ranks, local_rank: int, per_node: int, seconds: float) -> dict[str, Any]:
    """Join the process group as training does, and measure."""
    import torch.distributed as dist

    from zeropp_fp8.comm import make_topology
    from zeropp_fp8.doctor.accelerator import device_of
    from zeropp_fp8.doctor.links import measure

    device = device_of(local_rank)
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # raise when time is up, where NCCL would end the process
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("group", ranks.store),
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timedelta(seconds=ranks.limit_s),
        )
    return measure(make_topology(ranks_per_node=per_node), device, seconds)


def _hear_links(found: Diagnosis, ranks: Ranks, arguments: argparse.Namespace) -> None:
    said = ranks.hear("links", ranks.limit_s + arguments.seconds)
    found.links = {rank: one for rank, one in said.items() if "failed" not in one}
    failed = ranks_by((rank, said[rank]["failed"]) for rank in said.keys() - found.links.keys())
    for error, of in failed.items():
        remedy = "NCCL_DEBUG=INFO says more; is the network open between all hosts, on NCCL_SOCKET_IFNAME?"
        found.problems.append(Problem(f"{ranks_text(of)} cannot measure links: {error}", remedy))
    found.problems += missing_problems(said, ranks.world_size, "links")
    for level in LEVELS:
        rates = {rank: one[level]["all_gather_gbs"] for rank, one in found.links.items() if level in one}
        middle = median(rates.values()) if rates else 0
        slow = [rank for rank, rate in rates.items() if rate < UNEVEN * middle]
        if slow:
            hosts = ", ".join(dict.fromkeys(found.facts[rank]["host"] for rank in slow))
            found.problems.append(
                Problem(
                    f"links {level} nodes of {ranks_text(slow)} ({hosts}) send {min(rates.values()):.3g} GB/s, the "
                    f"median is {middle:.3g}",
                    "all wait for the slowest: look at these hosts",
                    serious=False,
                )
            )
    found.problems += _slow_exchanges(found)


def _slow_exchanges(found: Diagnosis) -> list[Problem]:
    """Whether NCCL exchanges more slowly than it gathers, as it may over TCP, where a channel has one socket."""
    between = slowest(found, "between")
    on_gpus = any(one["rates"] is not None for one in found.facts.values())
    if between is None or not on_gpus or between["all_to_all_gbs"] >= SLOW_EXCHANGE * between["all_gather_gbs"]:
        return []
    return [
        Problem(
            f"between nodes an all-to-all moves {between['all_to_all_gbs']:.3g} GB/s where an all-gather moves "
            f"{between['all_gather_gbs']:.3g}: gradients and whole tensors are sent by all-to-all",
            "if these links are TCP, where a channel of NCCL has one socket, set NCCL_SOCKET_NTHREADS=4 and "
            "NCCL_NSOCKS_PERTHREAD=4 on all ranks (their product is at most 64)",
            serious=False,
        )
    ]


def slowest(found: Diagnosis, level: str) -> dict[str, float] | None:
    """The lowest rates and the highest latency of all groups of a level."""
    of_level = [one[level] for one in found.links.values() if level in one]
    if not of_level:
        return None
    rates = {key: min(one[key] for one in of_level) for key in ("all_gather_gbs", "all_to_all_gbs")}
    return rates | {"latency_us": max(one["latency_us"] for one in of_level)}


def hardware_of(found: Diagnosis) -> Hardware:
    """The plan's preset of the GPU (an H200's where it has none) with what was measured: links, products and copies.

    Training reaches the share of a product's rate that it reaches by the preset.
    """
    gpus = [one for one in found.facts.values() if one["rates"]]
    hardware = PRESETS[(gpus and preset_of(gpus[0]["device"]["name"])) or "h200"]
    if gpus:
        lowest = {name: min(one["rates"][name] for one in gpus) for name in gpus[0]["rates"]}
        achieved = hardware.achieved_tflops * lowest["matrix_tflops"] / hardware.matrix_tflops
        hardware = replace(hardware, achieved_tflops=achieved, **lowest)
    within = slowest(found, "within")
    if within is not None:
        hardware = replace(hardware, intra_gbs=min(within["all_gather_gbs"], within["all_to_all_gbs"]))
    return replace(hardware, link_efficiency=1.0)  # of what was measured, which is payload


def _plan(found: Diagnosis, arguments: argparse.Namespace) -> None:
    """Plan a step of each recipe here, where all links that there are were measured; with a GPU recommend one."""
    nodes, per_node = found.nodes
    within, between = slowest(found, "within"), slowest(found, "between")
    if not nodes or (nodes > 1 and between is None) or (per_node > 1 and within is None):
        return
    # All ranks of a node send at once.
    gbit = 8 * per_node * min(between["all_gather_gbs"], between["all_to_all_gbs"]) if between else 0.0
    try:
        found.job = plan.job_of(arguments, Cluster(nodes, per_node, gbit))
        sizes = [one["device"]["bytes"] for one in found.facts.values() if "bytes" in one["device"]]
        found.hardware = hardware_of(found)
        advice = recommend(found.job, found.hardware, min(sizes, default=None))
        found.estimates, found.advice = advice.estimates, advice if sizes else None
    except PlanError as error:
        found.problems.append(Problem(f"no plan: {error}", serious=False))


def report(found: Diagnosis) -> list[str]:
    lines, first = [], found.facts.get(0)
    on_gpus = any(one["rates"] for one in found.facts.values())
    if first is not None:
        device, variables = first["device"], first["variables"]
        capability = ".".join(map(str, device.get("capability", ())))
        lines += [
            ("versions", ", ".join(f"{name} {version}" for name, version in first["versions"].items())),
            ("plugin", first["switched_on"]),
            ("device", device.get("name", "not known") + (f", compute capability {capability}" if capability else "")),
            *((f"  {scaling}", how) for scaling, how in device.get("gemms", {}).items()),
            ("kernels", device.get("kernels", "not known")),
            ("  bytes", _tested(found)),
            *([("variables", ", ".join(f"{name}={value}" for name, value in variables.items()))] if variables else []),
        ]
    if found.nodes[0]:
        hosts = list(dict.fromkeys(one["place"]["host"].split()[0] for one in found.facts.values()))
        shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
        over = f" over {'NCCL' if on_gpus else 'gloo'}" if found.links else ""
        said = f"{found.nodes[0]} x {found.nodes[1]} rank(s){over}, from {found.nodes_from}: {shown}"
        lines.append(("nodes", said))
    for level in LEVELS:
        rates = slowest(found, level)
        if rates is not None:
            said = (
                f"{level} nodes a rank sends {rates['all_gather_gbs']:.3g} GB/s (all-gather), "
                f"{rates['all_to_all_gbs']:.3g} GB/s (all-to-all); {rates['latency_us']:.0f} us for 4 KiB"
            )
            lines.append(("links", said))
    text = labelled(lines)
    if found.estimates:
        how = "modelled" if found.advice else "links as measured, computing as on an H200"
        advice = [found.advice.text] if found.advice else []
        text += ["", plan.steps_table(found.estimates, found.job, how=how), *advice, ""]
    return [*text, *problem_lines(found.problems)]


def _tested(found: Diagnosis) -> str:
    tested = [rank for rank, one in found.facts.items() if one["kernels_tested"]]
    if not tested:
        return "not tested: there is no accelerator"
    differ = any(each["what"].startswith("kernel: ") for one in found.facts.values() for each in one["problems"])
    return f"{'DIFFER from' if differ else 'equal'} those of the torch code ({ranks_text(tested)})"


def known(found: Diagnosis) -> dict[str, Any]:
    """The same for tools; `job` and `hardware` are what the recipes are estimated of."""
    advice = found.advice
    return {
        "status": exit_status(found.problems),
        "problems": found.problems,
        "ranks": found.facts,
        "nodes": found.nodes[0],
        "ranks_per_node": found.nodes[1],
        "nodes_from": found.nodes_from,
        "links": {level: slowest(found, level) for level in LEVELS},
        "job": found.job,
        "hardware": found.hardware,
        "recipes": found.estimates,
        "recommended": advice and advice.recipe,
        "advice": advice and advice.text,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run on this rank and end with the status that all ranks end with."""
    arguments = parse(argv)
    try:
        rank, world_size, local_rank = place_in_job()
        if rank == 0 and arguments.json not in (None, STDOUT):
            file_to_write(arguments.json)  # not while parsing: hosts of other ranks need not have the folder
        ranks = joined(rank, world_size, arguments.timeout)
        status = diagnose(ranks, local_rank, arguments)
    except argparse.ArgumentTypeError as error:
        print(f"doctor: --json: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None  # of the job: launchers end the other ranks
    except (Unanswered, ValueError, OSError) as error:  # the last of --json
        print(f"doctor: {said(error)}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    sys.stdout.flush()
    if world_size > 1:
        os._exit(status)  # a thread may wait in a collective for a rank that is gone, and leaving a group waits too
    raise SystemExit(status)
