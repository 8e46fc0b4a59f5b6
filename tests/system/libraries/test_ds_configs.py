"""Each file of ds_configs trains as it is."""

import ds_configs_jobs as jobs
import pytest
from ranks import run_two

from tests.places import ROOT

NAMES = sorted(path.stem for path in (ROOT / "ds_configs").glob("*.json"))


def test_each_trains_as_it_is():
    for found in run_two(jobs.trained_as_they_are, names=NAMES):
        assert list(found) == NAMES and len(NAMES) > 10
        for name, losses in found.items():
            assert losses == pytest.approx(found["stock"], rel=0.03), name
