"""Functions on a tile of blocks, fp32 [blocks, elements of a block], that the kernels share.

They are the formulas of formats/ (block_scaled.py, integer.py, float8.py, hadamard.py) in the same
order of operations. Kernels must be launched with `enable_fp_fusion=False`: a product fused into the following addition
is rounded once instead of twice, and bytes would differ.
"""

import triton
import triton.language as tl

# Code and scale limits, by element. Kernels see globals only as constexpr.
EXPONENT_OF_INF = tl.constexpr(0x7F800000)
QUIET_NAN = tl.constexpr(0x7FC00000)
SMALLEST_SCALE = tl.constexpr(2.0**-126)
# 1.5 * 2^23: adding it to |v| < 2^22 leaves round-half-even(v) in the low bits of the sum.
ROUNDER = tl.constexpr(12582912.0)
ROUNDER_BITS = tl.constexpr(0x4B400000)


@triton.jit
def add_and_subtract(x, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr):
    """One stage of the butterfly: elements HALF apart become their sum and their difference."""
    pairs = tl.permute(tl.reshape(x, (BLOCKS, WIDTH // (2 * HALF), 2, HALF)), (0, 1, 3, 2))
    left, right = tl.split(pairs)
    out = tl.permute(tl.join(left + right, left - right), (0, 1, 3, 2))
    return tl.reshape(out, (BLOCKS, WIDTH))


@triton.jit
def rotate(x, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    """The unscaled Hadamard transform of groups of 32 along a tile's rows: formats/hadamard.py's butterfly."""
    x = add_and_subtract(x, BLOCKS, WIDTH, 1)
    x = add_and_subtract(x, BLOCKS, WIDTH, 2)
    x = add_and_subtract(x, BLOCKS, WIDTH, 4)
    x = add_and_subtract(x, BLOCKS, WIDTH, 8)
    return add_and_subtract(x, BLOCKS, WIDTH, 16)


@triton.jit
def block_scales(x, LARGEST: tl.constexpr):
    """Per block (bf16 scale as int16 bits, factor fp32 to multiply with, whether it holds NaN or Inf)."""
    # The largest magnitude by its bits: as integers NaN > Inf > every finite number.
    amax_bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    bad = amax_bits >= EXPONENT_OF_INF
    amax = amax_bits.to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32)), SMALLEST_SCALE)
    bits = (scale.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    bits = tl.where(bad, QUIET_NAN, tl.where(amax_bits == 0, 0, bits))
    divisor = tl.where(bad | (amax_bits == 0), 1.0, bits.to(tl.float32, bitcast=True))
    return (bits >> 16).to(tl.int16), tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), divisor), bad


@triton.jit
def float8_from_fp32(v, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Codes (int32) of |v| <= largest, ties to even, by integer operations; for devices without the instruction."""
    bits = v.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    shift: tl.constexpr = 23 - MANTISSA
    rounded = magnitude + ((1 << (shift - 1)) - 1) + ((magnitude >> shift) & 1)
    normal = (rounded >> shift) - ((127 - BIAS) << MANTISSA)
    # Subnormals: adding a power of two whose ulp is the subnormal step leaves the multiple of it in the low bits.
    step_exponent: tl.constexpr = 1 - BIAS - MANTISSA + 23
    anchor: tl.constexpr = 2.0**step_exponent
    anchor_bits: tl.constexpr = (step_exponent + 127) << 23
    small = magnitude.to(tl.float32, bitcast=True) + anchor
    subnormal = small.to(tl.int32, bitcast=True) - anchor_bits
    smallest_normal: tl.constexpr = (1 - BIAS + 127) << 23
    return sign | tl.where(magnitude < smallest_normal, subnormal, normal)


@triton.jit
def fp32_from_float8(codes, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Values of float8 codes (int32), NaN and Inf codes included, by integer operations."""
    magnitude = codes & 0x7F
    normal = ((magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    subnormal = magnitude.to(tl.float32) * (2.0 ** (1 - BIAS - MANTISSA))
    value = tl.where(magnitude < (1 << MANTISSA), subnormal, normal)
    if MANTISSA == 3:
        value = tl.where(magnitude == 0x7F, float("nan"), value)
    else:
        value = tl.where(magnitude == 0x7C, float("inf"), tl.where(magnitude > 0x7C, float("nan"), value))
    sign = (codes & 0x80) << 24
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def fp8_codes(v, E4M3: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """uint8 codes in E4M3 or E5M2 of |v| <= the largest number; the instruction saturates and knows NaN too.

    Not by the instruction where a kernel stores codes and decodes them too: NVIDIA's assembler (12.8, with Triton 3.6
    and 3.7) packs two pairs of codes in one instruction and takes their high bytes from a register of something else.
    On an H200 master weights came out as 0 and NaN, and residuals were wrong; the stored codes were right.
    """
    if not NATIVE_FP8:
        mantissa: tl.constexpr = 3 if E4M3 else 2
        bias: tl.constexpr = 7 if E4M3 else 15
        codes = float8_from_fp32(v, mantissa, bias).to(tl.uint8)
    elif E4M3:
        codes = v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        codes = v.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return codes


@triton.jit
def codes_of(scaled, ELEMENT: tl.constexpr, NATIVE_FP8: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    """uint8 code bytes [BLOCKS, WIDTH / codes per byte] of values with |v| <= the element's largest number."""
    if ELEMENT == "int8" or ELEMENT == "int4":
        # |v| is at most largest * (1 + 2^-22), so no clamp is needed.
        numbers = (scaled + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS
        if ELEMENT == "int8":
            codes = numbers.to(tl.int8).to(tl.uint8, bitcast=True)
        else:
            even, odd = tl.split(tl.reshape(numbers, (BLOCKS, WIDTH // 2, 2)))
            codes = ((even & 0xF) | ((odd & 0xF) << 4)).to(tl.uint8)
    else:
        tl.static_assert(ELEMENT == "fp8_e4m3" or ELEMENT == "fp8_e5m2", "no code here for this element")
        largest: tl.constexpr = 448.0 if ELEMENT == "fp8_e4m3" else 57344.0
        codes = fp8_codes(tl.minimum(tl.maximum(scaled, -largest), largest), ELEMENT == "fp8_e4m3", NATIVE_FP8)
    return codes


@triton.jit
def numbers_of(codes, ELEMENT: tl.constexpr, NATIVE_FP8: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    """fp32 [BLOCKS, WIDTH] of what `codes_of` gives, before scaling."""
    if ELEMENT == "int8":
        numbers = codes.to(tl.int8, bitcast=True).to(tl.float32)
    elif ELEMENT == "int4":
        signed = codes.to(tl.int8, bitcast=True)
        low = ((signed << 4) >> 4).to(tl.float32)
        high = (signed >> 4).to(tl.float32)
        numbers = tl.reshape(tl.join(low, high), (BLOCKS, WIDTH))
    else:
        tl.static_assert(ELEMENT == "fp8_e4m3" or ELEMENT == "fp8_e5m2", "no code here for this element")
        if NATIVE_FP8:
            dtype: tl.constexpr = tl.float8e4nv if ELEMENT == "fp8_e4m3" else tl.float8e5
            numbers = codes.to(dtype, bitcast=True).to(tl.float32)
        else:
            mantissa: tl.constexpr = 3 if ELEMENT == "fp8_e4m3" else 2
            numbers = fp32_from_float8(codes.to(tl.int32), mantissa, 7 if ELEMENT == "fp8_e4m3" else 15)
    return numbers


@triton.jit
def clamp_keeping_nan(values, LIMIT: tl.constexpr):
    """values within [-LIMIT, LIMIT]; NaN stays NaN."""
    values = tl.minimum(values, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(values, -LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def narrowed(values, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """fp32 values in DTYPE. Triton's interpreter truncates to bf16 instead of rounding, so there it is done on bits."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > EXPONENT_OF_INF, 0x7FC0, rounded)
        out = rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        out = values.to(DTYPE)
    return out


@triton.jit
def load_some(pointers, local, left, width_ok, WHOLE: tl.constexpr, MASKED_COLUMNS: tl.constexpr):
    """tl.load of the elements with local < left, else zero; all of them where the tile is WHOLE.

    A whole tile is loaded without a mask: a mask that may end anywhere would force one access an element.
    """
    if MASKED_COLUMNS:
        out = tl.load(pointers, mask=(local < left) & width_ok, other=0)
    elif WHOLE:
        out = tl.load(pointers)
    else:
        out = tl.load(pointers, mask=local < left, other=0)
    return out


@triton.jit
def store_some(pointers, values, local, left, width_ok, WHOLE: tl.constexpr, MASKED_COLUMNS: tl.constexpr):
    """tl.store of the elements with local < left; see load_some."""
    if MASKED_COLUMNS:
        tl.store(pointers, values, mask=(local < left) & width_ok)
    elif WHOLE:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=local < left)
