"""Shares of a step's time, and the bound of a run that they tell."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropp_fp8.config import PluginConfig
from zeropp_fp8.zero.bound import StepShares, busy_seconds, explained

TICKS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)))


@given(TICKS)
def test_busy_seconds_are_a_union(starts_and_lengths):
    covered = {tick for start, length in starts_and_lengths for tick in range(start, start + length)}
    assert busy_seconds((start, start + length) for start, length in starts_and_lengths) == len(covered)


def said(nodes=2, per_node=4, full=(), differs=False, section=None, **shares):
    """Return what a run is told; `full`: formats of the session that are none; `differs`: as in SentFormats."""
    one = {"seconds": 0.2, "between": 0.1, "within": 0.1, "behind": 0.3, "messages": 100, "message_bytes": 4e6}
    topology = SimpleNamespace(nodes=nodes, ranks_per_node=per_node, world_size=nodes * per_node)
    named = {name: None if name in full else "a format" for name in ("weights", "within", "between")}
    formats = SimpleNamespace(**named, differs=differs)
    config = PluginConfig(**(section or {}))
    return explained(
        StepShares(**{**one, **shares}), SimpleNamespace(topology=topology, config=config, formats=formats)
    )


@pytest.mark.parametrize(
    "shares, reason",
    [
        ({}, "computing: no kind of link is busy for half of a step. FP8 products, or"),
        (
            {"behind": None},
            "computing, on the CPU: no kind of link is busy for half of a step. A smaller batch per rank changes",
        ),
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


@pytest.mark.parametrize(
    "case, much",
    [({"between": 0.42}, "little"), ({"between": 0.02}, "no"), ({"between": 0.9, "message_bytes": 2e4}, "no")],
)
def test_it_does_not_deny_what_could_be_won(case, much):
    assert said(**case).startswith(f"zeropp_fp8: {much} speed-up to expect from fewer bytes between nodes: ")


def test_nothing_is_said_where_links_between_nodes_are_what_bounds():
    assert said(between=0.5) is None and said(between=0.9, behind=0.01) is None


GRADIENTS, BOTH = ("between",), ("weights", "within", "between")


@pytest.mark.parametrize(
    "case, says",
    [
        (
            {"between": 0.8, "full": GRADIENTS},
            "no speed-up yet: bytes between nodes are not few: "
            "in steps 4 to 7 of 200.0 ms links between nodes are busy "
            '80 % (without them at most 5.00 x as fast). What bounds them: these links. "gradients.inter_format" is '
            '"none", so 16 or 32 bits per number are sent: set it, or recipe "zeropp".',
        ),
        ({"between": 0.8, "full": BOTH}, '"weights.format" and "gradients.inter_format" are "none"'),
        # Links within nodes have the other hop's format.
        ({"within": 0.8, "full": ("within",)}, '"gradients.intra_format" is "none", so'),
        ({"nodes": 1, "per_node": 8, "between": 0.0, "within": 0.8, "full": BOTH}, 'or recipe "zeropp-pcie"'),
        ({"full": BOTH}, 'FP8 products, or a smaller batch per GPU, change that. Besides, "weights.format" and'),
        (
            {"between": 0.9, "message_bytes": 2e4, "full": GRADIENTS},
            "so 16 or 32 bits per number are sent, as in stock",
        ),
    ],
)
def test_what_is_not_quantized_is_named_with_its_key(case, says):
    assert says in said(**case)


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"full": ("within",)},  # not what crosses between nodes
        {"full": ("weights",), "section": {"frozen": {"format": "int4"}}},  # its codes travel
        {"full": ("weights",), "differs": True},  # what has changed in them does
        {"nodes": 1, "per_node": 1, "between": 0.0, "within": 0.0, "full": BOTH},  # nothing does
    ],
)
def test_what_needs_no_format_is_not_named(case):
    assert "16 or 32 bits" not in said(**case)


def test_formats_are_no_remedy_where_bytes_are_not_what_bounds():
    for shares in ({}, {"behind": 0.01}, {"between": 0.9, "message_bytes": 2e4}, {"within": 0.9, "message_bytes": 2e4}):
        assert "recipe" not in said(full=BOTH, **shares) and ": set " not in said(full=BOTH, **shares)


def test_remedies_that_are_taken_already_are_not_named():
    blocks, modules = {"compile": "blocks"}, {"gather_granularity": "module"}
    python, latency = {"behind": 0.01}, {"between": 0.9, "message_bytes": 2e4}
    for shares in (python, latency):
        assert '"gather_granularity": "block"' in said(section=modules, **shares)
        assert "gather_granularity" not in said(**shares)
    assert '"compile": "blocks"' in said(**python) and '"compile"' not in said(section=blocks, **python)
    assert "low precision already" in said(section={"compute": {"format": "fp8"}})


def test_small_messages_within_nodes_are_latency():
    assert "links within nodes, busy 70 %: latency, 100 messages a step of 20 kB" in said(
        within=0.7, message_bytes=2e4, full=BOTH
    )
