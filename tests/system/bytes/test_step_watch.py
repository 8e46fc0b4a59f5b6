"""The watch of a run's steps: measured in steps 4 to 7, said once by rank 0, by a clock that links advance."""

import observed_jobs as jobs
import pytest
from ranks import run_ranks

CASES = {
    "links between nodes": ("inter", 1.0, {}),
    "links within nodes": ("intra", 1.0, {}),
    "computing": ("inter", 1e4, {}),
    "nothing sent for long": ("none", 1.0, {}),
    "nothing quantized": ("inter", 1.0, {"recipe": "lossless"}),
    "nothing quantized, by modules": ("none", 1.0, {"recipe": "lossless", "gather_granularity": "module"}),
    "weights only": ("inter", 1.0, {"recipe": "lossless", "weights": {"format": "int8"}}),
    "off": ("none", 1.0, {"report": {"every": 0, "diagnose": False}}),
}


@pytest.fixture(scope="module")
def found():
    return run_ranks(jobs.watched, cases=CASES)


def test_shares_are_those_of_the_clock(found):
    for of_rank in found:
        shares = of_rank["links between nodes"][0]
        messages = shares.seconds - 1.0  # a second each, and a second of computing
        assert messages > 0 and messages == pytest.approx(round(messages))
        assert shares.between == pytest.approx(messages / shares.seconds) and shares.within == 0
        assert shares.behind is None  # on a CPU nothing runs beside the host
        assert of_rank["links within nodes"][0].between == 0 < 0.5 < of_rank["links within nodes"][0].within
        assert of_rank["computing"][0].between == pytest.approx(messages / (messages + 1e4))


@pytest.mark.parametrize(
    "case, says",
    [
        ("links between nodes", "latency: "),  # of messages this small
        ("links within nodes", "links within nodes, busy"),
        (
            "computing",
            "computing, on the CPU: no kind of link is busy for half of a step. A smaller batch per rank changes that",
        ),
        ("nothing sent for long", "computing, on the CPU"),
    ],
)
def test_rank_0_says_once_why(case, says, found):
    (text,) = found[0][case][1]
    assert says in text and "in steps 4 to 7" in text
    assert not any(of_rank[case][1] for of_rank in found[1:])


@pytest.mark.parametrize(
    "case, says",
    [
        ("nothing quantized", '"weights.format" and "gradients.inter_format" are "none", so 16 or 32 bits'),
        (
            "nothing quantized, by modules",
            "computing, on the CPU: no kind of link is busy for half of a step. A smaller batch per rank changes that",
        ),
        ("weights only", '"gradients.inter_format" is "none", so 16 or 32 bits'),
    ],
)
def test_what_is_not_quantized_is_named(case, says, found):
    (text,) = found[0][case][1]
    assert says in text and not any(of_rank[case][1] for of_rank in found[1:])


def test_what_deepspeed_reduces_counts_as_between_nodes(found):
    """Each bucket is a second there, as each message is."""
    for of_rank in found:
        shares, _, _, reduced = of_rank["nothing quantized"]
        assert reduced > 0 and shares.between == pytest.approx((shares.seconds - 1.0) / shares.seconds)
        assert shares.messages == pytest.approx(round(shares.messages)) and shares.messages >= reduced


def test_ranks_agree_and_measure_in_the_same_steps(found):
    for case in CASES:
        assert len({of_rank[case][0] for of_rank in found}) == 1
        measuring = [False] * 2 + [True] * 4 + [False] * 3
        assert all(of_rank[case][2] == ([False] * 9 if case == "off" else measuring) for of_rank in found)


def test_off(found):
    assert all(of_rank["off"][:2] == (None, []) for of_rank in found)
