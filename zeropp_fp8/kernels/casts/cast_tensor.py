"""A matrix to FP8 with one scale, plain and transposed: one read with a given scale, two with the matrix' own.

    codes[r, c] = codes_t[c, r] = FP8(clamp(x[r, c] / scale)),    scale = max(amax / largest, 2^-126)

The amax pass leaves a partial amax per program; each program of the cast reduces all of them (2 KB, they stay in
cache). That takes neither an atomic operation nor zeroed memory, so it costs no launch.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.kernels.casts.matrices import (
    ALIGNMENT,
    Launch,
    amax_of,
    cast_plan,
    codes_of,
    larger,
    load_tile,
    numbers_of,
    reciprocal,
    scale_of_amax,
    store_tile,
    tile_of_program,
)
from zeropp_fp8.kernels.launching import PLANS, Kernel, Plan

# 128 codes of a row are a cache line of the transposed copy.
CAST = Launch(tile_rows=128, tile_columns=64, num_warps=4)
# Programs of the amax pass: 4 for each of an H200's 132 multiprocessors, so that enough loads are under way. A power
# of two, for the cast loads their results as one tile.
LARGEST_PARTIALS = 512
_AMAX_TILE = 8192  # elements a program looks at before it goes on: 4 loads of 16 bytes per thread
_AMAX_WARPS = 8


@Kernel
@triton.jit
def partial_amax_kernel(matrix_ptr, partials_ptr, numel, TILE: tl.constexpr):
    """Program p: the largest finite magnitude of tiles p, p + programs, p + 2 * programs ..."""
    local = tl.arange(0, TILE)
    largest = tl.zeros((TILE,), tl.float32)
    step = tl.num_programs(0).to(tl.int64) * TILE
    for start in range(tl.program_id(0).to(tl.int64) * TILE, numel, step):
        x = tl.load(matrix_ptr + start + local, mask=start + local < numel, other=0)
        largest = larger(largest, tl.abs(numbers_of(x)))
    tl.store(partials_ptr + tl.program_id(0), tl.max(largest, axis=0))


@triton.jit
def scale_of_partials(partials_ptr, num_partials, scale_ptr, amax_ptr, LARGEST: tl.constexpr, RECORD: tl.constexpr, PARTIALS: tl.constexpr):  # fmt: skip  # noqa: E501
    """The scale of the whole matrix; program 0 writes it, and the amax where it is asked for."""
    place = tl.arange(0, PARTIALS)
    amax = tl.max(tl.load(partials_ptr + place, mask=place < num_partials, other=0.0), axis=0)
    scale = scale_of_amax(amax, LARGEST)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
        if RECORD:
            tl.store(amax_ptr, tl.maximum(tl.load(amax_ptr), amax))
    return scale


@triton.jit
def record_amax(amax_ptr, x):
    """amax = max(amax, the tile's), in any order of programs: the bits of numbers >= 0 are ordered as they are."""
    bits = amax_of(tl.max(tl.abs(x), axis=1), 0).to(tl.int32, bitcast=True)
    # Few tiles raise what is already there. The others need no atomic operation, for which all would queue up.
    seen = tl.load(amax_ptr).to(tl.int32, bitcast=True)
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)), bits, mask=bits > seen, sem="relaxed")


@triton.jit
def cast_tile(
    values,
    inverse,
    plain_ptr,
    transposed_ptr,
    first_row,
    first_column,
    rows,
    columns,
    plain_length,
    transposed_length,
    FORM: tl.constexpr,
):
    """Write the codes of a tile as it is stored, [FORM.rows, FORM.columns], to one or both copies, with their padding.

    The tile is transposed before it is encoded, in 16 bits: for these there is an instruction (ldmatrix); single bytes
    would take a load from shared memory each.
    """
    if FORM.plain:
        codes = codes_of(numbers_of(values), inverse, FORM.largest, FORM.native_fp8)
        store_tile(plain_ptr, codes, first_row, first_column, rows, plain_length)
    if FORM.transposed:
        # Where both copies of 32-bit numbers go through the instruction, Triton (3.6) encodes once, moves the FP8 codes
        # through shared memory and loses their order: 37 % of the transposed codes were wrong on an H200.
        native: tl.constexpr = FORM.native_fp8 and not (FORM.plain and values.dtype.primitive_bitwidth == 32)
        codes = codes_of(numbers_of(tl.trans(values)), inverse, FORM.largest, native)
        store_tile(transposed_ptr, codes, first_column, first_row, columns, transposed_length)


# Scales and amaxes lie anywhere in the tables of a delayed scaling: specializing on it would compile the kernel twice.
@Kernel
@triton.jit(do_not_specialize=["num_partials"], do_not_specialize_on_alignment=["scale_ptr", "amax_ptr"])
def cast_tensor_kernel(
    matrix_ptr,
    plain_ptr,
    transposed_ptr,
    scale_ptr,
    partials_ptr,
    amax_ptr,
    rows,
    columns,
    plain_length,
    transposed_length,
    num_partials,
    CURRENT: tl.constexpr,
    COPY: tl.constexpr,
    RECORD: tl.constexpr,
    PARTIALS: tl.constexpr,
    FORM: tl.constexpr,
):
    """One program: one tile. With COPY, `partials_ptr` gets the given scale."""
    first_row, first_column = tile_of_program(columns, FORM.rows, FORM.columns)
    values = load_tile(matrix_ptr, first_row, first_column, rows, columns, FORM.rows, FORM.columns)
    if CURRENT:
        scale = scale_of_partials(partials_ptr, num_partials, scale_ptr, amax_ptr, FORM.largest, RECORD, PARTIALS)
    else:
        scale = tl.load(scale_ptr)
        if COPY and tl.program_id(0) == 0:
            tl.store(partials_ptr, scale)
        if RECORD:
            record_amax(amax_ptr, numbers_of(values))
    cast_tile(
        values, reciprocal(scale), plain_ptr, transposed_ptr, first_row, first_column, rows, columns, plain_length,
        transposed_length, FORM,
    )  # fmt: skip


def partial_amax(matrix: Tensor) -> Tensor:
    """fp32 [n], n <= 512: their maximum is the largest finite magnitude of a contiguous bf16, fp16 or fp32 tensor."""
    numel, device = matrix.numel(), matrix.device
    partials = torch.empty_strided((_amax_programs(numel),), (1,), dtype=torch.float32, device=device)
    _amax_plan(numel, matrix.dtype, device)(matrix, partials)
    return partials


def _amax_programs(numel: int) -> int:
    return min(LARGEST_PARTIALS, -(-numel // _AMAX_TILE))  # triton.cdiv makes ten Python calls


@functools.lru_cache(PLANS)
def _amax_plan(numel: int, dtype: torch.dtype, device: torch.device) -> Plan:
    constants = {"TILE": _AMAX_TILE, "num_warps": _AMAX_WARPS}
    return Plan(partial_amax_kernel, (_amax_programs(numel),), (numel,), constants)


def cast_tensor(
    matrix: Tensor,
    dtype: torch.dtype,
    plain: bool,
    transposed: bool,
    scale: Tensor | None = None,
    amax_out: Tensor | None = None,
    right: tuple[bool, bool] = (False, False),
    own_scale: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Cast a matrix with one scale.

    Args:
        matrix: bf16, fp16 or fp32 [R, C], contiguous.
        dtype: of the codes.
        plain, transposed: which copies to make, at least one.
        scale: fp32 [1]; None: the matrix' own.
        amax_out: fp32 [1], becomes the maximum of itself and the matrix' largest finite magnitude; or None.
        right: which of the two copies a GEMM takes as its second operand.
        own_scale: give back a copy of `scale`.

    Returns:
        (codes [R, C rounded up to a multiple of 16] or None, codes [C, R rounded up] or None, the scale); the transpose
        of codes that are `right`.
    """
    partials, made, current = None, None, scale is None
    if current or own_scale:
        made = torch.empty_strided((1,), (1,), dtype=torch.float32, device=matrix.device)
    if current:
        partials, scale = partial_amax(matrix), made
    key = matrix.shape, matrix.dtype, matrix.device, dtype, plain, transposed, right, ALIGNMENT
    lengths = (partials.numel() if current else 0,)
    flags = {"CURRENT": current, "COPY": own_scale and not current, "RECORD": amax_out is not None}
    plan = cast_plan(cast_tensor_kernel, CAST, *key, lengths, **flags, PARTIALS=LARGEST_PARTIALS)
    codes, codes_t = plan.empty()
    plan.launch(matrix, codes, codes_t, scale, partials if current else made, amax_out)
    return codes, codes_t, scale if made is None else made
