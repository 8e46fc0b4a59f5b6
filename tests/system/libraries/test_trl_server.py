"""TRL's GRPO with vLLM in its server mode on 4 ranks, unmodified: the server has every bit; no failure hangs a rank."""

import pytest
import trl_server_jobs as jobs
from ranks import run_ranks

pytest.importorskip("trl", reason="TRL is not installed (extra `rlhf`)")


def test_a_server_that_generates(tmp_path):
    """It has the trainer's weights whenever it generates; a failure is raised on all ranks; the next sync is well."""
    found = run_ranks(jobs.train_with_a_server, world=4, ranks_per_node=2, folder=str(tmp_path), recipe="zeropp")
    failed = "RuntimeError: TRL's sync_weights failed on rank 0: ConnectionError: "
    for rank, (same, norms, syncs) in enumerate(found):
        assert all(well for _, well in same) and len(same) == 3 == len(set(norms))
        assert rank or [number for number, _ in same] == [1, 2, 3]
        assert syncs["refuses"] == (f"{failed}connection refused", "nothing raised", True)
        assert syncs["breaks"] == (f"{failed}the communicator is gone", "nothing raised", True)
        assert syncs["early"] == f"{failed}no memory to wake up in"
        assert syncs["sleeps"] == ("nothing raised", "nothing raised", True)
