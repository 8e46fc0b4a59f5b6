"""torch.set_default_dtype(torch.bfloat16) in a script changes nothing: what must be fp32 says so."""

import default_dtype_jobs as jobs
from ranks import run_ranks
from recipes import WAYS


def test_it_changes_nothing():
    """Two steps of two micro-batches."""
    for found in run_ranks(jobs.differences, ways=[None, *WAYS], accumulation=2):
        for way, (losses, others, changed) in found.items():
            assert others == losses and not changed, (way, losses, others, changed[:5])


def test_a_default_device_changes_nothing():
    """As torch.set_default_device("cuda"); "meta" has no numbers, so that nothing of it can go unseen."""
    for found in run_ranks(jobs.losses_with_default_device, ways=[None, *WAYS], devices=["cpu", "meta"]):
        for way, (plain, beside) in found.items():
            assert beside == plain, way
