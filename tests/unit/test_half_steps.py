"""INT2 and INT3: bytes against a reference from the formula, and what they are for: differences that come again."""

import math

import pytest
import torch
from numerics import bfloat16_at_least, signal_to_noise_db

from zeropp_fp8.formats import HALF_STEP_NAMES, make_format

BITS = {"int2": 2, "int3": 3}
REACH = {"int2": 2.25, "int3": 4.5}  # scales to the largest magnitude of a block


def reference(values, name, block_size):
    """(codes as one number, the first in its lowest bits; scales; decoded values), number by number."""
    bits, codes, scales, decoded = BITS[name], [], [], []
    for start in range(0, len(values), block_size):
        block = values[start : start + block_size]
        amax = max(abs(value) for value in block)
        scale = bfloat16_at_least(amax / REACH[name]) if amax else 0.0
        scales.append(scale)
        for value in block:
            level = math.floor(value / scale) if scale else 0
            codes.append(max(-(2 ** (bits - 1)), min(2 ** (bits - 1) - 1, level)) + 2 ** (bits - 1))
            decoded.append((codes[-1] - 2 ** (bits - 1) + 0.5) * scale)
    return sum(code << bits * place for place, code in enumerate(codes)), scales, decoded


@pytest.mark.parametrize("numel, block_size", [(1, 8), (8, 8), (64, 64), (129, 32), (1000, 128), (31, 1024)])
@pytest.mark.parametrize("name", HALF_STEP_NAMES)
def test_bytes_and_values(name, numel, block_size):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).mul_(3)
    values[:: max(1, numel // 3)] = 0.0
    if numel > 40:
        values[block_size : 2 * block_size] = 0.0  # a block
    wire_format = make_format(name, block_size=block_size)
    payload = wire_format.encode(values)
    number, scales, decoded = reference(values.tolist(), name, block_size)
    codes_start = -(-2 * len(scales) // 16) * 16
    code_bytes = -(-numel * BITS[name] // 8)
    taken = int.from_bytes(payload[codes_start:][:code_bytes].numpy().tobytes(), "little")
    assert taken % (1 << numel * BITS[name]) == number
    found = payload[: 2 * len(scales)].view(torch.bfloat16).tolist()
    assert found == scales
    assert wire_format.decode(payload, values.shape, torch.float32).tolist() == decoded
    assert len(payload) == wire_format.payload_bytes(numel) and len(payload) % 16 == 0


@pytest.mark.parametrize("name", HALF_STEP_NAMES)
def test_blocks_of_zeros_stay_zeros_and_what_is_not_finite_is_seen(name):
    values = torch.ones(4 * 64)
    values[64:128], values[130], values[200] = 0.0, math.nan, -math.inf
    decoded = make_format(name).decode(make_format(name).encode(values), values.shape, torch.float32).view(4, 64)
    assert decoded[0].isfinite().all() and not decoded[1].any() and decoded[2:].isnan().all()


@pytest.mark.parametrize("name", HALF_STEP_NAMES)
@pytest.mark.parametrize("hadamard", [False, True])
def test_rows_and_their_means(name, hadamard):
    wire_format = make_format(name, block_size=64, hadamard=hadamard)
    rows = torch.randn(5, 1003, generator=torch.Generator().manual_seed(0))
    payload = wire_format.encode_rows(rows)
    assert torch.equal(payload, torch.stack([wire_format.encode(row) for row in rows]))
    decoded = wire_format.decode_rows(payload, 1003, torch.float32)
    assert signal_to_noise_db(rows, decoded) > {"int2": 8.3, "int3": 13.8}[name]
    mean = wire_format.mean_of_rows([payload, payload.flip(0)], 1003)
    torch.testing.assert_close(mean, (decoded + decoded.flip(0)) / 2)


@pytest.mark.parametrize("name, at_least", [("int2", 8.5), ("int3", 14.0)])
def test_what_is_cut_off_comes_with_the_next_difference(name, at_least):
    """Of what changes by normal numbers again and again: a step's error, no matter how many steps there were."""
    generator = torch.Generator().manual_seed(1)
    wire_format, held, value = make_format(name), torch.zeros(1 << 14), torch.zeros(1 << 14)
    for step in range(60):
        change = torch.randn(1 << 14, generator=generator)
        value += change
        held += wire_format.decode(wire_format.encode(value - held), held.shape, torch.float32)
        if step >= 10:
            assert signal_to_noise_db(change, change - (value - held)) > at_least - 0.9


@pytest.mark.parametrize("name", HALF_STEP_NAMES)
def test_what_they_cannot(name):
    multiple = {"int2": 4, "int3": 8}[name]
    with pytest.raises(ValueError, match=f"{name}: block_size must be a positive multiple of {multiple}"):
        make_format(name, block_size=2)
