"""Rules about the ranks that share a node.

A host is what NCCL takes for one: NCCL_HOSTID if it is set, otherwise the host's name and boot id. Each rank tells its
place, and all ranks derive the same answer, or the same error, from all places. Launchers say how many ranks of the
job a node has; a data-parallel group may have fewer, and the number is not always right: Accelerate on a CPU writes
LOCAL_WORLD_SIZE=1 for any number.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from zeropp_fp8.config.sections import SECTION, PluginConfig
from zeropp_fp8.config.trial import TRIAL_VARIABLE
from zeropp_fp8.config.words import ConfigError

_KEY = f'"{SECTION}.topology.ranks_per_node"'
_EACH_ALONE = "or set it to 1, which takes every rank for a node of its own"
# Ranks of the job on this node, as a launcher counts them. A contradiction to the hosts is reported.
LAUNCHER_VARIABLES = (
    "LOCAL_WORLD_SIZE",  # torchrun, accelerate
    "LOCAL_SIZE",  # deepspeed
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
)


@dataclass(frozen=True)
class Place:
    """The place of a rank, as the rank itself tells it.

    Attributes:
        rank: in the job.
        host: its name, the same only for ranks of one host.
        configured: ranks_per_node in its configuration: a number, or "detect".
        counted: the launcher's variables, by name.
        trial: the experiment that its environment asks for.
    """

    rank: int
    host: str
    configured: int | str
    counted: Mapping[str, int]
    trial: str = ""

    @property
    def node(self) -> Hashable:
        """Return a value that is the same for ranks that share a node."""
        return self.host if self.configured == "detect" else self.rank // self.configured


def place_of(rank: int, config: PluginConfig, env: Mapping[str, str] = os.environ) -> Place:
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()} {boot_id.read_text().strip() if boot_id.is_file() else ''}".strip()
    counted = {name: int(env[name]) for name in LAUNCHER_VARIABLES if env.get(name, "").isdecimal()}
    return Place(
        rank=rank,
        host=env.get("NCCL_HOSTID") or host,
        configured=config.topology.ranks_per_node,
        counted={name: ranks for name, ranks in counted.items() if ranks > 0},
        trial=env.get(TRIAL_VARIABLE, ""),
    )


def find_ranks_per_node(places: Sequence[Place], job_size: int) -> tuple[int, str]:
    """Return (ranks of a data-parallel group on each node, the source of the number).

    A configured number counts ranks of the job: rank r of the job is on node r // number.

    Args:
        places: of the group's ranks, in its order.
        job_size: ranks of the job.

    Raises:
        ConfigError: configurations or trials of ranks differ, nodes have unequal numbers of the group's ranks, or
            these are not numbered node by node. It is the same on every rank.
    """
    first = places[0]
    configured = first.configured
    for place in places:
        if place.configured != configured:
            raise ConfigError(
                f"{_KEY} is {configured} on rank {first.rank} and {place.configured} on rank {place.rank}; give all "
                "ranks the same ds_config"
            )
        if place.trial != first.trial:
            raise ConfigError(
                f"{TRIAL_VARIABLE} differs between rank {first.rank} and rank {place.rank}: "
                "the launcher does not hand it to all nodes; start the command on each, or name it in .deepspeed_env"
            )
    detected = configured == "detect"
    if not detected and configured > job_size:
        sizes = " or ".join(str(each) for each in range(1, job_size + 1) if job_size % each == 0)
        raise ConfigError(f'{_KEY}: {configured} is more than the {job_size} ranks of the job; use {sizes} or "detect"')
    nodes, hosts = Counter(place.node for place in places), Counter(place.host for place in places)
    if len(nodes) < len(list(groupby(place.node for place in places))):
        raise ConfigError(
            f"{_KEY}: the ranks {', '.join(str(place.rank) for place in places)} of the data-parallel group are not "
            f"numbered node by node, but lie on {', '.join(str(place.node) for place in places)}; number them so "
            f"(mpirun --map-by slot, srun --distribution=block), {_EACH_ALONE}"
        )
    ranks_per_node, *others = set(nodes.values())
    if others and detected:
        raise ConfigError(
            f"{_KEY}: hosts have unequal numbers of the {len(places)} ranks of the data-parallel group: "
            f"{', '.join(f'{count} on {host}' for host, count in hosts.items())}; start as many on each, {_EACH_ALONE}"
        )
    if others:
        raise ConfigError(
            f"{_KEY}: {configured} leaves {' + '.join(str(count) for count in nodes.values())} of the {len(places)} "
            f"ranks of the data-parallel group on a node; set ranks_per_node to a divisor of {job_size}"
        )
    if detected:
        remark = _contradictions(places, hosts, whole_job=len(places) == job_size)
        return ranks_per_node, "the hosts of the ranks" + (f" ({remark}: the hosts win)" if remark else "")
    same = len(nodes) == len(hosts) == len({(place.node, place.host) for place in places})
    remark = "" if same else f" (the hosts: {', '.join(f'{count} on {host}' for host, count in hosts.items())})"
    return ranks_per_node, f"{SECTION}.topology.ranks_per_node{remark}"


def _contradictions(places: Sequence[Place], hosts: Mapping[str, int], whole_job: bool) -> str:
    """Say which launchers' numbers contradict the hosts; for a part of the job only the impossible ones."""
    wrong: dict[str, set[int]] = {}
    for place in places:
        seen, differ = hosts[place.host], len(set(place.counted.values())) > 1
        for name, ranks in place.counted.items():
            if ranks != seen if whole_job else ranks < seen or differ:
                wrong.setdefault(name, set()).add(ranks)
    return ", ".join(f"{name} says {' or '.join(map(str, sorted(ranks)))}" for name, ranks in wrong.items())


def check_topology(config: PluginConfig, ranks_per_node: int) -> None:
    """Check rules about the ranks of a node.

    Raises:
        ConfigError: the secondary scope does not divide a node.
    """
    scope = config.secondary.scope
    if isinstance(scope, int) and ranks_per_node % scope:
        raise ConfigError(
            f'"zero_optimization.zero_hpz_partition_size" / "{SECTION}.secondary.scope": {scope} does not divide the '
            f'{ranks_per_node} ranks of a node; use a divisor of {ranks_per_node}, or "node"'
        )


def secondary_ranks(config: PluginConfig, ranks_per_node: int) -> int | None:
    """Return how many ranks share one secondary copy; None without one."""
    scope = config.secondary.scope
    return {"none": None, "node": ranks_per_node, "rank": 1}.get(scope, scope)
