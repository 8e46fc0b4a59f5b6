"""Bytes that one pass over the model puts on the links, for each way of moving it.

N nodes of L ranks, W = N L. A ring all-gather (or reduce-scatter) of b bytes sends (W-1)/W b from each rank to the next
(Patarasuk and Yuan, JPDC 69(2), 2009); one of the links that leave a node carries that much, so it is also what a node
sends, whatever L is. In two levels a node sends (N-1)/N b and each rank (L-1)/L b within its node.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeropp_fp8.plan.job import Cluster


@dataclass(frozen=True)
class Traffic:
    """One pass over the whole model.

    Attributes:
        inter: bytes a node sends to other nodes.
        intra: bytes a GPU sends within its node.
        net_hops, node_hops: hops of one collective that follow each other, between and within nodes (latency).
        at_once: both links work at the same time, as in one ring, or because the hops of consecutive blocks overlap;
            else one level follows the other.
    """

    inter: float = 0.0
    intra: float = 0.0
    net_hops: int = 0
    node_hops: int = 0
    at_once: bool = False

    def __add__(self, other: Traffic) -> Traffic:
        """The traffic of parts that are sent in messages of their own: the hops of both follow each other."""
        return Traffic(
            self.inter + other.inter,
            self.intra + other.intra,
            self.net_hops + other.net_hops,
            self.node_hops + other.node_hops,
            self.at_once or other.at_once,
        )


def flat_ring(num_bytes: float, cluster: Cluster) -> Traffic:
    """One ring over all ranks: all-gather or reduce-scatter of `num_bytes`."""
    nodes, world = cluster.nodes, cluster.world_size
    per_rank = num_bytes * (world - 1) / world
    return Traffic(
        inter=per_rank if nodes > 1 else 0.0,
        intra=per_rank if cluster.ranks_per_node > 1 else 0.0,
        net_hops=nodes - 1,
        node_hops=world - nodes,
        at_once=True,
    )


def exchange(num_bytes: float, cluster: Cluster) -> Traffic:
    """One all-to-all over all ranks, whatever nodes they are on: each sends each of the others its slice."""
    per_node, message = cluster.ranks_per_node, num_bytes / cluster.world_size
    others = cluster.world_size - per_node
    return Traffic(per_node * others * message, (per_node - 1) * message, others, per_node - 1, at_once=True)


def two_levels(inter_bytes: float, intra_bytes: float, cluster: Cluster, at_once: bool = False) -> Traffic:
    """Ranks with one local index between nodes, and the ranks of a node among themselves.

    The arguments are the size of the whole model as it is sent on each level. All-to-all counts like all-gather: W
    shards, of which a rank keeps its own; its messages are counted one after the other, an upper bound for latency.
    """
    nodes, per_node = cluster.nodes, cluster.ranks_per_node
    return Traffic(
        inter=inter_bytes * (nodes - 1) / nodes,
        intra=intra_bytes * (per_node - 1) / per_node,
        net_hops=nodes - 1,
        node_hops=per_node - 1,
        at_once=at_once,
    )


def within_node(num_bytes: float, cluster: Cluster) -> Traffic:
    """Every node holds the whole model; its ranks gather (or reduce-scatter) it among themselves."""
    per_node = cluster.ranks_per_node
    return Traffic(intra=num_bytes * (per_node - 1) / per_node, node_hops=per_node - 1)


def hybrid_reduction(num_bytes: float, cluster: Cluster) -> Traffic:
    """HSDP: reduce-scatter within the node, then a ring all-reduce of each shard between nodes: 2 (N-1)/N."""
    nodes = cluster.nodes
    node = within_node(num_bytes, cluster)
    return Traffic(
        inter=2 * num_bytes * (nodes - 1) / nodes,
        intra=node.intra,
        net_hops=2 * (nodes - 1),
        node_hops=node.node_hops,
    )
