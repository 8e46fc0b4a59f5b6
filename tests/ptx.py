"""A few PTX instructions in numpy, from their description in the PTX ISA: inline assembly runs without a GPU.

Registers are uint32 arrays, a number per thread.
"""

from __future__ import annotations

import math
import re

import numpy as np

QUIET_NAN_BF16 = 0x7FFF
LARGEST_BF16 = 2.0**127 * (2 - 2.0**-7)


def _fp32(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def _bf16(bits: np.ndarray) -> np.ndarray:
    """float64 of bf16 bits in the low half."""
    return _fp32((bits & 0xFFFF) << 16).astype(np.float64)


def _to_bf16(values: np.ndarray) -> np.ndarray:
    """bf16 bits of float64 numbers: to nearest, ties to even; Inf beyond the largest."""
    bits = np.empty(values.shape, np.uint32)
    for place, value in np.ndenumerate(values):
        sign = 0x8000 if math.copysign(1.0, value) < 0 else 0
        if math.isnan(value):
            bits[place] = QUIET_NAN_BF16
            continue
        magnitude = abs(value)
        if magnitude not in (0.0, math.inf):
            exponent = max(math.frexp(magnitude)[1] - 8, -133)  # of the last of 8 significant bits, or of a subnormal
            magnitude = math.ldexp(float(np.rint(math.ldexp(magnitude, -exponent))), exponent)
        if magnitude > LARGEST_BF16:
            magnitude = math.inf
        bits[place] = sign | int(np.float32(magnitude).view(np.uint32)) >> 16
    return bits


def _by_halves(operation, *registers: np.ndarray) -> np.ndarray:
    lower = _to_bf16(operation(*(_bf16(register) for register in registers)))
    upper = _to_bf16(operation(*(_bf16(register >> 16) for register in registers)))
    return lower | upper << 16


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros_like(a)
    for i in range(4):
        nibble = selector >> (4 * i) & 0xF
        byte = (both >> (8 * (nibble & 7)).astype(np.uint64)).astype(np.uint32) & 0xFF
        byte = np.where(nibble & 8, np.where(byte & 0x80, 0xFF, 0), byte)
        out |= byte.astype(np.uint32) << (8 * i)
    return out


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    out = np.zeros_like(a)
    for index in range(8):
        terms = [x if index >> (2 - i) & 1 else ~x for i, x in enumerate((a, b, c))]
        out |= np.where(table >> index & 1, terms[0] & terms[1] & terms[2], 0).astype(np.uint32)
    return out


def _fma_bf16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    # The product is exact in float64. So is the sum where it is tested: one of its terms is 0, or all are integers.
    return a * b + c


_OPERATIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "sub.rn.f32": lambda a, b: (_fp32(a) - _fp32(b)).view(np.uint32),
    "mul.rn.f32": lambda a, b: (_fp32(a) * _fp32(b)).view(np.uint32),
    "cvt.rn.bf16x2.f32": lambda a, b: (
        _to_bf16(_fp32(b).astype(np.float64)) | _to_bf16(_fp32(a).astype(np.float64)) << 16
    ),
    "fma.rn.bf16x2": lambda a, b, c: _by_halves(_fma_bf16, a, b, c),
    "min.NaN.bf16x2": lambda a, b: _by_halves(np.minimum, a, b),  # numpy's minimum of NaN and a number is NaN
    "max.NaN.bf16x2": lambda a, b: _by_halves(np.maximum, a, b),
}


def run(block: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The registers after a block of PTX, by name ("$0", ...); numbers of all inputs must have one shape.

    Raises:
        KeyError: an instruction that is not there, or a register that nothing was written to.
    """
    registers = {name: np.asarray(values, np.uint32) for name, values in inputs.items()}
    shape = next(iter(registers.values())).shape

    def value_of(operand: str) -> np.ndarray:
        if operand.startswith(("0f", "0x")):
            return np.full(shape, int(operand[2:], 16), np.uint32)
        if operand.isdigit():
            return np.full(shape, int(operand), np.uint32)
        return registers[operand]

    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        for statement in re.sub(r"[{}]", "", re.sub(r"\.reg[^;]*;", "", block)).split(";"):
            if statement.strip():
                operation, operands = statement.strip().split(maxsplit=1)
                target, *sources = (operand.strip() for operand in operands.split(","))
                registers[target] = _OPERATIONS[operation](*map(value_of, sources))
    return registers
