"""The dynamic type, of whose levels the scales of scales are."""

import zlib
from fractions import Fraction

import numpy as np
import pytest
import torch
from reference import dynamic_numbers

from zeropp_fp8.formats.dynamic_map import dynamic_levels, nearest_dynamic


def test_dynamic_levels_are_those_of_the_paper():
    """Within one unit in the last place: where sums and products are rounded is not the paper's business."""
    levels, exact = dynamic_levels(), dynamic_numbers()
    assert len(levels) == len(exact) == 256
    for level, number in zip(levels, exact):
        assert level == np.float32(level)
        assert abs(Fraction(level) - number) <= abs(number) * Fraction(1, 2**22)


def test_what_the_dynamic_levels_are():
    levels = dynamic_levels()
    assert list(levels) == sorted(set(levels))
    assert levels[127] == 0.0 and levels[255] == 1.0 and levels[0] == pytest.approx(-0.99296875)
    assert [-level for level in levels[:127]] == list(levels[128:255])[::-1]
    assert levels[128] == pytest.approx(5.5e-7)
    # Stored weights are decoded by this table: no bit of it may change.
    assert zlib.crc32(np.array(levels, np.float32).tobytes()) == 0x1B137AEB


def test_the_nearest_dynamic_level():
    levels = np.array(dynamic_levels(), np.float32)
    assert nearest_dynamic(torch.from_numpy(levels)).tolist() == list(range(256))
    values = np.concatenate([np.linspace(-1, 1, 5001), np.geomspace(1e-8, 1, 1000), -np.geomspace(1e-8, 1, 1000)])
    values = values.astype(np.float32)
    distances = np.abs(values.astype(np.float64)[:, None] - levels.astype(np.float64))
    codes = nearest_dynamic(torch.from_numpy(values)).numpy()
    taken = distances[np.arange(len(values)), codes]
    # The limits are fp32 numbers too.
    assert (taken <= distances.min(axis=1) + 2.0**-25).all()
    middles = torch.from_numpy(((levels[1:].astype(np.float64) + levels[:-1]) / 2).astype(np.float32))
    assert nearest_dynamic(middles).tolist() == list(range(255))
    assert nearest_dynamic(torch.nextafter(middles, torch.tensor(2.0))).tolist() == list(range(1, 256))
