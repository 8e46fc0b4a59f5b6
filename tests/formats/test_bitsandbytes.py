"""NF4 and double-quantized scales against bitsandbytes, where it is installed."""

import math

import pytest
import torch
from conformance import normal
from reference import NF4_LEVELS

from zeropp_fp8.formats import make_format
from zeropp_fp8.formats.dynamic_map import dynamic_levels

WEIGHTS = [
    ((256, 512), 0, torch.float32),
    ((1024, 512), 1, torch.bfloat16),
    ((3, 64), 2, torch.float16),
    ((333, 770), 3, torch.float32),  # the last block has 42 elements
]


@pytest.fixture
def functional():
    return pytest.importorskip("bitsandbytes").functional


def unpacked(packed):
    """bitsandbytes' codes in order: it keeps the first of two in the high nibble."""
    packed = packed.view(-1)
    return torch.stack([packed >> 4, packed & 0xF], dim=1).view(-1)


def own_codes(fmt, payload, numel):
    packed = payload[fmt._places(numel)[1]]
    return torch.stack([packed & 0xF, packed >> 4], dim=1).view(-1)[:numel]


def weight_of(shape, seed, dtype):
    return (normal(*shape, seed=seed) * 0.02).to(dtype)


def test_the_tables_are_those_of_bitsandbytes(functional):
    assert torch.equal(functional.create_dynamic_map(), torch.tensor(dynamic_levels()))
    assert functional.get_4bit_type("nf4", device="cpu").tolist() == NF4_LEVELS


@pytest.mark.parametrize(("shape", "seed", "dtype"), WEIGHTS)
def test_nf4_is_that_of_bitsandbytes(functional, shape, seed, dtype):
    weight = weight_of(shape, seed, dtype)
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    fmt, numel = make_format("nf4", block_size=64), weight.numel()
    payload = fmt.encode(weight)
    assert torch.equal(own_codes(fmt, payload, numel), unpacked(packed)[:numel])
    assert torch.equal(payload[fmt._places(numel)[0]].view(torch.float32), state.absmax)
    assert_within_one_unit(fmt.decode(payload, shape, dtype), functional.dequantize_4bit(packed, state).view(shape))


def assert_within_one_unit(actual, expected):
    """Equal up to one unit in the last place of their dtype."""
    assert actual.dtype == expected.dtype
    integer = torch.int32 if actual.dtype == torch.float32 else torch.int16
    apart = (actual.view(integer).long() - expected.view(integer).long()).abs()
    assert ((apart <= 1) | (actual == expected)).all()  # also where zeros have other signs


@pytest.mark.parametrize(("shape", "seed", "dtype"), WEIGHTS)
def test_double_quantization_is_that_of_bitsandbytes(functional, shape, seed, dtype):
    """Scale codes are bitsandbytes' own, and by them the decoded numbers.

    In quantize_4bit its CPU code searches less precisely: where a number lies within 2^-15 of a limit the other level
    may be taken, and up to 0.3 % of the codes differ. Its portable code, which does as its CUDA kernels do, differs in
    none.
    """
    weight = weight_of(shape, seed, dtype)
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    fmt, numel = make_format("nf4", block_size=64, double_quantize=True), weight.numel()
    payload = fmt.encode(weight)
    assert torch.equal(own_codes(fmt, payload, numel), unpacked(packed)[:numel])
    blocks = math.ceil(numel / 64)
    scale_codes = payload[:blocks]
    numbers = payload[fmt._places(numel)[0]][math.ceil(blocks / 16) * 16 :].view(torch.float32)
    torch.testing.assert_close(numbers[-1], state.offset, rtol=2.0**-22, atol=0)
    torch.testing.assert_close(numbers[:-1], state.state2.absmax, rtol=1e-5, atol=0)

    absmax = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")[1].absmax
    deviations = absmax - numbers[-1]
    quantize = torch.ops.bitsandbytes.quantize_blockwise.default
    portable = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    expected, _ = quantize.redispatch(portable, deviations, functional.create_dynamic_map(), 256)
    assert (scale_codes == expected).double().mean() >= 0.999
    agree = scale_codes == state.absmax
    assert agree.double().mean() >= 0.99
    levels = torch.tensor(dynamic_levels())
    scaled = deviations / numbers[:-1].repeat_interleave(256)[:blocks]
    further = (levels[state.absmax.int()] - scaled).abs() - (levels[scale_codes.int()] - scaled).abs()
    assert (further.abs() <= 2.0**-14).all()

    elements = agree.repeat_interleave(64)[:numel].view(shape)
    decoded = fmt.decode(payload, shape, dtype)
    assert_within_one_unit(decoded[elements], functional.dequantize_4bit(packed, state).view(shape)[elements])
