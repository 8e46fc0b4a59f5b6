"""The gatherer knows units by what they answer: a storage that it has never seen trains like the others."""

import pytest
import storage_jobs as jobs
import torch
from ranks import run_ranks


@pytest.mark.parametrize(
    ("node_size", "secondary", "granularity"),
    [(2, False, "block"), (2, True, "block"), (4, False, "module"), (1, True, "parameter")],
)
def test_a_storage_of_ones_own_trains_bit_for_bit(node_size, secondary, granularity):
    options = {"node_size": node_size, "secondary": secondary, "granularity": granularity}
    own, plain = (run_ranks(jobs.trained, **options, own=own)[0] for own in (True, False))
    assert own[0] == plain[0]
    assert all(torch.equal(own[1][name], weight) for name, weight in plain[1].items())
    assert {"lay_out", "first_hops", "changed"} <= own[3] and plain[3] == set()
    if node_size > 1:
        assert "last_hop" in own[3]
    # Payloads of slices end at a multiple of 16 bytes.
    for kind in ("weights_forward", "weights_backward"):
        for link, sent in plain[2].get(kind, {}).items():
            assert own[2][kind][link] == pytest.approx(sent, rel=0.05), (kind, link)
