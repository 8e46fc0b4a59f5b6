"""Patterns of the section name runs of a module name's parts."""

import pytest

from zeropp_fp8.config.compute import matches


@pytest.mark.parametrize(
    "pattern, named",
    [
        ("q_proj", True),
        ("layers.0", True),
        ("model.layers.0.self_attn.q_proj", True),
        ("layers.?.self_attn", True),
        ("*attn*", True),
        ("layers.00", False),
        ("layer", False),
        ("layers.0.q_proj", False),
        ("proj", False),
        ("1", False),
    ],
)
@pytest.mark.parametrize("around", ["", "base_model.model.", "module."])
def test_patterns_name_runs_of_parts(pattern, named, around):
    assert matches(f"{around}model.layers.0.self_attn.q_proj", [pattern]) == named
    assert not matches(f"{around}model.layers.0.self_attn.q_proj", [])
