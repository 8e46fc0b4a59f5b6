"""Every number format in NumPy, from its paper or description: its bytes, and the numbers that they stand for.

Nothing here is the package's code. `encoded` takes the options of `make_format`; the formats' own files say what is
fp32 in a description, and that is fp32 here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

SMALLEST = np.float32(2.0**-126)
GROUP = 256  # blocks whose scales share one, where scales are quantized too
ROTATED = 32
# arXiv 2305.14314, appendix E.
NF4_LEVELS = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
# The numbers that bitsandbytes' kernels compare with; the code is how many of them lie below a number.
NF4_LIMITS = [
    -0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544, -0.23460740596055984,
    -0.13791173323988914, -0.045525018125772476, 0.03979014977812767, 0.1202552504837513, 0.2035212516784668,
    0.2920137718319893, 0.3893125355243683, 0.5016634166240692, 0.6427869200706482, 0.8614784181118011,
]  # fmt: skip
# (exponent bits, mantissa bits, bias, largest number, what the highest codes are), from OFP8 and OCP Microscaling v1.0
FLOATS = {
    "fp8_e4m3": (4, 3, 7, 448.0, "nan"),
    "fp8_e5m2": (5, 2, 15, 57344.0, "ieee"),
    "mxfp8_e4m3": (4, 3, 7, 448.0, "nan"),
    "mxfp8_e5m2": (5, 2, 15, 57344.0, "ieee"),
    "mxfp6_e2m3": (2, 3, 1, 7.5, "numbers"),
    "mxfp6_e3m2": (3, 2, 3, 28.0, "numbers"),
    "mxfp4": (2, 1, 1, 6.0, "numbers"),
}
HOLDS_SPECIAL = ("mxfp8_e4m3", "mxfp8_e5m2")
BLOCKS = {"nf4": 64}  # others: 32 in MX formats, else 128


@dataclass(frozen=True)
class Element:
    """A kind of code.

    Attributes:
        numbers: float64 [2^bits], of every code.
        largest: by which scales are chosen.
        rounded: the codes of finite float64 numbers.
    """

    bits: int
    numbers: np.ndarray
    largest: float
    rounded: Callable[[np.ndarray], np.ndarray]


def _nearest(grid: np.ndarray, magnitudes: np.ndarray) -> np.ndarray:
    """Places in a grid of numbers >= 0 of the nearest ones; of two that are as near, the even place."""
    magnitudes = np.minimum(magnitudes, grid[-1])
    lower = np.searchsorted(grid, magnitudes, side="right") - 1
    upper = np.minimum(lower + 1, len(grid) - 1)
    fraction = (magnitudes - grid[lower]) / np.where(upper > lower, grid[upper] - grid[lower], 1.0)
    return np.where((fraction > 0.5) | ((fraction == 0.5) & (lower % 2 == 1)), upper, lower)


def _float(exponent_bits: int, mantissa_bits: int, bias: int, largest: float, highest: str) -> Element:
    sign = 1 << exponent_bits + mantissa_bits
    codes = np.arange(sign)
    exponent, mantissa = codes >> mantissa_bits, codes & (1 << mantissa_bits) - 1
    numbers = np.where(
        exponent == 0,
        np.ldexp(mantissa.astype(float), 1 - bias - mantissa_bits),
        np.ldexp(1 + mantissa / (1 << mantissa_bits), exponent - bias),
    )
    if highest == "nan":
        numbers[-1] = math.nan
    elif highest == "ieee":
        numbers[exponent == exponent.max()] = math.nan
        numbers[(exponent == exponent.max()) & (mantissa == 0)] = math.inf
    grid = numbers[np.isfinite(numbers)]
    assert grid[-1] == largest

    def rounded(scaled: np.ndarray) -> np.ndarray:
        return _nearest(grid, np.abs(scaled)) + np.signbit(scaled) * sign

    return Element(1 + exponent_bits + mantissa_bits, np.concatenate([numbers, -numbers]), largest, rounded)


def _integer(bits: int, unit: float = 1.0) -> Element:
    """Two's complement; the most negative code is not written."""
    codes = np.arange(1 << bits)
    numbers = np.where(codes >= 1 << bits - 1, codes - (1 << bits), codes) * unit
    grid = numbers[: 1 << bits - 1]

    def rounded(scaled: np.ndarray) -> np.ndarray:
        return np.where(np.signbit(scaled), -_nearest(grid, np.abs(scaled)), _nearest(grid, np.abs(scaled))) % (
            1 << bits
        )

    return Element(bits, numbers, grid[-1], rounded)


ELEMENTS = {
    **{name: _float(*layout) for name, layout in FLOATS.items()},
    "int8": _integer(8),
    "int4": _integer(4),
    "mxint8": _integer(8, 1 / 64),
    "nf4": Element(
        4,
        np.array(NF4_LEVELS, np.float32).astype(float),
        1.0,
        lambda scaled: np.searchsorted(np.array(NF4_LIMITS, np.float32).astype(float), scaled, side="left"),
    ),
}


def block_of(name: str, options: dict) -> int | None:
    """Elements that share a scale."""
    return options.get("block_size", BLOCKS.get(name, 32 if name.startswith("mx") else 128))


def sylvester() -> np.ndarray:
    """The 32 x 32 Hadamard matrix: element (i, j) is -1 to the number of ones in the binary i AND j."""
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(ROTATED)] for i in range(ROTATED)])


def bfloat16_at_least(value: float) -> float:
    """The smallest bf16 number (8 significant bits) not below a positive `value` in the normal range."""
    mantissa, exponent = math.frexp(value)  # value = mantissa * 2^exponent, 1/2 <= mantissa < 1
    return math.ldexp(math.ceil(mantissa * 256), exponent - 8)


def packed(codes: np.ndarray, bits: int) -> bytes:
    """All codes as the digits of one number, the first the lowest: as bytes, the lowest first, that is the packing."""
    digits = np.unpackbits(np.asarray(codes, np.uint8)[:, None], axis=1, bitorder="little")[:, :bits]
    return np.packbits(digits.reshape(-1), bitorder="little").tobytes()


def padded(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % 16)


def shared_exponent(amax: float, name: str, scale_mode: str) -> int:
    """The exponent of an MX block's scale whose largest finite magnitude is `amax` (0 or an fp32 normal number)."""
    if amax == 0:
        return -127
    largest = ELEMENTS[name].largest
    exponent = math.frexp(amax)[1] - 1 - (math.frexp(largest)[1] - 1)
    if scale_mode == "rceil":
        exponent -= 2
        while math.ldexp(largest, exponent) < amax:
            exponent += 1
    return max(-127, min(127, exponent))


def dynamic_numbers() -> list[Fraction]:
    """The dynamic type of arXiv 2110.02861: zero bits behind the sign, each a factor of 1/10; a one; the fraction."""
    exact = [Fraction(0), Fraction(1)]
    for zeros in range(7):
        bits = 7 - zeros - 1
        for fraction in range(2**bits):
            magnitude = (Fraction(1, 10) + Fraction(9, 10) * Fraction(2 * fraction + 1, 2 ** (bits + 1))) / 10**zeros
            exact += [magnitude, -magnitude]
    return sorted(exact)


def _double(exact: np.ndarray, levels: np.ndarray) -> tuple[bytes, np.ndarray]:
    """(bytes, what they decode to) of fp32 scales: codes of the dynamic type in groups, their scales, and the mean."""
    f32 = np.float32
    offset = f32(math.fsum(exact.tolist()) / len(exact))
    limits = ((levels[1:].astype(float) + levels[:-1]) / 2).astype(f32)
    codes, group_scales, decoded = [], [], []
    for start in range(0, len(exact), GROUP):
        group = exact[start : start + GROUP] - offset
        group_scale = np.abs(group).max()
        own = np.searchsorted(limits, group * (f32(1) / max(group_scale, SMALLEST)), side="left")
        codes += own.tolist()
        group_scales.append(group_scale)
        largest = np.finfo(f32).max
        decoded += np.clip((levels[own] * group_scale + offset).astype(f32), f32(0), largest).tolist()
    return padded(bytes(codes)) + np.array([*group_scales, offset], f32).tobytes(), np.array(decoded, f32)


@np.errstate(all="ignore")
def encoded(values: np.ndarray, name: str, levels: np.ndarray | None = None, **options) -> tuple[bytes, np.ndarray]:
    """(payload, decoded float64 [n]) of fp32 [n], for all formats but those without codes.

    Decoded numbers are neither rounded to a dtype nor clamped to its range. `levels`: fp32, of the dynamic type, whose
    last bits no paper says.
    """
    if not len(values):
        return b"", np.zeros(0)
    if options.get("scales") == "tensor":
        return _tensor_scaled(values)
    element, count = ELEMENTS[name], len(values)
    if options.get("hadamard"):
        values = np.pad(values.astype(float), (0, -count % ROTATED)).reshape(-1, ROTATED) @ sylvester() / ROTATED
        values = values.reshape(-1).astype(np.float32)
    whole = ROTATED if options.get("hadamard") or name.startswith("mx") else math.lcm(8, element.bits) // element.bits
    codes_count = -(-len(values) // whole) * whole
    block = block_of(name, options) or codes_count
    blocks = np.pad(values, (0, -len(values) % block)).reshape(-1, block).astype(np.float32)
    finite = np.isfinite(blocks)
    if name.startswith("mx"):
        head, factors, scaled, spoiled = _mx_scaled(blocks, name, options.get("scale_mode", "rceil"))
    else:
        spoiled = ~finite.all(axis=1)
        amax = np.where(spoiled, np.float32(0), np.abs(blocks).max(axis=1))
        if options.get("double_quantize"):
            exact = amax / np.float32(element.largest)
            head, factors = _double(exact, levels)
            divisors = exact if name == "nf4" else factors
        elif name == "nf4":
            divisors = factors = amax
            head = np.where(spoiled, np.float32(math.nan), amax).astype(np.float32).tobytes()
        else:
            wanted = np.maximum(amax / np.float32(element.largest), SMALLEST)
            scales = [bfloat16_at_least(float(one)) if most else 0.0 for one, most in zip(wanted, amax)]
            divisors = factors = np.array(scales, np.float32)
            shown = np.where(spoiled, np.float32(math.nan), factors).astype(np.float32)
            head = (shown.view(np.uint32) >> 16).astype(np.uint16).tobytes()  # bf16 is the upper half of fp32
        scaled = blocks * (np.float32(1) / np.maximum(divisors, SMALLEST))[:, None]
        if options.get("double_quantize"):
            scaled = np.where(divisors[:, None] > 0, np.clip(scaled, -element.largest, element.largest), 0)
    # A spoiled block holds zeros; its scale says NaN.
    codes = element.rounded(np.where(finite & ~spoiled[:, None], scaled, 0.0).astype(float))
    if name in HOLDS_SPECIAL:
        codes = np.where(finite, codes, 0x7F)
        if name == "mxfp8_e5m2":
            codes = np.where(np.isinf(blocks), np.where(np.signbit(blocks), 0xFC, 0x7C), codes)
    numbers = element.numbers[codes]
    if options.get("hadamard"):  # before scaling, as sums of values could overflow
        numbers = (numbers.reshape(-1, ROTATED) @ sylvester()).reshape(numbers.shape)
    decoded = numbers * np.where(spoiled, math.nan, factors.astype(float))[:, None]
    body = packed(codes.reshape(-1)[:codes_count], element.bits)
    return padded(head) + padded(body), decoded.reshape(-1)[:count]


def _mx_scaled(blocks: np.ndarray, name: str, scale_mode: str) -> tuple[bytes, np.ndarray, np.ndarray, np.ndarray]:
    """(scale bytes, scales, blocks divided by them, which blocks are spoiled); fp32 subnormals are zeros."""
    blocks = np.where(np.abs(blocks) < SMALLEST, np.copysign(0.0, blocks), blocks.astype(float))
    finite = np.isfinite(blocks)
    amax = np.where(finite, np.abs(blocks), 0.0).max(axis=1)
    exponents = np.array([shared_exponent(each, name, scale_mode) for each in amax])
    spoiled = ~finite.all(axis=1) & (name not in HOLDS_SPECIAL)
    head = np.where(spoiled, 0xFF, exponents + 127).astype(np.uint8).tobytes()
    factors = 2.0**exponents
    return head, factors, blocks / factors[:, None], spoiled


def _tensor_scaled(values: np.ndarray) -> tuple[bytes, np.ndarray]:
    """FP8 E4M3 with one fp32 scale, NaN and Inf as the NaN code."""
    element, finite = ELEMENTS["fp8_e4m3"], np.isfinite(values)
    amax = np.abs(np.where(finite, values, 0)).max().astype(np.float32)
    scale = max(amax / np.float32(448), SMALLEST) if amax else np.float32(1)
    scaled = np.where(finite, values, 0).astype(np.float32) * (np.float32(1) / scale)
    codes = np.where(finite, element.rounded(scaled.astype(float)), 0x7F)
    return padded(scale.tobytes()) + padded(packed(codes, 8)), element.numbers[codes] * float(scale)


def bound_of_errors(values: np.ndarray, name: str, block_size: int, double_quantize: bool) -> np.ndarray:
    """float64 [n]: the largest error that an element may have, before it is rounded to a dtype.

    With s a block's exact scale and d the most by which the one that is decoded with may differ from it, NF4 (codes
    chosen with s) adds d to half of its widest step; integers and FP8 (chosen with the other) lose up to largest * d at
    the largest code, and their step is up to d wider.
    """
    numel, largest = len(values), ELEMENTS[name].largest
    x = np.pad(values.astype(float), (0, -numel % block_size))
    scale = np.abs(x.reshape(-1, block_size)).max(axis=1) / largest
    off = np.zeros_like(scale)
    if double_quantize:
        spread = np.pad(np.abs(scale - scale.mean()), (0, -len(scale) % GROUP)).reshape(-1, GROUP).max(axis=1)
        off = 0.9 / 2**6 / 2 * spread.repeat(GROUP)[: len(scale)]  # half of the dynamic type's widest step
        off += 2.0**-22 * (scale + scale.mean())
    scale, off = (each.repeat(block_size)[:numel] for each in (scale, off))
    wide = np.maximum(scale + off, 2.0**-126)
    if name == "nf4":
        step = (NF4_LEVELS[1] - NF4_LEVELS[0]) / 2 * np.maximum(scale, 2.0**-126)
    elif name == "fp8_e4m3":
        step = np.maximum(np.abs(values.astype(float)) * 2.0**-4, wide * 2.0**-10)
    else:
        step = wide / 2
    return step + largest * off + 2.0**-20 * np.abs(values.astype(float)) + 2.0**-126
