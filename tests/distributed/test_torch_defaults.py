"""Where a script has set torch's default dtype or device: what must be fp32, or on the CPU, says so."""

import torch_default_jobs as jobs
from ranks import run_ranks
from recipes import WAYS


def test_they_change_nothing():
    for found in run_ranks(jobs.differences, ways=[None, *WAYS]):
        assert len(found) == 2 * (1 + len(WAYS))
        for case, (losses, others, changed) in found.items():
            assert others == losses and not changed, (case, losses, others, changed[:5])
