"""Gradients are reduced as backward goes, whatever order an optimizer has its parameters in."""

import pytest
import reduction_order_jobs as jobs
from ranks import run_two

LAYER = 4 * 64 * 64 + 3 * 64 * 152 + 2 * 64  # one of four


@pytest.mark.parametrize("recipe", ["lossless", "zeropp"])
def test_an_optimizer_with_the_last_layers_first(recipe):
    """Such as one with a learning rate for each layer: no layer's gradients wait for those of layers below it."""
    held = run_two(jobs.held_at_the_end, recipe=recipe)[0]
    assert held["registered"] < LAYER and held["last first"] < LAYER, held
