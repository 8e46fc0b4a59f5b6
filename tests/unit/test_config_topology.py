"""How many ranks a node has, and which of them share a secondary copy."""

import pytest
from config_cases import resolved

from zeropp_fp8.config import SECTION, ConfigError, check_topology, find_ranks_per_node, secondary_ranks

VARIABLES = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)


def test_ranks_per_node_from_the_section_wins():
    config = resolved({"topology": {"ranks_per_node": 2}})
    assert find_ranks_per_node(config, 8, dict.fromkeys(VARIABLES, "4")) == (2, "zeropp_fp8.topology.ranks_per_node")


@pytest.mark.parametrize("first", range(len(VARIABLES)))
def test_ranks_per_node_from_the_environment_in_order(first):
    env = {name: str(index + 1) for index, name in enumerate(VARIABLES) if index >= first}
    assert find_ranks_per_node(resolved({}), 8, env) == (first + 1, VARIABLES[first])


@pytest.mark.parametrize("unusable", ["", "0", "two", "-1", "2(x3)"])
def test_unusable_variables_are_passed_over(unusable):
    env = {"LOCAL_WORLD_SIZE": unusable, "LOCAL_SIZE": "2"}
    assert find_ranks_per_node(resolved({}), 8, env) == (2, "LOCAL_SIZE")


def test_one_rank_needs_no_variable():
    assert find_ranks_per_node(resolved({}), 1, {}) == (1, "one rank")


def test_nothing_says_the_ranks_of_a_node():
    with pytest.raises(ConfigError) as error:
        find_ranks_per_node(resolved({}), 4, {})
    message = str(error.value)
    assert '"zeropp_fp8.topology.ranks_per_node"' in message and "give the number of ranks on each node" in message
    assert all(name in message for name in VARIABLES)


def test_more_ranks_a_node_than_ranks():
    config = resolved({"topology": {"ranks_per_node": 8}})
    with pytest.raises(ConfigError, match=r'"zeropp_fp8\.topology\.ranks_per_node": 8 is more than .* 4 ranks'):
        find_ranks_per_node(config, 4, {})
    # The launcher counts all ranks of a node, the data-parallel group may be smaller.
    number, source = find_ranks_per_node(resolved({}), 4, {"LOCAL_WORLD_SIZE": "8"})
    assert number == 4 and "LOCAL_WORLD_SIZE" in source


@pytest.mark.parametrize(("world", "ranks_per_node"), [(4, 3), (6, 4), (1, 2), (7, 2)])
def test_world_that_is_no_multiple_of_a_node(world, ranks_per_node):
    with pytest.raises(ConfigError) as error:
        check_topology(resolved({}), world, ranks_per_node)
    message = str(error.value)
    assert '"zeropp_fp8.topology.ranks_per_node"' in message
    assert f"{world} ranks" in message and f"set ranks_per_node to a divisor of {world}" in message


@pytest.mark.parametrize("zero", [{"zero_hpz_partition_size": 3}, None])
@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_secondary_scope_that_does_not_divide_a_node(zero, ranks_per_node):
    config = resolved(None if zero else {"secondary": {"scope": 3}}, zero)
    with pytest.raises(ConfigError) as error:
        check_topology(config, 8, ranks_per_node)
    message = str(error.value)
    assert "zero_optimization.zero_hpz_partition_size" in message and f"{SECTION}.secondary.scope" in message
    assert f"use a divisor of {ranks_per_node}" in message


@pytest.mark.parametrize(
    ("scope", "ranks"), [("none", None), ("node", 4), ("rank", 1), (1, 1), (2, 2), (4, 4)], ids=str
)
def test_secondary_ranks(scope, ranks):
    config = resolved({"secondary": {"scope": scope}})
    check_topology(config, 8, 4)
    assert secondary_ranks(config, 4) == ranks
