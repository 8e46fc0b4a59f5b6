"""The ranks that share a node, and the process groups of each level.

Ranks of the data-parallel group are numbered node by node, as every launcher does: rank = node * ranks_per_node +
local index. All numbers here are ranks *of the data-parallel group*, not of the world.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

INTER = "inter"  # between nodes
INTRA = "intra"  # within a node


@dataclass(frozen=True)
class Level:
    """A hop of a hierarchical collective: `size` ranks that exchange over one kind of link."""

    group: Any
    size: int
    link: str

    @property
    def rank(self) -> int:
        """Return this rank's index among the level's ranks."""
        return dist.get_rank(self.group)


def time_limit() -> timedelta | None:
    """Return the time limit of a collective of the world, as `init_process_group` got it; None if no backend tells it.

    A new group without a given limit has torch's own (30 minutes, with NCCL 10). Ranks that wait in it for a stuck
    rank would then wait that long.
    """
    world = dist.group.WORLD
    backends = (world._get_backend(device) for device in world._device_types)
    limits = [backend.options._timeout for backend in backends if backend.name() in ("gloo", "nccl")]
    return max(limits, default=None)


# Process groups are communicators: NCCL needs memory for them, and their creation is a rendezvous. Engines over the
# same parent group (the four models of RLHF) share them. The key is the parent group object: a new world gets new ones.
_group_cache: dict[Any, dict[tuple[tuple[int, ...], ...], Any]] = {}


def _make_groups(parent: Any, members: list[list[int]]) -> Any:
    """Return this rank's group out of disjoint `members` (parent ranks) that cover the parent; collective over it."""
    rank, size = dist.get_rank(parent), dist.get_world_size(parent)
    mine = next(ranks for ranks in members if rank in ranks)
    if len(mine) == size:
        return parent
    key = tuple(tuple(ranks) for ranks in members)
    cache = _group_cache.setdefault(parent, {})
    if key not in cache:
        to_global = [dist.get_global_rank(parent, r) for r in range(size)]
        if size == dist.get_world_size():
            groups = [dist.new_group([to_global[r] for r in ranks], timeout=time_limit()) for ranks in members]
            cache[key] = groups[members.index(mine)]
        else:  # ranks outside the parent do not take part
            ranks = [to_global[r] for r in mine]
            cache[key] = dist.new_group(ranks, timeout=time_limit(), use_local_synchronization=True)
    return cache[key]


@dataclass(frozen=True)
class Topology:
    """The `nodes` x `ranks_per_node` ranks of the data-parallel group `group`; this rank is `rank`."""

    group: Any
    rank: int
    nodes: int
    ranks_per_node: int
    between: Level = field(repr=False)
    within: Level = field(repr=False)

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        return self.rank % self.ranks_per_node

    def gather_levels(self, secondary_ranks: int | None = None) -> tuple[tuple[Level, ...], tuple[Level, ...]]:
        """Return the hops of an all-gather: (before the secondary shard, after it). Collective on first use.

        Ranks with the same local index exchange across nodes first. With a secondary shard over `secondary_ranks` ranks
        (a divisor of ranks_per_node), ranks with the same index in their sub-group exchange next; after that a rank
        holds its secondary shard, 1/secondary_ranks of the model. The last hop is within the sub-group.
        """
        if secondary_ranks is None or secondary_ranks == self.ranks_per_node:
            return (self.between,), (self.within,)
        k, per_node = secondary_ranks, self.ranks_per_node
        node_starts = range(0, self.world_size, per_node)
        across = [[start + j + m * k for m in range(per_node // k)] for start in node_starts for j in range(k)]
        inside = [[start + m * k + j for j in range(k)] for start in node_starts for m in range(per_node // k)]
        return (
            (self.between, Level(_make_groups(self.group, across), per_node // k, INTRA)),
            (Level(_make_groups(self.group, inside), k, INTRA),),
        )


def make_topology(group: Any = None, ranks_per_node: int = 1) -> Topology:
    """Build the topology of `group` (None: the world) and its process groups. Collective over the group.

    Raises:
        ValueError: the group's size is not a multiple of ranks_per_node.
    """
    group = dist.group.WORLD if group is None else group
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if ranks_per_node < 1 or size % ranks_per_node:
        raise ValueError(f"{size} ranks cannot be cut into nodes of {ranks_per_node}")
    nodes = size // ranks_per_node
    within = [[n * ranks_per_node + i for i in range(ranks_per_node)] for n in range(nodes)]
    between = [[n * ranks_per_node + i for n in range(nodes)] for i in range(ranks_per_node)]
    return Topology(
        group=group,
        rank=rank,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        between=Level(_make_groups(group, between), nodes, INTER),
        within=Level(_make_groups(group, within), ranks_per_node, INTRA),
    )
