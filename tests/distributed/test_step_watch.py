"""What bounds a run's steps: measured in steps 4 to 7, said once by rank 0, by a clock that links advance."""

import observed_jobs as jobs
import pytest
from ranks import run_ranks

CASES = {
    "links between nodes": ("inter", 1.0, {}),
    "links within nodes": ("intra", 1.0, {}),
    "computing": ("inter", 1e4, {}),
    "nothing sent for long": ("none", 1.0, {}),
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
        ("computing", "computing, on the CPU: all links are idle most of the time"),
        ("nothing sent for long", "computing, on the CPU"),
    ],
)
def test_rank_0_says_once_why(case, says, found):
    (text,) = found[0][case][1]
    assert says in text and "in steps 4 to 7" in text
    assert not any(of_rank[case][1] for of_rank in found[1:])


def test_ranks_agree_and_measure_in_the_same_steps(found):
    for case in CASES:
        assert len({of_rank[case][0] for of_rank in found}) == 1
        measuring = [False] * 2 + [True] * 4 + [False] * 3
        assert all(of_rank[case][2] == ([False] * 9 if case == "off" else measuring) for of_rank in found)


def test_off(found):
    assert all(of_rank["off"][:2] == (None, []) for of_rank in found)
