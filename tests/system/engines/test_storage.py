"""The gatherer knows units by what they answer: a storage that it has never seen trains like the others."""

import pytest
import storage_jobs as jobs
from ranks import run_ranks
from running import differing

CASES = [(2, False, "block"), (2, True, "block"), (4, False, "module"), (1, True, "parameter")]


@pytest.fixture(scope="module")
def trained():
    return run_ranks(jobs.trained_each, cases=CASES)[0]


@pytest.mark.parametrize("case", CASES)
def test_a_storage_of_ones_own_trains_bit_for_bit(trained, case):
    (own, called), (plain, none) = trained[case]
    assert differing(own, plain, but=["bytes"]) == {}
    assert {"lay_out", "first_hops", "changed"} <= called and none == set()
    if case[0] > 1:
        assert "last_hop" in called
    # Payloads of slices end at a multiple of 16 bytes.
    for kind in ("weights_forward", "weights_backward"):
        for link, sent in plain.bytes.get(kind, {}).items():
            assert own.bytes[kind][link] == pytest.approx(sent, rel=0.05), (kind, link)
