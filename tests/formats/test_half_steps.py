"""INT2 and INT3, by what they are for: error feedback. They have no zero, and cut off the largest."""

import pytest
import torch
from conformance import normal, through
from error_bounds import signal_to_noise_db

from zeropp_fp8.formats import HALF_STEP_NAMES, make_format


@pytest.mark.parametrize("name", HALF_STEP_NAMES)
def test_blocks_of_zeros_stay_zeros(name):
    values = torch.ones(4 * 64)
    values[64:128] = 0.0
    decoded = through(make_format(name, block_size=64), values).view(4, 64)
    assert not decoded[1].any() and decoded[[0, 2, 3]].all()


@pytest.mark.parametrize("name, at_least", [("int2", 8.3), ("int3", 13.8)])
@pytest.mark.parametrize("hadamard", [False, True])
def test_signal_to_noise(name, at_least, hadamard):
    rows = normal(5, 1003)
    wire_format = make_format(name, block_size=64, hadamard=hadamard)
    decoded = wire_format.decode_rows(wire_format.encode_rows(rows), 1003, torch.float32)
    assert signal_to_noise_db(rows, decoded) > at_least


@pytest.mark.parametrize("name, at_least", [("int2", 8.5), ("int3", 14.0)])
def test_what_is_cut_off_comes_with_the_next_message(name, at_least):
    """Of what changes by normal numbers again and again: a step's error, no matter how many steps there were."""
    generator = torch.Generator().manual_seed(1)
    wire_format, held, value = make_format(name), torch.zeros(1 << 14), torch.zeros(1 << 14)
    for step in range(60):
        change = torch.randn(1 << 14, generator=generator)
        value += change
        held += wire_format.decode(wire_format.encode(value - held), held.shape, torch.float32)
        if step >= 10:
            assert signal_to_noise_db(change, change - (value - held)) > at_least - 0.9
