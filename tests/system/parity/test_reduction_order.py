"""Gradients are reduced as backward goes, whatever order an optimizer has its parameters in."""

import reduction_order_jobs as jobs
from ranks import run_two

LAYER = 4 * 64 * 64 + 3 * 64 * 152 + 2 * 64  # one of four


def test_an_optimizer_with_the_last_layers_first():
    """Such as one with a learning rate for each layer: no layer's gradients wait for those of layers below it."""
    held = run_two(jobs.held_at_the_end, recipes=["lossless", "zeropp"])[0]
    assert len(held) == 4 and all(elements < LAYER for elements in held.values()), held
