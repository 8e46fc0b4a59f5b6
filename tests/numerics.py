"""Numeric references for tests, written out from the formulas and sharing no code with the package."""

from __future__ import annotations

import math

import numpy as np
import torch

LARGEST_CODE = {"int8": 127.0, "int4": 7.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
CODE_BITS = {"int8": 8, "int4": 4, "fp8_e4m3": 8, "fp8_e5m2": 8}
# (mantissa bits, exponent of the smallest normal number, exponent bias)
FLOAT8_LAYOUT = {"fp8_e4m3": (3, -6, 7), "fp8_e5m2": (2, -14, 15)}
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


def signal_samples() -> dict[str, torch.Tensor]:
    """4M numbers of each distribution; with fewer, the tail of Student-t moves the figures by more than 0.5 dB."""
    generator = torch.Generator().manual_seed(0)
    numel = 1 << 22
    return {"normal": torch.randn(numel, generator=generator), "student_t": student_t(numel, 4, generator)}


def sylvester_matrix() -> torch.Tensor:
    """The 32 x 32 Hadamard matrix in float64: element (i, j) is -1 to the number of ones in the binary i AND j."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(GROUP)] for i in range(GROUP)]
    return torch.tensor(signs, dtype=torch.float64)


def bfloat16_at_least(value: float) -> float:
    """The smallest bf16 number (8 significant bits) not below a positive `value` in the normal range."""
    mantissa, exponent = math.frexp(value)  # value = mantissa * 2^exponent, 1/2 <= mantissa < 1
    return math.ldexp(math.ceil(mantissa * 256), exponent - 8)


def payload_size(numel: int, bits: int, block_size: int | None, hadamard: bool = False) -> int:
    """Bytes of a block-scaled payload: 2 a scale, then the codes, each up to a multiple of 16."""
    if numel == 0:
        return 0
    blocks = 1 if block_size is None else math.ceil(numel / block_size)
    multiple = GROUP if hadamard else 8 // bits
    codes = math.ceil(numel / multiple) * multiple
    return math.ceil(2 * blocks / 16) * 16 + math.ceil(codes * bits // 8 / 16) * 16


def integer_reference(values: list[float], bits: int, block_size: int) -> tuple[bytes, list[float]]:
    """(payload, decoded values) of symmetric block-scaled integers, nearest rounding, element by element in float64."""
    largest = 2 ** (bits - 1) - 1
    scales, codes = [], []
    for start in range(0, len(values), block_size):
        block = values[start : start + block_size]
        amax = max(abs(v) for v in block)
        scale = bfloat16_at_least(max(amax / largest, SMALLEST_SCALE)) if amax else 0.0
        scales.append(scale)
        codes += [max(-largest, min(largest, round(v / scale))) if scale else 0 for v in block]
    decoded = [code * scales[i // block_size] for i, code in enumerate(codes)]
    scale_bytes = b"".join(np.float32(scale).tobytes()[2:] for scale in scales)  # bf16 is the upper half of fp32
    if bits == 8:
        code_bytes = bytes(code % 256 for code in codes)
    else:
        codes += [0] * (len(codes) % 2)
        code_bytes = bytes((low % 16) + 16 * (high % 16) for low, high in zip(codes[0::2], codes[1::2]))
    return scale_bytes + bytes(-len(scale_bytes) % 16) + code_bytes + bytes(-len(code_bytes) % 16), decoded


def float8_value(code: int, name: str) -> float:
    """The number that an FP8 code stands for (OFP8): (-1)^sign * 2^(exponent - bias) * 1.mantissa, or a subnormal."""
    mantissa_bits, min_exponent, bias = FLOAT8_LAYOUT[name]
    sign = -1.0 if code & 0x80 else 1.0
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code & 0x7F) >> mantissa_bits
    if name == "fp8_e4m3" and code & 0x7F == 0x7F:
        return math.nan
    if name == "fp8_e5m2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(mantissa, min_exponent - mantissa_bits)
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
    x = values.detach().double().reshape(-1)
    numel = x.numel()
    multiple = GROUP if hadamard else 1
    block = block_size or math.ceil(numel / multiple) * multiple
    padded = torch.zeros(math.ceil(numel / block) * block, dtype=torch.float64)
    padded[:numel] = x
    coded = (padded.view(-1, GROUP) @ sylvester_matrix() / GROUP).view(-1) if hadamard else padded
    amax = coded.view(-1, block).abs().amax(dim=1, keepdim=True)
    scale = (amax / LARGEST_CODE[name]).clamp_min(SMALLEST_SCALE) * (1 + 2.0**-7) * (amax > 0)
    step = scale.expand(-1, block).reshape(-1)
    if name in FLOAT8_LAYOUT:
        mantissa_bits, min_exponent, _ = FLOAT8_LAYOUT[name]
        # spacing of a normal number <= |v| * 2^-mantissa_bits; of a subnormal one scale * 2^(min_exponent - ...)
        step = torch.maximum(coded.abs(), step * 2.0**min_exponent) * 2.0**-mantissa_bits
    bound = step * 0.5
    bound += 2.0**-20 * coded.abs()
    if hadamard:
        bound = bound.view(-1, GROUP).sum(dim=1, keepdim=True).expand(-1, GROUP).reshape(-1)
    bound = bound[:numel]
    return bound + UNIT_ROUNDOFF[dtype] * (x.abs() + bound) + HALF_SMALLEST[dtype]


# -- MX formats (OCP Microscaling v1.0), in numpy and float64 -----------------------------------------------------

MX_BLOCK = 32
# (exponent bits, mantissa bits, bias, exponent of the largest number, largest number), from the specification's tables
MX_FLOATS = {
    "mxfp8_e4m3": (4, 3, 7, 8, 448.0),
    "mxfp8_e5m2": (5, 2, 15, 15, 57344.0),
    "mxfp6_e2m3": (2, 3, 1, 2, 7.5),
    "mxfp6_e3m2": (3, 2, 3, 4, 28.0),
    "mxfp4": (2, 1, 1, 2, 6.0),
}
MX_BITS = {"mxfp8_e4m3": 8, "mxfp8_e5m2": 8, "mxfp6_e2m3": 6, "mxfp6_e3m2": 6, "mxfp4": 4, "mxint8": 8}
MX_LARGEST = {name: layout[4] for name, layout in MX_FLOATS.items()} | {"mxint8": 127 / 64}
MX_EMAX = {name: layout[3] for name, layout in MX_FLOATS.items()} | {"mxint8": 0}
MX_HOLDS_SPECIAL = ("mxfp8_e4m3", "mxfp8_e5m2")


def mx_code_value(name: str, code: int) -> float:
    """The number P that a code stands for."""
    if name == "mxint8":
        return (code - 256 if code >= 128 else code) / 64
    exponent_bits, mantissa_bits, bias, _, _ = MX_FLOATS[name]
    sign = -1.0 if code >> exponent_bits + mantissa_bits else 1.0
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code & (1 << mantissa_bits) - 1
    if name == "mxfp8_e4m3" and (exponent, mantissa) == (15, 7):
        return math.nan
    if name == "mxfp8_e5m2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


def mx_grid(name: str) -> np.ndarray:
    """The finite numbers >= 0, in order; that of a float's k-th is its code k."""
    codes = range(128) if MX_BITS[name] == 8 else range(1 << MX_BITS[name] - 1)
    values = [value for value in (mx_code_value(name, code) for code in codes) if math.isfinite(value)]
    assert values == sorted(values) and values[-1] == MX_LARGEST[name]
    return np.array(values)


def mx_shared_exponent(amax: float, name: str, scale_mode: str) -> int:
    """The exponent of X for a block whose largest finite magnitude is `amax` (0 or an fp32 normal number)."""
    if amax == 0:
        return -127
    exponent = math.frexp(amax)[1] - 1 - MX_EMAX[name]
    if scale_mode == "rceil":
        exponent -= 2
        while math.ldexp(MX_LARGEST[name], exponent) < amax:
            exponent += 1
    return max(-127, min(127, exponent))


def mx_round(scaled: np.ndarray, name: str) -> np.ndarray:
    """Places in `mx_grid` of finite float64 numbers >= 0, by searching it."""
    grid = mx_grid(name)
    scaled = np.minimum(scaled, grid[-1])
    lower = np.searchsorted(grid, scaled, side="right") - 1
    upper = np.minimum(lower + 1, len(grid) - 1)
    step = np.where(upper > lower, grid[upper] - grid[lower], 1.0)
    fraction = (scaled - grid[lower]) / step
    up = (fraction > 0.5) | ((fraction == 0.5) & (lower % 2 == 1))
    return np.where(up, upper, lower)


def mx_reference(values: np.ndarray, name: str, scale_mode: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(E8M0 bytes [rows, blocks], codes [rows, blocks * 32], decoded float64 [rows, n]) of float64 [rows, n].

    The numbers are those of fp32 numbers. Decoded numbers are not clamped.
    """
    rows, numel = values.shape
    num_blocks = math.ceil(numel / MX_BLOCK)
    blocks = np.zeros((rows, num_blocks * MX_BLOCK))
    blocks[:, :numel] = values
    blocks = np.where(np.abs(blocks) < 2.0**-126, np.copysign(0.0, blocks), blocks)
    blocks = blocks.reshape(rows, num_blocks, MX_BLOCK)
    finite = np.isfinite(blocks)
    magnitudes = np.where(finite, np.abs(blocks), 0.0)
    exponents = np.array(
        [[mx_shared_exponent(amax, name, scale_mode) for amax in row] for row in magnitudes.max(axis=2)]
    ).reshape(rows, num_blocks)
    codes = mx_round(magnitudes / 2.0 ** exponents[..., None], name)
    negative = np.signbit(blocks)
    if name == "mxint8":
        codes = np.where(negative, -codes % 256, codes)
    else:
        codes = codes + (negative << MX_BITS[name] - 1)
    scales = exponents + 127
    if name == "mxfp8_e4m3":
        codes[~finite] = 0x7F
    elif name == "mxfp8_e5m2":
        codes[~finite] = 0x7F
        codes[np.isinf(blocks)] = np.where(negative[np.isinf(blocks)], 0xFC, 0x7C)
    else:
        spoiled = ~finite.all(axis=2)
        scales[spoiled] = 0xFF
        codes[spoiled] = 0
    factors = np.where(scales == 0xFF, math.nan, 2.0 ** (scales - 127))
    numbers = np.array([mx_code_value(name, code) for code in range(256)])[codes]
    decoded = (numbers * factors[..., None]).reshape(rows, -1)[:, :numel]
    return scales, codes.reshape(rows, -1), decoded


def nvfp4_reference(values: np.ndarray) -> tuple[bytes, np.ndarray]:
    """(payload, decoded float64 [n]) of fp32 [n] in NVFP4, from its description, number by number.

    fp32 where the description says so: the scales, and what is divided by them.
    """
    one = np.float32(1)
    grid = np.array([float8_value(code, "fp8_e4m3") for code in range(0x7F)])  # without NaN
    finite = np.abs(values[np.isfinite(values)])
    largest = np.float32(finite.max()) if finite.size else np.float32(0)
    tensor_scale = max(largest / np.float32(448 * 6), np.float32(2.0**-120)) if largest else one
    scales, codes, decoded = [], [], []
    for start in range(0, len(values), 16):
        block = values[start : start + 16]
        if not np.isfinite(block).all():
            scales.append(0x7F)
            codes += [0] * len(block)
            decoded += [math.nan] * len(block)
            continue
        wanted = float(np.abs(block).max() / np.float32(6) / tensor_scale)
        wanted = min(max(wanted, 2.0**-6), 448.0)
        distance = np.abs(grid - wanted)
        nearest = np.flatnonzero(distance == distance.min())
        code = int(next(k for k in nearest if len(nearest) == 1 or k % 2 == 0))  # ties to the even code
        scale = np.float32(grid[code]) * tensor_scale
        scales.append(code)
        scaled = np.minimum(np.abs(block * (one / max(scale, np.float32(2.0**-126)))), np.float32(6))
        own = mx_round(scaled.astype(np.float64), "mxfp4")
        numbers = np.array([mx_code_value("mxfp4", k) for k in own]) * float(scale)
        negative = np.signbit(block)
        codes += [int(k) + 8 * int(minus) for k, minus in zip(own, negative)]
        decoded += list(np.where(negative, -numbers, numbers))
    codes += [0] * (len(codes) % 2)
    packed = bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2]))
    head = np.float32(tensor_scale).tobytes() + bytes(scales)
    return b"".join(part + bytes(-len(part) % 16) for part in (head, packed)), np.array(decoded)


def mx_payload(scales: np.ndarray, codes: np.ndarray, name: str) -> bytes:
    """The payload of one row: scales and packed codes, each filled up with zeros to a multiple of 16 bytes."""
    bits = MX_BITS[name]
    # All codes as the digits of one number, the first the lowest: as bytes, the lowest first, that is the packing.
    number = sum(int(code) << bits * i for i, code in enumerate(codes))
    packed = number.to_bytes(len(codes) * bits // 8, "little")
    return bytes(scales.tolist()) + bytes(-len(scales) % 16) + packed + bytes(-len(packed) % 16)
