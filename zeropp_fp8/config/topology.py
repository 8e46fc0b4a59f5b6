"""Rules that need to know the ranks, and how many of them a node has."""

from __future__ import annotations

import os
from collections.abc import Mapping

from zeropp_fp8.config.sections import SECTION, ConfigError, PluginConfig


def check_topology(config: PluginConfig, world_size: int, ranks_per_node: int) -> None:
    """Rules that need to know the ranks.

    Raises:
        ConfigError: the ranks cannot be cut into equal nodes, or the secondary scope does not divide a node.
    """
    if world_size % ranks_per_node:
        raise ConfigError(
            f'"{SECTION}.topology.ranks_per_node": the data-parallel world of {world_size} ranks is not a multiple of '
            f"{ranks_per_node} ranks a node; set ranks_per_node to a divisor of {world_size}"
        )
    scope = config.secondary.scope
    if isinstance(scope, int) and ranks_per_node % scope:
        raise ConfigError(
            f'"zero_optimization.zero_hpz_partition_size" / "{SECTION}.secondary.scope": {scope} does not divide the '
            f'{ranks_per_node} ranks of a node; use a divisor of {ranks_per_node}, or "node"'
        )


def secondary_ranks(config: PluginConfig, ranks_per_node: int) -> int | None:
    """How many ranks share one secondary copy; None without one."""
    scope = config.secondary.scope
    return {"none": None, "node": ranks_per_node, "rank": 1}.get(scope, scope)


_LAUNCHER_VARIABLES = (
    "LOCAL_WORLD_SIZE",  # torchrun, accelerate
    "LOCAL_SIZE",  # deepspeed
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)


def find_ranks_per_node(config: PluginConfig, world_size: int, env: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """(ranks per node, where the number comes from).

    Raises:
        ConfigError: nothing says it and the world has more than one rank, or the number is out of range.
    """
    configured = config.topology.ranks_per_node
    if configured != "detect":
        source, value = f"{SECTION}.topology.ranks_per_node", configured
    else:
        found = [
            (name, env[name]) for name in _LAUNCHER_VARIABLES if env.get(name, "").isdigit() and int(env[name]) > 0
        ]
        if found:
            source, value = found[0][0], int(found[0][1])
        elif world_size == 1:
            source, value = "one rank", 1
        else:
            raise ConfigError(
                f'"{SECTION}.topology.ranks_per_node" is "detect", but none of {", ".join(_LAUNCHER_VARIABLES)} is '
                "set; give the number of ranks on each node"
            )
    if value > world_size:
        if configured == "detect":
            return world_size, f"{source} (more than the {world_size} ranks there are)"
        raise ConfigError(
            f'"{SECTION}.topology.ranks_per_node": {value} is more than the data-parallel world of {world_size} ranks'
        )
    return value, source
