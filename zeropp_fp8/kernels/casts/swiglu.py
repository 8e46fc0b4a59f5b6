"""Gradients of SwiGLU, y = silu(gate) * up, in one pass: 6 bytes read and 4 written an element of 16 bits.

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

from zeropp_fp8.kernels.casts.matrices import exponential, reciprocal
from zeropp_fp8.kernels.elements import narrowed
from zeropp_fp8.kernels.launching import PLANS, Kernel, Plan
from zeropp_fp8.kernels.wire.launch_tables import interpreted

_TILE = 2048  # elements per program
_WARPS = 4


@Kernel
@triton.jit
def swiglu_backward_kernel(
    grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, numel, INTERPRETED: tl.constexpr, TILE: tl.constexpr
):
    """One program: TILE elements."""
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    start = tl.program_id(0).to(tl.int64) * TILE
    local = tl.arange(0, TILE)
    mask = start + local < numel
    grad = tl.load(grad_ptr + start + local, mask=mask, other=0).to(tl.float32)
    gate = tl.load(gate_ptr + start + local, mask=mask, other=0).to(tl.float32)
    up = tl.load(up_ptr + start + local, mask=mask, other=0).to(tl.float32)
    divisor = 1.0 + exponential(-gate, INTERPRETED)
    silu = narrowed(tl.div_rn(gate, divisor), dtype, INTERPRETED).to(tl.float32)
    sigmoid = reciprocal(divisor)
    grad_silu = narrowed(grad * up, dtype, INTERPRETED).to(tl.float32)
    grad_gate = grad_silu * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(grad_gate_ptr + start + local, narrowed(grad_gate, dtype, INTERPRETED), mask=mask)
    tl.store(grad_up_ptr + start + local, narrowed(grad * silu, dtype, INTERPRETED), mask=mask)


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of gate, gradient of up) of contiguous bf16, fp16 or fp32 tensors of one shape and dtype."""
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    _plan_of_numbers(gate.numel(), gate.dtype, gate.device)(grad, gate, up, grad_gate, grad_up)
    return grad_gate, grad_up


@functools.lru_cache(PLANS)
def _plan_of_numbers(numel: int, dtype: torch.dtype, device: torch.device) -> Plan:
    constants = {"INTERPRETED": interpreted(), "TILE": _TILE, "num_warps": _WARPS, "enable_fp_fusion": False}
    return Plan(swiglu_backward_kernel, (triton.cdiv(numel, _TILE),), (numel,), constants)
