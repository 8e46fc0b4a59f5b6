"""Numeric references for tests, written out from the formulas and sharing no code with the package."""

from __future__ import annotations

import math

import torch

# Rounding to a dtype changes a value by at most this share of it, plus half its smallest subnormal.
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
HALF_SMALLEST = {torch.float32: 2.0**-150, torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}
SMALLEST_SCALE = 2.0**-126
GROUP = 32


def signal_to_noise_db(reference: torch.Tensor, actual: torch.Tensor) -> float:
    """10 log10(sum reference^2 / sum (reference - actual)^2), summed in float64; inf when they are equal."""
    reference, actual = reference.detach().double(), actual.detach().double()
    noise = (reference - actual).square().sum().item()
    signal = reference.square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)


def student_t(numel: int, degrees: int, generator: torch.Generator) -> torch.Tensor:
    """Student-t numbers from their definition: normal / sqrt(chi-squared / degrees)."""
    chi_squared = torch.zeros(numel)
    for _ in range(degrees):
        chi_squared += torch.randn(numel, generator=generator).square()
    return torch.randn(numel, generator=generator) / (chi_squared / degrees).sqrt()


def sylvester_matrix() -> torch.Tensor:
    """The 32 x 32 Hadamard matrix in float64: element (i, j) is -1 to the number of ones in the binary i AND j."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(GROUP)] for i in range(GROUP)]
    return torch.tensor(signs, dtype=torch.float64)


def payload_size(numel: int, bits: int, block_size: int | None, hadamard: bool = False) -> int:
    """Bytes of a block-scaled payload: 2 a scale, then the codes, each up to a multiple of 16."""
    if numel == 0:
        return 0
    blocks = 1 if block_size is None else math.ceil(numel / block_size)
    multiple = GROUP if hadamard else math.lcm(8, bits) // bits
    codes = math.ceil(numel / multiple) * multiple
    return math.ceil(2 * blocks / 16) * 16 + math.ceil(codes * bits // 8 / 16) * 16


def float8_value(code: int, name: str) -> float:
    """The number that an FP8 code stands for (OFP8): (-1)^sign * 2^(exponent - bias) * 1.mantissa, or a subnormal."""
    from reference import FLOATS

    _, mantissa_bits, bias, *_ = FLOATS[name]
    sign = -1.0 if code & 0x80 else 1.0
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code & 0x7F) >> mantissa_bits
    if name == "fp8_e4m3" and code & 0x7F == 0x7F:
        return math.nan
    if name == "fp8_e5m2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp(1 + mantissa / (1 << mantissa_bits), exponent - bias)


def error_bound(
    values: torch.Tensor, name: str, block_size: int | None, hadamard: bool, dtype: torch.dtype
) -> torch.Tensor:
    """float64 [n]: the largest error an element of flat `values` may have after encoding and decoding to `dtype`.

    step  = scale for integers; scale * 2^(max(floor(log2 |v / scale|), min exponent) - mantissa bits) for FP8, where
            scale <= max(amax / largest, 2^-126) * (1 + 2^-7)
    error <= step / 2
    With the rotation each element is the sum of the 32 rotated elements of its group, hence so is its error bound.
    The rounding of fp32 arithmetic and of the final cast to `dtype` come on top.
    """
    from reference import ELEMENTS, FLOATS  # in tests/formats, which ranks that import this file do not know

    x = values.detach().double().reshape(-1)
    numel = x.numel()
    multiple = GROUP if hadamard else 1
    block = block_size or math.ceil(numel / multiple) * multiple
    padded = torch.zeros(math.ceil(numel / block) * block, dtype=torch.float64)
    padded[:numel] = x
    coded = (padded.view(-1, GROUP) @ sylvester_matrix() / GROUP).view(-1) if hadamard else padded
    amax = coded.view(-1, block).abs().amax(dim=1, keepdim=True)
    scale = (amax / ELEMENTS[name].largest).clamp_min(SMALLEST_SCALE) * (1 + 2.0**-7) * (amax > 0)
    step = scale.expand(-1, block).reshape(-1)
    if name in FLOATS:
        _, mantissa_bits, bias, *_ = FLOATS[name]
        # spacing of a normal number <= |v| * 2^-mantissa_bits; of a subnormal one scale * 2^(1 - bias - mantissa_bits)
        step = torch.maximum(coded.abs(), step * 2.0 ** (1 - bias)) * 2.0**-mantissa_bits
    bound = step * 0.5
    bound += 2.0**-20 * coded.abs()
    if hadamard:
        bound = bound.view(-1, GROUP).sum(dim=1, keepdim=True).expand(-1, GROUP).reshape(-1)
    bound = bound[:numel]
    return bound + UNIT_ROUNDOFF[dtype] * (x.abs() + bound) + HALF_SMALLEST[dtype]
