"""Scales of blocks: how near numbers come to what they were, by name, block size and rotation."""

import functools

import numpy as np
import pytest
import torch
from conformance import EXACT, through
from error_bounds import signal_to_noise_db, student_t
from reference import sylvester

from zeropp_fp8.formats import FORMAT_NAMES, make_format
from zeropp_fp8.formats.chunks import Scratch
from zeropp_fp8.formats.hadamard import rotate_, rotate_back_


@functools.cache
def samples():
    """4M numbers of each distribution; with fewer, the tail of Student-t moves the figures by more than 0.5 dB."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1 << 22, generator=generator), student_t(1 << 22, 4, generator)


@functools.cache
def noise_db(name, options):
    """(normal, Student-t) in decibels."""
    fmt = make_format(name, **dict(options))
    return [signal_to_noise_db(sample, through(fmt, sample)) for sample in samples()]


NOISE = [  # of (normal, Student-t) numbers, in decibels
    ("int8", {"block_size": 128}, 43.8, 39.3),
    ("int8", {"block_size": 2048}, 41.7, 33.1),
    ("int8", {"block_size": 8192}, 40.9, 30.0),
    ("int4", {"block_size": 32}, 20.3, 17.6),
    ("int4", {"block_size": 128}, 18.6, 14.3),
    ("int4", {"block_size": 2048}, 16.5, 8.5),
    ("int4", {"block_size": 128, "hadamard": True}, 18.6, 18.6),
    ("fp8_e4m3", {"block_size": None}, 31.5, 31.6),
    ("fp8_e4m3", {"block_size": 128}, 31.8, 32.4),
    ("fp8_e5m2", {"block_size": None}, 25.6, 25.6),
    ("mxfp8_e4m3", {"scale_mode": "floor"}, 30.7, 29.9),
    ("mxfp8_e4m3", {}, 31.5, 31.5),
    ("mxfp8_e5m2", {}, 25.5, 25.6),
    ("mxfp6_e2m3", {"scale_mode": "floor"}, 30.9, 30.0),
    ("mxfp6_e2m3", {}, 30.9, 30.0),
    ("mxfp6_e3m2", {"scale_mode": "floor"}, 25.4, 25.2),
    ("mxfp6_e3m2", {}, 25.4, 25.2),
    ("mxfp4", {"scale_mode": "floor"}, 18.8, 17.7),
    # E2M1's largest number is 1.5 * 4, so that one block in three has its numbers moved down to a coarser step:
    # more than half of a block's error, where one number is much larger than the others.
    ("mxfp4", {}, 18.8, 17.1),
    ("mxint8", {"scale_mode": "floor"}, 41.3, 39.1),
    ("mxint8", {}, 41.3, 39.1),
]
NOISE_OF_64 = [
    ("nf4", 20.7, 19.1, 0.5),
    ("int4", 19.33, 15.88, 0.3),
    ("int8", 44.42, 40.85, 0.3),
    ("fp8_e4m3", 32.0, 32.7, 0.3),
]


@pytest.mark.parametrize(("name", "options", "normal_db", "student_t_db"), NOISE)
def test_signal_to_noise(name, options, normal_db, student_t_db):
    normal, heavy_tailed = noise_db(name, tuple(options.items()))
    assert normal >= normal_db - 0.5 and heavy_tailed >= student_t_db - 0.5


@pytest.mark.parametrize(("name", "normal_db", "student_t_db", "allowed"), NOISE_OF_64)
def test_signal_to_noise_of_blocks_of_64(name, normal_db, student_t_db, allowed):
    """Double quantization is no worse but where a group's largest scale is far off."""
    plain, double = (noise_db(name, (("block_size", 64), ("double_quantize", double))) for double in (False, True))
    assert plain == [pytest.approx(normal_db, abs=allowed), pytest.approx(student_t_db, abs=allowed)]
    assert double[0] >= plain[0] - 0.1
    assert double[1] >= plain[1] - (0.3 if name == "int8" else 0.1)


def test_every_format_has_its_noise():
    unknown = {*FORMAT_NAMES} - {*EXACT, *(row[0] for row in NOISE + NOISE_OF_64)}
    measured = {name: noise_db(name, ()) for name in unknown}
    assert not measured, f"add rows to NOISE: (normal, Student-t) in decibels are {measured}"


def test_small_tensors_of_equal_numbers():
    """They sit at the largest code, where only the rounding of the scale is left."""
    for name in FORMAT_NAMES:
        for shape in ((), (1,), (7,), (1, 7)):
            tensor = torch.full(shape, 4.0)
            torch.testing.assert_close(through(make_format(name), tensor), tensor, rtol=0.01, atol=0)


def test_rotation_is_the_sylvester_matrix():
    values, matrix = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)), torch.from_numpy(sylvester())
    assert np.array_equal(sylvester() @ sylvester(), 32 * np.eye(32))
    expected = (values.double().view(3, 2, 32) @ matrix).view(3, 64)
    scratch = Scratch(values.device)
    rotated = rotate_(values.clone(), scratch)
    torch.testing.assert_close(rotate_back_(values.clone(), scratch).double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(rotated.double(), expected / 32, rtol=0, atol=1e-6)
    torch.testing.assert_close(rotate_back_(rotated, scratch), values, rtol=0, atol=1e-5)
    assert torch.equal(rotate_back_(torch.eye(32), scratch).double(), matrix)


def test_finite_numbers_near_the_largest_do_not_become_nan():
    """Undoing the rotation adds 32 decoded values; rounding errors must not push a partial sum to Inf, then NaN.

    The first group of the block sets the scale to max / 7. The second is chosen in rotated space as 0.52 and -0.48
    scales, which round to 1 and 0: its partial sums exceed the largest number although no element of it does.
    """
    largest = torch.finfo(torch.float32).max
    signs = "+---++++-+---+-+++-+--+++----+-+"
    rotated = torch.tensor([0.522 if sign == "+" else -0.482 for sign in signs], dtype=torch.float64)
    tensor = torch.zeros(128)
    tensor[:32] = largest
    tensor[32:64] = (torch.from_numpy(sylvester()) @ rotated * largest / 7).float()
    assert tensor.isfinite().all()
    assert through(make_format("int4", block_size=128, hadamard=True), tensor).isfinite().all()
