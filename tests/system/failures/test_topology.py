"""The topology of a group is where its ranks are; what is none ends on every rank."""

import pytest
import topology_jobs as jobs
from ranks import run_ranks


@pytest.mark.parametrize("configured", ["detect", 2])
def test_data_parallel_groups_that_cross_nodes(configured):
    """Tensor parallelism of 2 on two nodes of two: {0, 2} and {1, 3} have one rank on each, and all bytes cross."""
    for topology, secondary, links, text in run_ranks(jobs.nodes_of_tensor_parallel_groups, configured=configured):
        assert topology == (2, 1) and secondary == 1
        assert links["inter"] > 0 and links["intra"] == 0
        assert "2 node(s) x 1 rank(s)" in text or "zeropp_fp8: recipe" not in text


def test_data_parallel_groups_inside_a_node():
    for topology, secondary, links, _ in run_ranks(
        jobs.nodes_of_tensor_parallel_groups, ranks_per_node=4, configured="detect"
    ):
        assert topology == (1, 2) and secondary is None and links["inter"] == 0 and links["intra"] > 0


def test_a_launcher_that_counts_wrongly():
    """Accelerate on a CPU writes LOCAL_WORLD_SIZE=1, whatever the launcher has said."""
    variables = {"LOCAL_WORLD_SIZE": "1", "LOCAL_SIZE": "2"}
    (found, text), (other, _) = run_ranks(jobs.found_with, world=2, ranks_per_node=2, variables=variables)
    assert found == other == (1, 2)
    assert "1 node(s) x 2 rank(s), from the hosts of the ranks (LOCAL_WORLD_SIZE says 1: the hosts win)" in text


@pytest.mark.parametrize(
    "hosts, parts",
    [
        ("aabc", ("2 on a, 1 on b, 1 on c", "or set it to 1")),
        ("abab", ("not numbered node by node", "a, b, a, b", "or set it to 1")),
    ],
)
def test_ranks_that_form_no_nodes(hosts, parts):
    """Every rank raises, none waits, and the remedy helps."""
    for message, nodes in run_ranks(jobs.refusal_on, timeout=120, hosts=hosts):
        assert all(part in message for part in parts), message
        assert nodes == 4


def test_one_group_of_two_that_forms_no_nodes():
    """{0, 2, 4} are on a, b and b, {1, 3, 5} on a, b and c: the error reaches the ranks of both."""
    for message in run_ranks(jobs.refusal_of_tensor_parallel_groups_on, world=6, timeout=120, hosts="aabbbc"):
        assert "1 on a, 2 on b" in message


def test_ranks_that_are_configured_differently():
    for message in run_ranks(jobs.refusal_of_configurations, timeout=120):
        assert "is 1 on rank 0 and 2 on rank 1; give all ranks the same ds_config" in message


def test_groups_have_the_time_limit_of_the_world():
    """Torch gives new groups, of which DeepSpeed's data-parallel one is the first, 30 minutes."""
    for limits in run_ranks(jobs.time_limits, seconds=77):
        assert set(limits) == {77} and len(limits) >= 5
