"""Which ranks share a node, how many of a group's that are, and which of them share a secondary copy."""

import socket

import pytest
from config_cases import resolved

from zeropp_fp8.config import (
    SECTION,
    ConfigError,
    Place,
    check_topology,
    find_ranks_per_node,
    place_of,
    secondary_ranks,
)


def places(hosts, ranks=None, configured="detect", counted=None):
    """Of ranks on hosts of these names."""
    ranks = ranks or range(len(hosts))
    return [Place(rank, host, configured, counted or {}) for rank, host in zip(ranks, hosts)]


def refused(*args):
    with pytest.raises(ConfigError) as error:
        find_ranks_per_node(*args)
    message = str(error.value)
    assert message.startswith('"zeropp_fp8.topology.ranks_per_node"')
    return message


@pytest.mark.parametrize(("hosts", "ranks_per_node"), [("aabb", 2), ("abcd", 1), ("bbbaaa", 3), ("a", 1), ("aaaa", 4)])
def test_ranks_of_one_host_are_a_node(hosts, ranks_per_node):
    assert find_ranks_per_node(places(hosts), len(hosts)) == (ranks_per_node, "the hosts of the ranks")


def test_of_a_group_only_its_own_ranks_count():
    """Tensor parallelism of 2 on two nodes of two ranks, and on two nodes of four."""
    for ranks in ((0, 2), (1, 3)):
        assert find_ranks_per_node(places("ab", ranks), 4)[0] == 1
        assert find_ranks_per_node(places("ab", ranks, configured=2), 4)[0] == 1
    assert find_ranks_per_node(places("aabb", (0, 2, 4, 6)), 8)[0] == 2
    assert find_ranks_per_node(places("aabb", (0, 2, 4, 6), configured=4), 8)[0] == 2


def test_a_number_is_the_users_word_against_the_hosts():
    number, source = find_ranks_per_node(places("aaaa", configured=2), 4)
    assert number == 2 and source == "zeropp_fp8.topology.ranks_per_node (the hosts: 4 on a)"
    number, source = find_ranks_per_node(places("aabb", configured=4), 4)
    assert number == 4 and source == "zeropp_fp8.topology.ranks_per_node (the hosts: 2 on a, 2 on b)"
    assert find_ranks_per_node(places("abab", configured=2), 4)[1].endswith("(the hosts: 2 on a, 2 on b)")
    assert find_ranks_per_node(places("aabb", configured=2), 4) == (2, "zeropp_fp8.topology.ranks_per_node")


@pytest.mark.parametrize(
    ("hosts", "ranks", "counted", "remark"),
    [
        ("aa", None, {"LOCAL_WORLD_SIZE": 1, "LOCAL_SIZE": 2}, " (LOCAL_WORLD_SIZE says 1: the hosts win)"),
        ("aabb", None, {"LOCAL_WORLD_SIZE": 4}, " (LOCAL_WORLD_SIZE says 4: the hosts win)"),
        ("aabb", None, {"LOCAL_WORLD_SIZE": 2}, ""),
        # Of a part of the job: a node may have more ranks, not fewer.
        ("ab", (0, 2), {"LOCAL_WORLD_SIZE": 2}, ""),
        ("aa", (0, 2), {"LOCAL_WORLD_SIZE": 1}, " (LOCAL_WORLD_SIZE says 1: the hosts win)"),
        (
            "ab",
            (0, 2),
            {"LOCAL_WORLD_SIZE": 2, "LOCAL_SIZE": 4},
            " (LOCAL_WORLD_SIZE says 2, LOCAL_SIZE says 4: the hosts win)",
        ),
    ],
)
def test_launchers_that_contradict_the_hosts_or_each_other_are_reported(hosts, ranks, counted, remark):
    found = find_ranks_per_node(places(hosts, ranks, counted=counted), 4 if ranks else len(hosts))
    assert found == (len(hosts) // len(set(hosts)), f"the hosts of the ranks{remark}")


def test_hosts_with_unequal_numbers_of_ranks():
    message = refused(places("aabc"), 4)
    assert "2 on a, 1 on b, 1 on c" in message and "start as many on each, or set it to 1" in message
    assert find_ranks_per_node(places("aabc", configured=1), 4)[0] == 1


def test_ranks_that_are_not_numbered_node_by_node():
    message = refused(places("abab"), 4)
    assert "ranks 0, 1, 2, 3 of the data-parallel group" in message and "lie on a, b, a, b" in message
    assert "--map-by slot" in message and "or set it to 1" in message
    assert find_ranks_per_node(places("abab", configured=1), 4)[0] == 1


def test_ranks_that_are_configured_differently():
    assert "is detect on rank 0 and 2 on rank 1;" in refused(places("a") + places("a", [1], configured=2), 2)


def test_more_ranks_a_node_than_ranks():
    message = refused(places("aaaa", configured=8), 4)
    assert message.endswith('8 is more than the 4 ranks of the job; use 1 or 2 or 4 or "detect"')


@pytest.mark.parametrize(("world", "ranks_per_node", "nodes"), [(4, 3, "3 + 1"), (6, 4, "4 + 2"), (5, 2, "2 + 2 + 1")])
def test_a_number_that_leaves_unequal_nodes(world, ranks_per_node, nodes):
    message = refused(places("a" * world, configured=ranks_per_node), world)
    assert f"leaves {nodes} of the {world} ranks" in message
    assert f"set ranks_per_node to a divisor of {world}" in message


# -- what a rank says of itself ----------------------------------------------------------------------------------------


def test_a_host_is_what_nccl_takes_for_one():
    here = place_of(3, resolved({}), {})
    assert here.rank == 3 and here.host.startswith(socket.gethostname()) and here == place_of(3, resolved({}), {})
    assert here.node == here.host
    assert place_of(3, resolved({}), {"NCCL_HOSTID": "x"}).host == "x"
    assert place_of(5, resolved({"topology": {"ranks_per_node": 2}}), {}).node == 2


@pytest.mark.parametrize("unusable", ["", "0", "two", "-1", "2(x3)"])
def test_unusable_variables_are_passed_over(unusable):
    env = {"LOCAL_WORLD_SIZE": unusable, "LOCAL_SIZE": "2", "MPI_LOCALNRANKS": "4"}
    assert place_of(0, resolved({}), env).counted == {"LOCAL_SIZE": 2, "MPI_LOCALNRANKS": 4}


# -- secondary copies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [{"zero_hpz_partition_size": 3}, None])
@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_secondary_scope_that_does_not_divide_a_node(zero, ranks_per_node):
    config = resolved(None if zero else {"secondary": {"scope": 3}}, zero)
    with pytest.raises(ConfigError) as error:
        check_topology(config, ranks_per_node)
    message = str(error.value)
    assert "zero_optimization.zero_hpz_partition_size" in message and f"{SECTION}.secondary.scope" in message
    assert f"use a divisor of {ranks_per_node}" in message


@pytest.mark.parametrize(
    ("scope", "ranks"), [("none", None), ("node", 4), ("rank", 1), (1, 1), (2, 2), (4, 4)], ids=str
)
def test_secondary_ranks(scope, ranks):
    config = resolved({"secondary": {"scope": scope}})
    check_topology(config, 4)
    assert secondary_ranks(config, 4) == ranks
