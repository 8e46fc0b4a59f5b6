"""What a run's shares of a step's time say of what bounds it."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropp_fp8.zero.bound import StepShares, busy_seconds, explained

TICKS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)))


@given(TICKS)
def test_busy_seconds_are_a_union(starts_and_lengths):
    covered = {tick for start, length in starts_and_lengths for tick in range(start, start + length)}
    assert busy_seconds((start, start + length) for start, length in starts_and_lengths) == len(covered)


def said(nodes=2, per_node=4, **shares):
    one = {"seconds": 0.2, "between": 0.1, "within": 0.1, "behind": 0.3, "messages": 100, "message_bytes": 4e6}
    topology = SimpleNamespace(nodes=nodes, ranks_per_node=per_node, world_size=nodes * per_node)
    return explained(StepShares(**{**one, **shares}), SimpleNamespace(topology=topology))


@pytest.mark.parametrize(
    "shares, reason",
    [
        ({}, "computing: all links"),
        ({"behind": None}, "computing, on the CPU"),
        ({"behind": 0.01}, "Python: the GPU has waited for it (1.0 % of a step"),
        ({"within": 0.7, "behind": 0.01}, "links within nodes, busy 70 %"),
        ({"between": 0.9, "message_bytes": 2e4}, "latency: 100 messages a step of 20 kB"),
        ({"nodes": 1, "per_node": 8, "between": 0.0}, "there is one node (without them at most 1.00 x as fast)"),
        ({"nodes": 1, "per_node": 1, "between": 0.0, "within": 0.0}, "one rank: nothing is sent"),
    ],
)
def test_the_reason(shares, reason):
    assert reason in said(**shares)


def test_gain_is_what_a_step_without_the_link_would_be():
    assert "links between nodes are busy 20 % (without them at most 1.25 x as fast)" in said(between=0.2)


def test_nothing_is_said_where_links_between_nodes_are_what_bounds():
    assert said(between=0.5) is None and said(between=0.9, behind=0.01) is None
