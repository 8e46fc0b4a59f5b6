"""The common part of casts of matrices: tiles of a matrix, scales, codes, and both copies of a tile.

Formulas and their order are those of compute/casts.py. Kernels must be launched with `enable_fp_fusion=False`.

A program reads a tile once and writes its codes twice, plain and transposed (through shared memory), 16 bytes at a time
despite masks: `columns` is a multiple of 16, which Triton knows, and so are the copies' padded rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from zeropp_fp8.formats.float8 import MATRIX_DTYPES
from zeropp_fp8.kernels.elements import SMALLEST_SCALE, fp8_codes
from zeropp_fp8.kernels.launching import PLANS, Kernel, Plan
from zeropp_fp8.kernels.wire.launch_tables import native_float8

ALIGNMENT = 16  # of a row of codes, in bytes
BLOCK = 128
LARGEST_SIDE = 2**31 - BLOCK  # indices of rows and columns are int32
LARGEST_CODE = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}

NAN_CODE = tl.constexpr(0x7F)


# -- in a kernel ----------------------------------------------------------------------------------------------------


@triton.jit
def numbers_of(values):
    """fp32 of a tile as it is stored, NaN where NaN or Inf: x * 0 is one of 0 and NaN."""
    x = values.to(tl.float32)
    return tl.fma(x, 0.0, x)


@triton.jit
def larger(number, other):
    """max(number, other), or number where other is NaN (tl.maximum differs between a GPU and Triton's interpreter)."""
    return tl.where(other > number, other, number)


@triton.jit
def amax_of(x, AXIS: tl.constexpr):
    """The largest magnitude along an axis of `numbers_of` a tile, NaN left out; 0 where nothing else is there."""
    # tl.max of numbers and NaN is the largest number.
    return larger(0.0, tl.max(tl.abs(x), axis=AXIS))


@triton.jit
def scale_of_amax(amax, LARGEST: tl.constexpr):
    """The multiplier of decoding for fp32 `amax`, a scalar or a tile: compute/casts.py `scale_of_amax`."""
    scale = tl.maximum(tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32)), SMALLEST_SCALE)
    return tl.where(amax == 0.0, 1.0, scale)


@triton.jit
def reciprocal(scale):
    """1 / scale, correctly rounded."""
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def exponential(x, INTERPRETED: tl.constexpr):
    """CUDA's expf, which torch calls; tl.exp is an approximation that rounds some results to another bf16 number."""
    return tl.exp(x) if INTERPRETED else libdevice.exp(x)


@triton.jit
def codes_of(x, inverse, LARGEST: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """uint8 codes of fp32 x * inverse, saturating; NAN_CODE where the product is NaN."""
    scaled = x * inverse
    if NATIVE_FP8:
        codes = fp8_codes(scaled, LARGEST == 448.0, True)
    else:
        is_nan = scaled != scaled
        scaled = tl.minimum(tl.maximum(tl.where(is_nan, 0.0, scaled), -LARGEST), LARGEST)
        codes = tl.where(is_nan, NAN_CODE, fp8_codes(scaled, LARGEST == 448.0, False)).to(tl.uint8)
    return codes


@triton.jit
def tile_of_program(columns, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """(first row, first column) of a program; neighbours in the grid are neighbours along a row."""
    tiles_in_row = (columns + TILE_COLUMNS - 1) // TILE_COLUMNS
    tile = tl.program_id(0)
    return (tile // tiles_in_row) * TILE_ROWS, (tile % tiles_in_row) * TILE_COLUMNS


@triton.jit
def load_tile(matrix_ptr, first_row, first_column, rows, columns, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """A tile of a contiguous matrix [rows, columns] as it is stored, zeros beyond its end."""
    row = first_row + tl.arange(0, TILE_ROWS)
    column = first_column + tl.arange(0, TILE_COLUMNS)
    pointers = matrix_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
    return tl.load(pointers, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0)


@triton.jit
def store_tile(out_ptr, values, first_row, first_column, rows, columns):
    """Write a tile of a contiguous matrix [rows, columns]; what lies beyond its end is dropped."""
    row = first_row + tl.arange(0, values.shape[0])
    column = first_column + tl.arange(0, values.shape[1])
    pointers = out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(pointers, values, mask=(row < rows)[:, None] & (column < columns)[None, :])


# -- launching ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)  # one is as good as its identity, which needs no Python to be hashed
class Launch:
    """How a kernel is cut into programs: the sides of a program's tile, its warps, a thread's registers (None: any)."""

    tile_rows: int
    tile_columns: int
    num_warps: int
    max_registers: int | None = None

    def options(self) -> dict:
        options = {"num_warps": self.num_warps, "enable_fp_fusion": False}
        if self.max_registers is not None and torch.version.hip is None:
            options["maxnreg"] = self.max_registers
        return options


@dataclass(frozen=True)
class Form:
    """The compile-time constants of a cast, which kernels and their parts take whole.

    Attributes:
        plain, transposed: which copies are made.
        largest: magnitude of a code.
        native_fp8: whether the device makes codes by an instruction.
        rows, columns: of a program's tile.
    """

    plain: bool
    transposed: bool
    largest: float
    native_fp8: bool
    rows: int
    columns: int


class CastPlan:
    """Casts of matrices that differ in their numbers only; all that follows from the rest is worked out once.

    Attributes:
        launch: launches the kernel; it takes the tensors.
        form: of the kernel.

    Args:
        shape, matrix_dtype, device: of the matrices, on which a program has a tile each.
        dtype: of codes.
        plain, transposed: which copies are made, at least one.
        right: which of the two a GEMM takes as its second operand.
        multiple: elements that the length of a row of codes is rounded up to.
        lengths: integers that follow those of the matrices.
        constants: of the kernel, by name.

    Raises:
        TypeError: matrices of another dtype than bf16, fp16 or fp32.
    """

    def __init__(
        self,
        kernel: Kernel,
        launch: Launch,
        shape: torch.Size,
        matrix_dtype: torch.dtype,
        device: torch.device,
        dtype: torch.dtype,
        plain: bool,
        transposed: bool,
        right: tuple[bool, bool],
        multiple: int,
        lengths: tuple[int, ...] = (),
        **constants,
    ) -> None:
        if matrix_dtype not in MATRIX_DTYPES:
            raise TypeError(f"casts take matrices of {MATRIX_DTYPES}, not of {matrix_dtype}")
        rows, columns = shape
        lying = (rows, -(-columns // multiple) * multiple), (columns, -(-rows // multiple) * multiple)
        self._copies = [
            ((tuple(reversed(sizes)), (1, sizes[1])) if is_right else (sizes, (sizes[1], 1))) if made else None
            for sizes, made, is_right in zip(lying, (plain, transposed), right)
        ]
        self._memory = {"dtype": dtype, "device": device}
        sides = launch.tile_rows, launch.tile_columns
        self.form = Form(plain, transposed, LARGEST_CODE[dtype], native_float8(device), *sides)
        numbers = rows, columns, lying[0][1] if plain else 0, lying[1][1] if transposed else 0, *lengths
        grid = (tiles(rows, columns, *sides),)
        self.launch = Plan(kernel, grid, numbers, {"FORM": self.form, **constants, **launch.options()})

    def empty(self) -> tuple[Tensor | None, Tensor | None]:
        """Uninitialised codes [R, C rounded up] and [C, R rounded up], or their transposes where these are `right`.

        Kernels write the padding too.
        """
        copy, copy_t = self._copies  # torch.empty takes twice as long
        return (
            None if copy is None else torch.empty_strided(*copy, **self._memory),
            None if copy_t is None else torch.empty_strided(*copy_t, **self._memory),
        )


cast_plan = functools.lru_cache(PLANS)(CastPlan)  # made once of equal arguments


def tiles(rows: int, columns: int, tile_rows: int, tile_columns: int) -> int:
    """Programs of a launch with a tile each.

    Raises:
        ValueError: a side that does not fit 32 bits.
    """
    if max(rows, columns) > LARGEST_SIDE:
        raise ValueError(f"the kernels take matrices with sides up to {LARGEST_SIDE}, not {rows} x {columns}")
    return -(-rows // tile_rows) * -(-columns // tile_columns)  # triton.cdiv makes ten Python calls
