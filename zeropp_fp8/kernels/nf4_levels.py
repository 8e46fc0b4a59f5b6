"""Bytes of two NF4 codes -> their levels in fp32.

The levels are 16 arbitrary numbers. Looked up in memory, one load an element, decoding moves 65 to 69 % of what a copy
moves on an H200; chosen by comparisons they would take 15 selects an element, where there is time for 17 instructions
in all (1.7e12 elements per second). The PTX here holds the 64 bytes of the table in 16 registers, byte plane by byte
plane, and `prmt` picks 4 bytes out of 8 by the codes themselves: 5.6 instructions per element, no memory.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from zeropp_fp8.formats.nf4 import NF4_LEVELS

_PLANES = 4  # bytes of an fp32 number
_WORDS = 4  # registers that hold one byte of 16 levels


def _levels_of_bytes() -> str:
    """$0-$3: bits of the levels of the lower codes of the 4 bytes of $8; $4-$7: of their upper codes.

    The lower three bits of a code pick a byte out of 8; the fourth, of the two that were picked, one. The bytes of four
    codes are then put together to four numbers.
    """
    table = [struct.pack("<f", level) for level in NF4_LEVELS]
    lines = []
    for plane in range(_PLANES):
        column = bytes(number[plane] for number in table)
        for word in range(_WORDS):
            (bits,) = struct.unpack("<I", column[4 * word : 4 * word + 4])
            lines.append(f"mov.b32 plane{4 * plane + word}, 0x{bits:08X};")
    lines += [
        "and.b32 which, $8, 0x77777777;",
        "shr.u32 half, $8, 1;",
        "lop3.b32 half, half, 0x44444444, 0x32103210, 0xEA;",  # (a & b) | c
    ]
    for quarter in (0, 1):  # 4 codes each, those of two bytes
        lines += ["shr.u32 which, which, 16;", "shr.u32 half, half, 16;"] if quarter else []
        for plane in range(_PLANES):
            lines += [
                f"prmt.b32 front, plane{4 * plane}, plane{4 * plane + 1}, which;",
                f"prmt.b32 back, plane{4 * plane + 2}, plane{4 * plane + 3}, which;",
                f"prmt.b32 byte{plane}, front, back, half;",
            ]
        for pair, selector in enumerate(("0x5140", "0x7362")):  # the codes of one byte: lower, upper
            place = 2 * quarter + pair
            lines += [
                f"prmt.b32 front, byte0, byte1, {selector};",
                f"prmt.b32 back, byte2, byte3, {selector};",
                f"prmt.b32 ${place}, front, back, 0x5410;",
                f"prmt.b32 ${place + 4}, front, back, 0x7632;",
            ]
    return "\n".join(["{", ".reg .b32 plane<16>, byte<4>, which, half, front, back;", *lines, "}"])


LEVELS_OF_BYTES = tl.constexpr(_levels_of_bytes())


@triton.jit
def nf4_numbers_of(codes, levels_ptr, PTX: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    """fp32 [BLOCKS, WIDTH] of uint8 bytes of two NF4 codes: by PTX, or looked up in fp32 [16] in memory."""
    if PTX:
        low, high = tl.inline_asm_elementwise(
            LEVELS_OF_BYTES, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [codes], (tl.int32, tl.int32), is_pure=True, pack=4
        )
        low, high = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    else:
        low = tl.load(levels_ptr + (codes & 0xF).to(tl.int32))
        high = tl.load(levels_ptr + (codes >> 4).to(tl.int32))
    return tl.reshape(tl.join(low, high), (BLOCKS, WIDTH))
