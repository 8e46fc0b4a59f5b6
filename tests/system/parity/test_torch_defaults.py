"""Where a script has set torch's default dtype or device: what must be fp32, or on the CPU, says so."""

import pytest
import surrounding_jobs
import torch_default_jobs as jobs
from ranks import run_ranks, run_two
from recipes import WAYS

HOPS_IN_NODES = ["zeropp", "fp8-lm-zeropp", "fp8-lm, node's copy"]


@pytest.mark.parametrize("run, ways", [(run_two, [None, *WAYS]), (run_ranks, HOPS_IN_NODES)])
def test_they_change_nothing(run, ways):
    settings = {"trained": jobs.trained, "kinds": tuple(jobs.DEFAULTS)}
    for found in run(surrounding_jobs.differences, ways=ways, **settings):
        assert len(found) == 2 * len(ways)
        assert not any(found.values()), found
