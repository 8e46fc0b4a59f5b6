"""Where a script has set torch's default dtype or device: what must be fp32, or on the CPU, says so."""

import surrounding_jobs
import torch_default_jobs as jobs
from ranks import run_ranks
from recipes import WAYS


def test_they_change_nothing():
    settings = {"trained": jobs.trained, "kinds": tuple(jobs.DEFAULTS)}
    for found in run_ranks(surrounding_jobs.differences, ways=[None, *WAYS], **settings):
        assert len(found) == 2 * (1 + len(WAYS))
        for case, (losses, others, changed) in found.items():
            assert others == losses and not changed, (case, losses, others, changed[:5])
