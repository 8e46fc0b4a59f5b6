"""Words of codes -> numbers in 16 bits, for kernels that multiply with them at once.

A word is 32 bits: 8 codes of 4 bits or 4 of 8, the first in the lowest bits. A code's number is

    round(number(code) * scale)        product in fp32, within the finite range, rounded to the weight's dtype

as `dequantize` writes it. An H200 has time for 4 instructions per code of 4 bits that it reads, loads and products
included; plain code takes 8. The PTX here makes two bf16 numbers at a time, in 1.9 instructions per number (int4), 2.3
(int8), 3.8 (int8 with scales of more than 8 bits) and 2.6 (by look-up), with the same results bit for bit:

    int4, int8    A code between the right bits of a bf16 number is that number plus the code, and subtracting it is
                  exact. So is the product with a bf16 scale in fp32: rounded to bf16 it is what bf16 arithmetic gives.
    look-up       With a scale of more than 8 bits the product is rounded twice. The 16 possible numbers of a block are
                  made once, in 8 registers of lower and upper bytes; `prmt` picks 4 bytes out of 8 by the codes.

Pair p of a word is p and p + half of them ("halves"), which a mask leaves in the halves of a register, or by look-up 2p
and 2p + 1 ("neighbours"). PTX clamps only where it is told to: at a scale above SAFE_SCALE.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from zeropp_fp8.formats.nf4 import NF4_LEVELS
from zeropp_fp8.kernels.elements import clamp_keeping_nan, narrowed

# The bits of 2^120 in fp32. Times a code of at most 128 it is at most 2^127.
SAFE_SCALE = tl.constexpr(0x7B800000)


def pairing(element: str, scale: str) -> str:
    """Which two numbers of a word make a pair: "halves" or "neighbours"."""
    return "halves" if element == "int8" or (element == "int4" and scale == "bf16") else "neighbours"


# -- PTX ------------------------------------------------------------------------------------------------------------


def _block(declarations: str, lines: list[str], clamped: list[str]) -> str:
    """A block of PTX, at its end with the bf16 pairs in some registers within +-the largest number; NaN stays NaN."""
    if clamped:
        declarations += ", most, least"
        lines = [*lines, "mov.b32 most, 0x7F7F7F7F;", "mov.b32 least, 0xFF7FFF7F;"]
    for register in clamped:
        lines = [*lines, f"min.NaN.bf16x2 {register}, {register}, most;"]
        lines = [*lines, f"max.NaN.bf16x2 {register}, {register}, least;"]
    return "\n".join(["{", f".reg .b32 {declarations};", *lines, "}"])


# fma is in compute capability 8.0 already, add and mul are not. A product plus -0 keeps the sign of a zero.
_CONSTANTS = ["mov.b32 one, 0x3F803F80;", "mov.b32 zero, 0x80008000;"]


def _int4_times_bf16(clamp: bool) -> str:
    """$0-$3: the pairs of word $4 times the bf16 scale in both halves of $5. (code ^ 8) | 0x4300 is code + 136."""
    out = ["$0", "$1", "$2", "$3"]
    lines = [*_CONSTANTS, "mov.b32 base, 0xC308C308;"]
    for pair, register in enumerate(out):
        source = "$4" if pair == 0 else "codes"
        lines += [f"shr.u32 codes, $4, {4 * pair};"] if pair else []
        lines += [f"lop3.b32 {register}, {source}, 0x000F000F, 0x43084308, 0x6A;"]  # (a & b) ^ c
    lines += [f"fma.rn.bf16x2 {register}, {register}, one, base;" for register in out]
    lines += [f"fma.rn.bf16x2 {register}, {register}, $5, zero;" for register in out]
    return _block("one, zero, base, codes", lines, out if clamp else [])


def _int8_times_bf16(clamp: bool) -> str:
    """$0, $1: the pairs of word $2 times the bf16 scale in both halves of $3.

    The lower 7 bits | 0x4300 are 128 + them; minus 128, or 256 (0x4380) where the sign bit is set, is the code.
    """
    out = ["$0", "$1"]
    lines = [*_CONSTANTS, "mov.b32 magic, 0x43004300;", "mov.b32 minus, 0xC300C300;"]
    for pair, register in enumerate(out):
        source = "$2" if pair == 0 else "codes"
        lines += ["shr.u32 codes, $2, 8;"] if pair else []
        lines += [
            f"lop3.b32 {register}, {source}, 0x007F007F, magic, 0xEA;",  # (a & b) | c
            f"lop3.b32 base, {source}, 0x00800080, minus, 0xEA;",
            f"fma.rn.bf16x2 {register}, {register}, one, base;",
        ]
    lines += [f"fma.rn.bf16x2 {register}, {register}, $3, zero;" for register in out]
    return _block("one, zero, base, codes, magic, minus", lines, out if clamp else [])


def _int8_times_fp32(clamp: bool) -> str:
    """$0, $1: the pairs of word $2 times the fp32 scale $3. 0x4B0000 and the byte code ^ 0x80 are 2^23 + 128 + code."""
    lines = ["xor.b32 codes, $2, 0x80808080;"]
    for byte in range(4):
        lines += [
            f"prmt.b32 wide, codes, 0x4B000000, 0x754{byte};",
            f"mov.b32 number{byte}, wide;",
            f"sub.rn.f32 number{byte}, number{byte}, 0f4B000080;",
            f"mul.rn.f32 number{byte}, number{byte}, $3;",
        ]
    lines += ["cvt.rn.bf16x2.f32 $0, number2, number0;", "cvt.rn.bf16x2.f32 $1, number3, number1;"]
    return _block("codes, wide;\n.reg .f32 number<4>;\n.reg .b32 unused", lines, ["$0", "$1"] if clamp else [])


def _numbers_of_block(levels: tuple[float, ...], clamp: bool) -> str:
    """$0-$3: the lower bytes of the 16 levels times the fp32 scale $8, in bf16; $4-$7: the upper bytes."""
    pairs = [f"pair{i}" for i in range(8)]
    made = [
        f"mul.rn.f32 number{code}, $8, 0f{struct.pack('>f', level).hex().upper()};" for code, level in enumerate(levels)
    ]
    made += [f"cvt.rn.bf16x2.f32 {pair}, number{2 * i + 1}, number{2 * i};" for i, pair in enumerate(pairs)]
    parted = []
    for i in range(4):
        parted.append(f"prmt.b32 ${i}, pair{2 * i}, pair{2 * i + 1}, 0x6420;")
        parted.append(f"prmt.b32 ${i + 4}, pair{2 * i}, pair{2 * i + 1}, 0x7531;")
    made = [_block("unused", made, pairs if clamp else [])]
    return _block("pair<8>;\n.reg .f32 number<16>;\n.reg .b32 unused", [*made, *parted], [])


def _looked_up() -> str:
    """$0-$3: the pairs of word $4 from the registers $5-$12 of `_numbers_of_block`.

    The lower three bits of a code pick a byte out of 8; the fourth, of the two that were picked, one.
    """
    lines = [
        "and.b32 which, $4, 0x77777777;",
        "shr.u32 half, $4, 1;",
        "lop3.b32 half, half, 0x44444444, 0x32103210, 0xEA;",
    ]
    for i in (0, 2):  # 4 codes each
        lines += ["shr.u32 which, which, 16;", "shr.u32 half, half, 16;"] if i else []
        for name, first in (("low", 5), ("high", 9)):
            lines += [
                f"prmt.b32 front, ${first}, ${first + 1}, which;",
                f"prmt.b32 back, ${first + 2}, ${first + 3}, which;",
                f"prmt.b32 {name}, front, back, half;",
            ]
        lines += [f"prmt.b32 ${i}, low, high, 0x5140;", f"prmt.b32 ${i + 1}, low, high, 0x7362;"]
    return _block("which, half, front, back, low, high", lines, [])


_INT4_LEVELS = tuple(float((code ^ 8) - 8) for code in range(16))
INT4_TIMES_BF16 = tl.constexpr(_int4_times_bf16(False))
INT4_TIMES_BF16_CLAMPED = tl.constexpr(_int4_times_bf16(True))
INT8_TIMES_BF16 = tl.constexpr(_int8_times_bf16(False))
INT8_TIMES_BF16_CLAMPED = tl.constexpr(_int8_times_bf16(True))
INT8_TIMES_FP32 = tl.constexpr(_int8_times_fp32(False))
INT8_TIMES_FP32_CLAMPED = tl.constexpr(_int8_times_fp32(True))
INT4_NUMBERS = tl.constexpr(_numbers_of_block(_INT4_LEVELS, False))
INT4_NUMBERS_CLAMPED = tl.constexpr(_numbers_of_block(_INT4_LEVELS, True))
NF4_NUMBERS = tl.constexpr(_numbers_of_block(NF4_LEVELS, False))
NF4_NUMBERS_CLAMPED = tl.constexpr(_numbers_of_block(NF4_LEVELS, True))
LOOKED_UP = tl.constexpr(_looked_up())


# -- in a kernel ----------------------------------------------------------------------------------------------------


@triton.jit
def repeated(values, TIMES: tl.constexpr):
    """[R] -> [TIMES * R, 1]: all of them, TIMES times over. No data moves: the same registers."""
    rows: tl.constexpr = values.shape[0]
    return tl.reshape(tl.broadcast_to(values[None, :], (TIMES, rows)), (TIMES * rows, 1))


@triton.jit
def halves_of(words, DTYPE: tl.constexpr):
    """int32 [...] -> 16-bit DTYPE [..., 2]: the lower and the upper half of each word."""
    lower = words.to(tl.int16).to(DTYPE, bitcast=True)
    return tl.join(lower, (words >> 16).to(tl.int16).to(DTYPE, bitcast=True))


@triton.jit
def in_both_halves(scales, TIMES: tl.constexpr):
    """int32 [TIMES * R, 1] of bf16 scales [R]: a scale in each half of a word."""
    bits = scales.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return repeated(bits | (bits << 16), TIMES)


@triton.jit
def pairs_of_int4(words, scales, TIMES: tl.constexpr, CLAMP: tl.constexpr):
    """The four pairs of words of int4 with bf16 scales."""
    return tl.inline_asm_elementwise(
        INT4_TIMES_BF16_CLAMPED if CLAMP else INT4_TIMES_BF16,
        "=&r,=&r,=&r,=&r,r,r",
        [words, in_both_halves(scales, TIMES)],
        (tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def pairs_of_int8(words, scales, TIMES: tl.constexpr, CLAMP: tl.constexpr):
    """The two pairs of words of int8, with bf16 or fp32 scales."""
    if scales.dtype == tl.bfloat16:
        assembly: tl.constexpr = INT8_TIMES_BF16_CLAMPED if CLAMP else INT8_TIMES_BF16
        constraints: tl.constexpr = "=&r,=&r,r,r"
        factors = in_both_halves(scales, TIMES)
    else:
        assembly: tl.constexpr = INT8_TIMES_FP32_CLAMPED if CLAMP else INT8_TIMES_FP32
        constraints: tl.constexpr = "=&r,=&r,r,f"
        factors = repeated(scales, TIMES)
    outputs: tl.constexpr = (tl.int32, tl.int32)
    return tl.inline_asm_elementwise(assembly, constraints, [words, factors], outputs, is_pure=True, pack=1)


@triton.jit
def pairs_looked_up(words, scales, TIMES: tl.constexpr, ELEMENT: tl.constexpr, CLAMP: tl.constexpr):
    """The four pairs of words of 4-bit codes with fp32 scales, out of a block's 16 numbers."""
    if ELEMENT == "nf4":
        numbers: tl.constexpr = NF4_NUMBERS_CLAMPED if CLAMP else NF4_NUMBERS
    else:
        numbers: tl.constexpr = INT4_NUMBERS_CLAMPED if CLAMP else INT4_NUMBERS
    a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
        numbers,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,f",
        [scales],
        (tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    a, b, c, d = repeated(a, TIMES), repeated(b, TIMES), repeated(c, TIMES), repeated(d, TIMES)
    e, f, g, h = repeated(e, TIMES), repeated(f, TIMES), repeated(g, TIMES), repeated(h, TIMES)
    return tl.inline_asm_elementwise(
        LOOKED_UP,
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
        [words, a, b, c, d, e, f, g, h],
        (tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def words_of_pairs_with_ptx(words, scales, TIMES: tl.constexpr, ELEMENT: tl.constexpr, CLAMP: tl.constexpr):
    """Pairs 0, 1, 2 and 3 (with int8: 0, 1, 0 and 1) of words int32 [TIMES * R, C], two bf16 numbers in an int32 each.

    `scales`: bf16 or fp32 [R], each for TIMES rows of words.
    """
    if ELEMENT == "int8":
        first, second = pairs_of_int8(words, scales, TIMES, CLAMP)
        return first, second, first, second
    elif scales.dtype == tl.bfloat16:
        return pairs_of_int4(words, scales, TIMES, CLAMP)
    else:
        return pairs_looked_up(words, scales, TIMES, ELEMENT, CLAMP)


@triton.jit
def numbers_of_codes(codes, scales, lookup_ptr, ELEMENT: tl.constexpr, DTYPE: tl.constexpr, LIMIT: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip  # noqa: E501
    """Numbers in DTYPE of codes in the lowest bits of int32 numbers, whose other bits do not matter; on any device.

    `scales`: fp32, broadcasting to the codes. `lookup_ptr`: fp32, the 16 levels of NF4.
    """
    if ELEMENT == "int8":
        numbers = codes.to(tl.int8).to(tl.float32)
    elif ELEMENT == "int4":
        numbers = (((codes & 0xF) ^ 8) - 8).to(tl.float32)
    else:
        numbers = tl.load(lookup_ptr + (codes & 0xF))
    return narrowed(clamp_keeping_nan(numbers * scales, LIMIT), DTYPE, INTERPRETED)


@triton.jit
def pair_of_words(words, scales, lookup_ptr, PAIR: tl.constexpr, PAIRING: tl.constexpr, ELEMENT: tl.constexpr, DTYPE: tl.constexpr, LIMIT: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip  # noqa: E501
    """Pair number PAIR of words int32 [R, C], DTYPE [R, C, 2], with fp32 scales [R, 1]; on any device."""
    bits: tl.constexpr = 8 if ELEMENT == "int8" else 4
    first: tl.constexpr = PAIR * bits if PAIRING == "halves" else 2 * PAIR * bits
    second: tl.constexpr = first + (16 if PAIRING == "halves" else bits)
    return tl.join(
        numbers_of_codes(words >> first, scales, lookup_ptr, ELEMENT, DTYPE, LIMIT, INTERPRETED),
        numbers_of_codes(words >> second, scales, lookup_ptr, ELEMENT, DTYPE, LIMIT, INTERPRETED),
    )
