"""Blocks cross between nodes while a step still updates others: when, and that nothing else changes by it."""

import early_hop_jobs as jobs
import pytest
from ranks import run_ranks

NONE = ("fp8-lm",)  # its recipe keeps no copy


@pytest.mark.parametrize("name", jobs.SPECS)
def test_only_the_time_changes(name):
    for first, second, differs in run_ranks(jobs.in_parts, name=name):
        assert not differs
        assert first == second
        assert any("layers.1" in each for each in first) is (name not in NONE)
