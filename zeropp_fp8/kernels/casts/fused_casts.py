"""SwiGLU and RMSNorm whose result goes to FP8 at once, with a given scale; the result itself is written beside it.

    SwiGLU:   y = silu(gate) * up,                                 silu(g) = g / (1 + exp(-g))
    RMSNorm:  y = weight * (x / sqrt(mean of x^2 of a row + eps))
    codes[r, c] = codes_t[c, r] = FP8(clamp(y[r, c] / scale))

Both round where the unfused modules do (torch's silu and product; LlamaRMSNorm of transformers): to the matrix' dtype
after silu and after its product, and after the normalization and after the weight. So the bytes are those of the
unfused way, but for the mean of RMSNorm, whose sum has another order.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.kernels.casts.cast_tensor import cast_tile, record_amax
from zeropp_fp8.kernels.casts.matrices import (
    ALIGNMENT,
    Launch,
    cast_plan,
    exponential,
    load_tile,
    numbers_of,
    reciprocal,
    store_tile,
    tile_of_program,
)
from zeropp_fp8.kernels.elements import narrowed
from zeropp_fp8.kernels.launching import PLANS, Kernel, Plan
from zeropp_fp8.kernels.wire.launch_tables import interpreted

SWIGLU = Launch(tile_rows=128, tile_columns=64, num_warps=8)
RMS_NORM = Launch(tile_rows=128, tile_columns=64, num_warps=8)
_STATISTICS_WARPS = 4
_LARGEST_PIECE = 4096  # elements of a row that a program holds: 32 a thread


@Kernel
@triton.jit(do_not_specialize=["eps"])
def row_statistics_kernel(matrix_ptr, inverse_rms_ptr, columns, eps, PIECE: tl.constexpr):
    """One program: 1 / sqrt(mean of squares + eps) of one row."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PIECE)
    total = tl.zeros((PIECE,), tl.float32)
    for start in range(0, columns, PIECE):
        x = tl.load(matrix_ptr + row * columns + start + place, mask=start + place < columns, other=0).to(tl.float32)
        total += x * x
    tl.store(inverse_rms_ptr + row, tl.rsqrt(tl.sum(total, axis=0) / columns + eps))


@Kernel
@triton.jit(do_not_specialize_on_alignment=["scale_ptr", "amax_ptr"])
def fused_cast_kernel(
    first_ptr,
    second_ptr,
    inverse_rms_ptr,
    values_ptr,
    plain_ptr,
    transposed_ptr,
    scale_ptr,
    amax_ptr,
    rows,
    columns,
    plain_length,
    transposed_length,
    NORM: tl.constexpr,
    RECORD: tl.constexpr,
    INTERPRETED: tl.constexpr,
    FORM: tl.constexpr,
):
    """One program: one tile. NORM: of a matrix and a weight, with the rows' statistics known; else of gate and up."""
    dtype: tl.constexpr = first_ptr.dtype.element_ty
    first_row, first_column = tile_of_program(columns, FORM.rows, FORM.columns)
    x = load_tile(first_ptr, first_row, first_column, rows, columns, FORM.rows, FORM.columns).to(tl.float32)
    if NORM:
        row = first_row + tl.arange(0, FORM.rows)
        column = first_column + tl.arange(0, FORM.columns)
        inverse_rms = tl.load(inverse_rms_ptr + row, mask=row < rows, other=0.0)
        factor = tl.load(second_ptr + column, mask=column < columns, other=0).to(tl.float32)[None, :]
        x = narrowed(x * inverse_rms[:, None], dtype, INTERPRETED).to(tl.float32)
    else:
        factor = load_tile(second_ptr, first_row, first_column, rows, columns, FORM.rows, FORM.columns).to(tl.float32)
        x = narrowed(tl.div_rn(x, 1.0 + exponential(-x, INTERPRETED)), dtype, INTERPRETED).to(tl.float32)
    y = factor * x
    if NORM:
        y = tl.where((row < rows)[:, None], y, 0.0)  # and not -0 beyond the end, where the weight is negative
    y = narrowed(y, dtype, INTERPRETED)
    store_tile(values_ptr, y, first_row, first_column, rows, columns)
    if RECORD:
        record_amax(amax_ptr, numbers_of(y))
    cast_tile(
        y, reciprocal(tl.load(scale_ptr)), plain_ptr, transposed_ptr, first_row, first_column, rows, columns,
        plain_length, transposed_length, FORM,
    )  # fmt: skip


def inverse_rms(matrix: Tensor, eps: float) -> Tensor:
    """fp32 [R]: 1 / sqrt(mean of squares + eps) of each row of a contiguous matrix."""
    found = torch.empty(matrix.shape[0], dtype=torch.float32, device=matrix.device)
    _plan_of_statistics(matrix.shape, matrix.dtype, matrix.device, eps)(matrix, found)
    return found


@functools.lru_cache(PLANS)
def _plan_of_statistics(shape: torch.Size, dtype: torch.dtype, device: torch.device, eps: float) -> Plan:
    rows, columns = shape
    constants = {"PIECE": min(_LARGEST_PIECE, triton.next_power_of_2(columns)), "num_warps": _STATISTICS_WARPS}
    return Plan(row_statistics_kernel, (rows,), (columns, eps), constants)


def fused_cast(
    first: Tensor,
    second: Tensor,
    inverse_rms: Tensor | None,
    dtype: torch.dtype,
    plain: bool,
    transposed: bool,
    scale: Tensor,
    amax_out: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Cast silu(first) * second, or the RMSNorm of the rows of `first`, with a given scale, in one pass.

    Args:
        first: bf16, fp16 or fp32 [R, C], contiguous, as all of them.
        second: like `first`; of RMSNorm the weight, [C] of the same dtype.
        inverse_rms: fp32 [R], see the function of that name; None: SwiGLU.
        dtype, plain, transposed: see `cast_tensor`.
        scale: fp32 [1].
        amax_out: fp32 [1], becomes the maximum of itself and the result's largest finite magnitude; or None.

    Returns:
        (codes [R, C rounded up to a multiple of 16] or None, the transpose of codes [C, R rounded up] or None, the
        result before the cast, like `first`).
    """
    key = first.shape, first.dtype, first.device, dtype, plain, transposed, (False, True), ALIGNMENT
    flags = {"NORM": inverse_rms is not None, "RECORD": amax_out is not None, "INTERPRETED": interpreted()}
    plan = cast_plan(fused_cast_kernel, SWIGLU if inverse_rms is None else RMS_NORM, *key, **flags)
    values = torch.empty_like(first)
    codes, codes_t = plan.empty()
    plan.launch(first, second, inverse_rms, values, codes, codes_t, scale, amax_out)
    return codes, codes_t, values
