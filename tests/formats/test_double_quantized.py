"""Scales that are quantized themselves: sizes, blocks among others, the mean of all, NaN, and zero.Init."""

import math

import pytest
import torch
from conformance import normal, through

from zeropp_fp8.formats import DOUBLE_QUANTIZED_NAMES as DOUBLE
from zeropp_fp8.formats import make_format
from zeropp_fp8.formats.dynamic_map import dynamic_levels

EVERY_DOUBLE = pytest.mark.parametrize("name", DOUBLE)


def test_bytes_an_element():
    numel = 1 << 24
    for name, double_quantize, most in (("int4", True, 0.52), ("nf4", True, 0.52), ("int8", False, 1.04)):
        fmt = make_format(name, block_size=64, double_quantize=double_quantize)
        assert fmt.payload_bytes(numel) / numel <= most
        assert fmt.payload_bytes(numel) * 8 / numel == pytest.approx(fmt.bits_per_element, abs=1e-4)
    assert make_format("nf4").bits_per_element == 4 + 32 / 64
    assert make_format("nf4", double_quantize=True).bits_per_element == 4 + 8 / 64 + 32 / (64 * 256)


@pytest.mark.parametrize(
    "numel, size",
    [(0, 0), (1, 16 + 16 + 16), (64, 16 + 16 + 32), (65, 16 + 16 + 48), (64 * 256, 256 + 16 + 64 * 128)]
    + [(64 * 257, 272 + 16 + 64 * 257 // 2), (64 * 256 * 4, 1024 + 32 + 64 * 128 * 4)],
)
def test_double_quantized_payload_sizes(numel, size):
    for name in ("nf4", "int4"):
        fmt = make_format(name, block_size=64, double_quantize=True)
        assert fmt.payload_bytes(numel) == size == fmt.encode(torch.ones(numel)).numel()


@EVERY_DOUBLE
def test_a_zero_block_is_zeros_among_others(name):
    """Its scale decodes to a number beside zero, its codes are zeros."""
    tensor = normal(64 * 20)
    tensor[64:128] = 0
    decoded = through(make_format(name, block_size=64, double_quantize=True), tensor)
    assert not decoded[64:128].any() and decoded[:64].any()


def test_a_scale_that_decodes_to_zero_or_below_gives_zero_codes():
    """One block far above the others: theirs decode to offset - level * group scale, which is cut off at zero."""
    tensor = torch.full((64 * 200,), 1e-4)
    tensor[:64] = 1000.0
    for name in ("int8", "int4", "fp8_e4m3"):
        fmt = make_format(name, block_size=64, double_quantize=True)
        payload = fmt.encode(tensor)
        scales = fmt._parts(payload.view(1, -1), tensor.numel())[0][0]
        assert (scales >= 0).all() and (scales[1:] == 0).any()
        codes = payload[fmt._places(tensor.numel())[1]].view(200, -1)
        assert not codes[scales == 0].any()
        assert codes[0].any()


def test_a_scale_that_rounds_beyond_the_largest_number_is_cut_off():
    """(max - max / 10) + max / 10 is Inf in fp32, and the codes' level 0 times it would be NaN."""
    largest = torch.finfo(torch.float32).max
    tensor = torch.zeros(640)
    tensor[0] = largest
    assert (largest - tensor[0] / 10 + tensor[0] / 10).isinf()
    decoded = through(make_format("nf4", block_size=64, double_quantize=True), tensor)
    assert decoded[0] == largest and not decoded[1:].any()


def test_the_offset_does_not_depend_on_the_number_of_threads():
    fmt = make_format("int8", block_size=1, double_quantize=True)
    tensor = normal(1 << 16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = fmt.encode(tensor)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(two, fmt.encode(tensor))


@EVERY_DOUBLE
def test_blocks_at_the_mean_beside_a_spoiled_one_are_not_taken_for_it(name):
    """Equal blocks have the deviation 0, whose code stands for NaN in a marked group; its group scale may be 0."""
    for spread in (0.0, 1.0):
        tensor = torch.ones(64 * 300)
        tensor[64 : 64 * 2] += spread
        tensor[64 * 2 : 64 * 3] -= spread / 2
        tensor[64 * 3 : 64 * 4] -= spread / 2
        tensor[64 * 5 + 1] = math.nan
        decoded = through(make_format(name, block_size=64, double_quantize=True), tensor)
        spoiled = torch.arange(64 * 300) // 64 == 5
        assert torch.equal(decoded.isnan(), spoiled)
        rest = ~spoiled & (tensor == 1)
        assert rest.sum() > 64 * 250
        torch.testing.assert_close(decoded[rest], tensor[rest], rtol=1e-5, atol=0)


def test_weights_under_zero_init(monkeypatch):
    """DeepSpeed's zero.Init lets torch's constructors return 16 bits; neither tables nor payloads may change by it."""
    from zeropp_fp8.formats import nf4, tables

    tensor = normal(3000)
    formats = [make_format(name, block_size=8, double_quantize=double) for name in DOUBLE for double in (False, True)]
    expected = [fmt.encode(tensor) for fmt in formats]
    values = [fmt.decode(payload, (3000,), torch.float32) for fmt, payload in zip(formats, expected)]

    def in_16_bits(constructor):
        def wrapped(*args, **kwargs):
            made = constructor(*args, **kwargs)
            return made.to(torch.bfloat16) if made.is_floating_point() else made

        return wrapped

    for cached in (tables.fp32_table, tables.fp32_limits, nf4._pairs_of_levels):
        cached.cache_clear()
    dynamic_levels.cache_clear()
    for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn"):
        monkeypatch.setattr(torch, name, in_16_bits(getattr(torch, name)))
    for fmt, payload, decoded in zip(formats, expected, values):
        assert torch.equal(fmt.encode(tensor), payload)
        part = payload.new_empty(fmt.payload_bytes(8 * fmt.granule))
        fmt.encode_part(tensor, 0, 8 * fmt.granule, part)
        restored = fmt.decode(payload, (3000,), torch.float32)
        assert restored.dtype == torch.float32 and torch.equal(restored, decoded)
