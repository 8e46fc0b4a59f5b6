"""A jump of the loss: by how much more than earlier losses differ."""

from collections import deque

import pytest

from zeropp_fp8.numerics.watch import jumps


@pytest.mark.parametrize(
    ("loss", "earlier", "found"),
    [
        (2.9, [2.0, 2.1] * 8, True),
        (2.2, [2.0, 2.1] * 8, False),
        (9.0, [2.0, 2.1] * 3, False),  # too few to know
        (2.1, [2.0] * 16, False),  # 1 % of the mean counts as the least difference
        (2.3, [2.0] * 16, True),
        (1e-6, [1e-9, -1e-9] * 8, False),  # GRPO without KL: 0 up to rounding
        (0.01, [1e-9, -1e-9] * 8, True),
    ],
)
def test_jumps(loss, earlier, found):
    assert jumps(loss, deque(earlier), spike=8) is found
