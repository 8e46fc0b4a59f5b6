"""The MX formats on a tile of blocks, fp32 [blocks, 32]: formats/e8m0.py, mini_float.py and packing.py in kernels.

`elements.py` says what holds for all of these functions. An ELEMENT is a name of MX_NAMES, a SCALE one of SCALE_MODES.
"""

import triton
import triton.language as tl

from zeropp_fp8.formats.e8m0 import NAN_SCALE
from zeropp_fp8.formats.mini_float import INFINITY_CODE, NAN_CODE
from zeropp_fp8.kernels.elements import EXPONENT_OF_INF, clamp_keeping_nan, numbers_of

NAN_SCALE = tl.constexpr(NAN_SCALE)
INFINITY_CODE = tl.constexpr(INFINITY_CODE)
NAN_CODE = tl.constexpr(NAN_CODE)
SMALLEST_NORMAL = tl.constexpr(0x00800000)  # the bits of 2^-126
HALF_SMALLEST_NORMAL = tl.constexpr(0x00400000)


@triton.jit
def power_of_two(exponents):
    """fp32 2^(e - 127) for int32 0 <= e <= 254."""
    return tl.where(exponents == 0, HALF_SMALLEST_NORMAL, exponents << 23).to(tl.float32, bitcast=True)


@triton.jit
def mx_scale_blocks(x, ELEMENT: tl.constexpr, SCALE: tl.constexpr):
    """(E8M0 scales, int32 [blocks]; x divided by them, zero in a block whose scale is NaN)."""
    emax: tl.constexpr = (
        8 if ELEMENT == "mxfp8_e4m3" else 15 if ELEMENT == "mxfp8_e5m2" else 4 if ELEMENT == "mxfp6_e3m2"
        else 0 if ELEMENT == "mxint8" else 2
    )  # fmt: skip
    # The mantissa of the largest number: 1.984375 of INT8, 1.875 of E2M3, 1.5 of FP4, 1.75 of the others.
    largest_mantissa: tl.constexpr = (
        0x7E0000 if ELEMENT == "mxint8" else 0x700000 if ELEMENT == "mxfp6_e2m3" else 0x400000 if ELEMENT == "mxfp4"
        else 0x600000
    )  # fmt: skip
    carry: tl.constexpr = 0x7FFFFF - largest_mantissa if SCALE == "rceil" else 0
    holds_special: tl.constexpr = ELEMENT == "mxfp8_e4m3" or ELEMENT == "mxfp8_e5m2"
    bits = x.to(tl.int32, bitcast=True)
    magnitudes = bits & 0x7FFFFFFF
    if holds_special:
        amax = tl.max(tl.where(magnitudes < EXPONENT_OF_INF, magnitudes, 0), axis=1)
    else:
        amax = tl.max(magnitudes, axis=1)
    scales = (tl.where(amax < SMALLEST_NORMAL, 0, amax) + carry >> 23) - emax
    scales = tl.minimum(tl.maximum(scales, 0), 254)
    normal = tl.where(magnitudes < SMALLEST_NORMAL, bits & -0x80000000, bits).to(tl.float32, bitcast=True)
    scaled = normal * power_of_two(254 - scales)[:, None]
    if not holds_special:
        spoiled = amax >= EXPONENT_OF_INF
        scales = tl.where(spoiled, NAN_SCALE, scales)
        scaled = tl.where(spoiled[:, None], 0.0, scaled)
    return scales, scaled


@triton.jit
def mx_scale_values(scales):
    """fp32 X of int32 E8M0 scales."""
    return tl.where(scales == NAN_SCALE, float("nan"), power_of_two(scales))


@triton.jit
def round_magnitudes(scaled, ELEMENT: tl.constexpr):
    """(anchor + rounded magnitude, anchor), fp32: formats/mini_float.py `_steps`."""
    mantissa: tl.constexpr = (
        3 if ELEMENT == "mxfp8_e4m3" or ELEMENT == "mxfp6_e2m3" else 6 if ELEMENT == "mxint8"
        else 1 if ELEMENT == "mxfp4" else 2
    )  # fmt: skip
    min_exponent: tl.constexpr = (
        -6 if ELEMENT == "mxfp8_e4m3" else -14 if ELEMENT == "mxfp8_e5m2" else -2 if ELEMENT == "mxfp6_e3m2" else 0
    )
    largest: tl.constexpr = (
        448.0 if ELEMENT == "mxfp8_e4m3" else 57344.0 if ELEMENT == "mxfp8_e5m2" else 7.5 if ELEMENT == "mxfp6_e2m3"
        else 28.0 if ELEMENT == "mxfp6_e3m2" else 6.0 if ELEMENT == "mxfp4" else 1.984375
    )  # fmt: skip
    magnitudes = tl.minimum(tl.abs(scaled), largest)
    exponents = tl.maximum(magnitudes.to(tl.int32, bitcast=True) & EXPONENT_OF_INF, (127 + min_exponent) << 23)
    anchors = (exponents + ((23 - mantissa) << 23)).to(tl.float32, bitcast=True)
    return magnitudes + anchors, anchors


@triton.jit
def mx_codes_of(scaled, ELEMENT: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """int32 codes, one per element, of values divided by their blocks' scales."""
    bits = scaled.to(tl.int32, bitcast=True)
    fp8: tl.constexpr = ELEMENT == "mxfp8_e4m3" or ELEMENT == "mxfp8_e5m2"
    if NATIVE_FP8 and fp8:
        # The instruction clamps, also Inf, and makes NAN_CODE of NaN.
        if ELEMENT == "mxfp8_e4m3":
            codes = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        else:
            codes = scaled.to(tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        mantissa: tl.constexpr = (
            3 if ELEMENT == "mxfp8_e4m3" or ELEMENT == "mxfp6_e2m3" else 6 if ELEMENT == "mxint8"
            else 1 if ELEMENT == "mxfp4" else 2
        )  # fmt: skip
        min_exponent: tl.constexpr = (
            -6 if ELEMENT == "mxfp8_e4m3" else -14 if ELEMENT == "mxfp8_e5m2" else -2 if ELEMENT == "mxfp6_e3m2" else 0
        )
        rounded, anchors = round_magnitudes(scaled, ELEMENT)
        anchor_bits = anchors.to(tl.int32, bitcast=True)
        steps = rounded.to(tl.int32, bitcast=True) - anchor_bits
        if ELEMENT == "mxint8":
            sign = bits >> 31
            codes = (steps ^ sign) - sign
        else:
            width: tl.constexpr = 4 if ELEMENT == "mxfp4" else (8 if fp8 else 6)
            smallest_anchor: tl.constexpr = (127 + min_exponent + 23 - mantissa) << 23
            codes = steps + ((anchor_bits - smallest_anchor) >> (23 - mantissa))
            codes |= (bits >> (32 - width)) & (1 << (width - 1))
    if fp8:
        magnitudes = bits & 0x7FFFFFFF
        codes = tl.where(magnitudes >= EXPONENT_OF_INF, NAN_CODE, codes)
        if ELEMENT == "mxfp8_e5m2":
            codes = tl.where(magnitudes == EXPONENT_OF_INF, INFINITY_CODE | ((bits >> 24) & 0x80), codes)
    return codes


@triton.jit
def mx_round(scaled, ELEMENT: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """fp32 P: what the codes of `mx_codes_of` stand for."""
    bits = scaled.to(tl.int32, bitcast=True)
    if NATIVE_FP8 and ELEMENT == "mxfp8_e4m3":
        rounded = scaled.to(tl.float8e4nv).to(tl.float32)
    elif NATIVE_FP8 and ELEMENT == "mxfp8_e5m2":
        rounded = scaled.to(tl.float8e5).to(tl.float32)
    else:
        sums, anchors = round_magnitudes(scaled, ELEMENT)
        magnitudes = (sums - anchors).to(tl.int32, bitcast=True)
        rounded = (magnitudes | (bits & -0x80000000)).to(tl.float32, bitcast=True)
        if ELEMENT == "mxint8":
            rounded += 0.0  # -0 becomes 0, for which there is one code
    if ELEMENT == "mxfp8_e4m3":
        rounded = tl.where((bits & 0x7FFFFFFF) >= EXPONENT_OF_INF, float("nan"), rounded)
    elif ELEMENT == "mxfp8_e5m2":
        rounded = tl.where((bits & 0x7FFFFFFF) >= EXPONENT_OF_INF, scaled, rounded)
    return rounded


@triton.jit
def mx_numbers_of(codes, ELEMENT: tl.constexpr, NATIVE_FP8: tl.constexpr, BLOCKS: tl.constexpr):
    """fp32 [BLOCKS, 32] of int32 codes, one per element (FP6), or uint8 code bytes (the others), before scaling."""
    if ELEMENT == "mxfp8_e4m3":
        numbers = numbers_of(codes, "fp8_e4m3", NATIVE_FP8, BLOCKS, 32)
    elif ELEMENT == "mxfp8_e5m2":
        numbers = numbers_of(codes, "fp8_e5m2", NATIVE_FP8, BLOCKS, 32)
    elif ELEMENT == "mxint8":
        # 2^17 + (code + 128) / 64: that many 64ths are the last bits of a mantissa. Of conversions of integers Triton
        # 3.9's assembler makes code that spills a register.
        numbers = (codes.to(tl.int32) ^ 0x48000080).to(tl.float32, bitcast=True) - 131074.0
    else:
        if ELEMENT == "mxfp4":
            both = codes.to(tl.int32)
            codes = tl.reshape(tl.join(both & 0xF, both >> 4), (BLOCKS, 32))
        width: tl.constexpr = 4 if ELEMENT == "mxfp4" else 6
        mantissa: tl.constexpr = 1 if ELEMENT == "mxfp4" else (3 if ELEMENT == "mxfp6_e2m3" else 2)
        bias: tl.constexpr = 3 if ELEMENT == "mxfp6_e3m2" else 1
        # With its mantissa at the top of fp32's, a code is 2^(bias - 127) times its value, subnormals included.
        sign = (codes << (32 - width)) & -0x80000000
        magnitudes = (codes & ((1 << (width - 1)) - 1)) << (23 - mantissa)
        numbers = (magnitudes | sign).to(tl.float32, bitcast=True) * (2.0 ** (127 - bias))
    return numbers


@triton.jit
def mx_times_scales(numbers, scales, LIMIT: tl.constexpr, ELEMENT: tl.constexpr):
    """P * X within [-LIMIT, LIMIT], Inf and NaN kept; `scales` fp32 [blocks]."""
    products = numbers * scales[:, None]
    values = clamp_keeping_nan(products, LIMIT)
    if ELEMENT == "mxfp8_e5m2":
        values = tl.where(tl.abs(numbers) == float("inf"), products, values)
    return values


@triton.jit
def pack_four_bits(codes, BLOCKS: tl.constexpr):
    """uint8 [BLOCKS, 16] of int32 codes [BLOCKS, 32]."""
    even, odd = tl.split(tl.reshape(codes, (BLOCKS, 16, 2)))
    return (even | (odd << 4)).to(tl.uint8)


@triton.jit
def store_six_bits(pointers, codes, ok, BLOCKS: tl.constexpr):
    """Store int32 codes [BLOCKS, 32] as 24 bytes per block, 16 codes in three 32-bit words.

    `pointers`, to int32, and the mask `ok` are [BLOCKS, 2]: the first word of each three.
    """
    even, odd = tl.split(tl.reshape(codes, (BLOCKS, 8, 2, 2)))
    first, second = tl.split(even | (odd << 6))
    # 24 bits of 4 codes; groups 0, 1, 2, 3 make up three words.
    even, odd = tl.split(tl.reshape(first | (second << 12), (BLOCKS, 2, 2, 2)))
    group_0, group_2 = tl.split(even)
    group_1, group_3 = tl.split(odd)
    tl.store(pointers, group_0 | (group_1 << 24), mask=ok)
    tl.store(pointers + 1, (group_1 >> 8) | (group_2 << 16), mask=ok)
    tl.store(pointers + 2, (group_2 >> 16) | (group_3 << 8), mask=ok)


@triton.jit
def load_six_bits(pointers, ok, BLOCKS: tl.constexpr):
    """The inverse of store_six_bits; codes that are not loaded are 0."""
    word_0 = tl.load(pointers, mask=ok, other=0)
    word_1 = tl.load(pointers + 1, mask=ok, other=0)
    word_2 = tl.load(pointers + 2, mask=ok, other=0)
    group_0 = word_0 & 0xFFFFFF
    group_1 = ((word_0 >> 24) & 0xFF) | ((word_1 & 0xFFFF) << 8)
    group_2 = ((word_1 >> 16) & 0xFFFF) | ((word_2 & 0xFF) << 16)
    group_3 = (word_2 >> 8) & 0xFFFFFF
    groups = tl.reshape(tl.join(tl.join(group_0, group_2), tl.join(group_1, group_3)), (BLOCKS, 8))
    pairs = tl.join(groups & 0xFFF, groups >> 12)
    return tl.reshape(tl.join(pairs & 0x3F, pairs >> 6), (BLOCKS, 32))
