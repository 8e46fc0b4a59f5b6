"""Gradients of SwiGLU, y = silu(gate) * up, in one pass: 6 bytes read and 4 written an element of 16 bits.

As numbers, or as FP8 codes with given scales, plain and transposed.

    grad_up   = grad * silu(gate)
    grad_gate = (grad * up) * s * (1 + gate * (1 - s)),    s = 1 / (1 + exp(-gate))

Rounded where autograd rounds: silu(gate) and grad * up to the matrix' dtype. silu(gate) is computed again instead of
being kept.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.kernels.casts.cast_tensor import cast_tile, record_amax
from zeropp_fp8.kernels.casts.matrices import (
    Launch,
    exponential,
    launch_cast,
    load_tile,
    numbers_of,
    reciprocal,
    tile_of_program,
)
from zeropp_fp8.kernels.elements import narrowed
from zeropp_fp8.kernels.launching import PLANS, Kernel, Plan
from zeropp_fp8.kernels.wire.launch_tables import interpreted

# 77 registers, three programs on a multiprocessor; 128 rows would take 151, and one program.
CAST = Launch(tile_rows=64, tile_columns=64, num_warps=8)
_TILE = 2048  # elements a program
_WARPS = 4


@triton.jit
def gradients_of(grad, gate, up, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """(gradient of gate, gradient of up) of `dtype`, of tiles or rows as they are stored."""
    grad, gate, up = grad.to(tl.float32), gate.to(tl.float32), up.to(tl.float32)
    divisor = 1.0 + exponential(-gate, INTERPRETED)
    silu = narrowed(tl.div_rn(gate, divisor), dtype, INTERPRETED).to(tl.float32)
    sigmoid = tl.div_rn(tl.full(gate.shape, 1.0, tl.float32), divisor)
    grad_silu = narrowed(grad * up, dtype, INTERPRETED).to(tl.float32)
    grad_gate = grad_silu * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return narrowed(grad_gate, dtype, INTERPRETED), narrowed(grad * silu, dtype, INTERPRETED)


@Kernel
@triton.jit
def swiglu_backward_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    numel,
    INTERPRETED: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: TILE elements."""
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    start = tl.program_id(0).to(tl.int64) * TILE
    local = tl.arange(0, TILE)
    mask = start + local < numel
    grad = tl.load(grad_ptr + start + local, mask=mask, other=0)
    gate = tl.load(gate_ptr + start + local, mask=mask, other=0)
    up = tl.load(up_ptr + start + local, mask=mask, other=0)
    grad_gate, grad_up = gradients_of(grad, gate, up, dtype, INTERPRETED)
    tl.store(grad_gate_ptr + start + local, grad_gate, mask=mask)
    tl.store(grad_up_ptr + start + local, grad_up, mask=mask)


@Kernel
@triton.jit(do_not_specialize_on_alignment=["gate_scale_ptr", "up_scale_ptr", "gate_amax_ptr", "up_amax_ptr"])
def swiglu_backward_cast_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    gate_plain_ptr,
    gate_transposed_ptr,
    up_plain_ptr,
    up_transposed_ptr,
    gate_scale_ptr,
    up_scale_ptr,
    gate_amax_ptr,
    up_amax_ptr,
    rows,
    columns,
    plain_length,
    transposed_length,
    RECORD: tl.constexpr,
    INTERPRETED: tl.constexpr,
    FORM: tl.constexpr,
):
    """One program: one tile of both gradients."""
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    first_row, first_column = tile_of_program(columns, FORM.rows, FORM.columns)
    grad = load_tile(grad_ptr, first_row, first_column, rows, columns, FORM.rows, FORM.columns)
    gate = load_tile(gate_ptr, first_row, first_column, rows, columns, FORM.rows, FORM.columns)
    up = load_tile(up_ptr, first_row, first_column, rows, columns, FORM.rows, FORM.columns)
    grad_gate, grad_up = gradients_of(grad, gate, up, dtype, INTERPRETED)
    if RECORD:
        record_amax(gate_amax_ptr, numbers_of(grad_gate))
        record_amax(up_amax_ptr, numbers_of(grad_up))
    cast_tile(
        grad_gate, reciprocal(tl.load(gate_scale_ptr)), gate_plain_ptr, gate_transposed_ptr, first_row, first_column,
        rows, columns, plain_length, transposed_length, FORM,
    )  # fmt: skip
    cast_tile(
        grad_up, reciprocal(tl.load(up_scale_ptr)), up_plain_ptr, up_transposed_ptr, first_row, first_column, rows,
        columns, plain_length, transposed_length, FORM,
    )  # fmt: skip


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of gate, gradient of up) of contiguous bf16, fp16 or fp32 tensors of one shape and dtype."""
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    _plan_of_numbers(gate.numel(), gate.dtype, gate.device)(grad, gate, up, grad_gate, grad_up)
    return grad_gate, grad_up


@functools.lru_cache(PLANS)
def _plan_of_numbers(numel: int, dtype: torch.dtype, device: torch.device) -> Plan:
    constants = {"INTERPRETED": interpreted(), "TILE": _TILE, "num_warps": _WARPS, "enable_fp_fusion": False}
    return Plan(swiglu_backward_kernel, (triton.cdiv(numel, _TILE),), (numel,), constants)


def swiglu_backward_cast(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    copies: tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]],
    scales: tuple[Tensor, Tensor],
    amax_outs: tuple[Tensor | None, Tensor | None],
) -> None:
    """Cast both gradients with given scales, in one pass.

    Args:
        grad, gate, up: bf16, fp16 or fp32 [R, C], contiguous, of one dtype.
        copies: of the gradient of gate, and of that of up: float8 [R, C rounded up to a multiple of 16] and [C, R
            rounded up to a multiple of 16], contiguous; the second may be None, for both.
        scales: fp32 [1] each.
        amax_outs: fp32 [1] each, become the maximum of themselves and the gradient's largest finite magnitude; or None.
    """
    # The second gradient's copies have the lengths of the first one's.
    others = (*copies[1], *scales, *amax_outs)
    constants = {"RECORD": amax_outs[0] is not None, "INTERPRETED": interpreted()}
    launch_cast(swiglu_backward_cast_kernel, CAST, (grad, gate, up), *copies[0], others, **constants)
