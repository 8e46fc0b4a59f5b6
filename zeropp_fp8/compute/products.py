"""The three products of a linear layer in low precision, and the weight that they find.

    y           = x  W^T           forward
    grad_input  = g  W             backward
    grad_weight = g^T x            backward

Each product sums over another axis, so each matrix is quantized along both of its axes. Biases, and sums of gradients
over tokens, stay in high precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp_fp8.compute.gemm import matmul_nt
from zeropp_fp8.compute.operand import Float8Operand
from zeropp_fp8.compute.scaling import Operand, Scaling

# The attribute of a Parameter that holds its codes as they were gathered; its own values are NaN meanwhile, ...
GATHERED_OPERAND = "zeropp_fp8_operand"
# ... unless this one says that somebody else than the layer reads them (DoRA's norm of the weight, a product that a
# model forms by itself): they are then decoded whenever the codes are there, for backward needs them too.
READ_AS_NUMBERS = "zeropp_fp8_read_as_numbers"


@dataclass(frozen=True)
class LinearPrecision:
    """How one layer computes.

    Attributes:
        weight_is_transposed: the weight is [in, out] (transformers' Conv1D), not [out, in].
    """

    scaling: Scaling
    layer: int
    name: str
    weight_is_transposed: bool = False

    def weight_operand(
        self, weight: Tensor, forward: bool, scale: Tensor | None = None, training: bool = True
    ) -> Operand:
        """The weight for y = x W^T, [out, in], or for grad_input = g W, [in, out]."""
        plain = forward != self.weight_is_transposed
        gathered: Float8Operand | None = getattr(weight, GATHERED_OPERAND, None)
        if gathered is not None:
            if plain:
                return gathered
            if gathered.granularity != "row":
                return gathered.transposed()
            weight = gathered.dequantize(weight.dtype)  # its scales are those of the other axis
        pair = self.scaling.quantize(self.layer, "weights", weight.detach(), plain, not plain, scale, training)
        return pair[0] if plain else pair[1]

    def weight_values(self, weight: Tensor) -> Tensor:
        """The weight in its own dtype, as it is stored; a gradient reaches the weight."""
        gathered: Float8Operand | None = getattr(weight, GATHERED_OPERAND, None)
        return weight if gathered is None else _Decoded.apply(weight, gathered)


class _Decoded(torch.autograd.Function):
    """The values of a weight that is there as codes; the gradient goes to the weight as it is."""

    @staticmethod
    def forward(ctx, weight: Tensor, gathered: Float8Operand) -> Tensor:
        return gathered.dequantize(weight.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


@torch.compiler.disable
@torch.inference_mode(False)  # what an evaluation in inference mode decodes, training may find
@torch.no_grad()
def decode_for_readers(weight: Tensor) -> None:
    """Let a Parameter that is there as codes hold their values too, now and whenever it is gathered again."""
    gathered: Float8Operand | None = getattr(weight, GATHERED_OPERAND, None)
    if gathered is not None and not getattr(weight, READ_AS_NUMBERS, False):
        setattr(weight, READ_AS_NUMBERS, True)
        weight.data = gathered.dequantize(weight.dtype)


class _Gathered:
    """Context in which a ZeRO-3 parameter's values are there."""

    def __init__(self, weight: Tensor) -> None:
        status = getattr(weight, "ds_status", None)
        self._weight = weight if status is not None and status.name == "NOT_AVAILABLE" else None

    def __enter__(self) -> None:
        if self._weight is not None:
            self._weight.all_gather()

    def __exit__(self, *exc) -> None:
        if self._weight is not None:
            self._weight.partition()


def product(
    x_q: Operand, weight: Tensor, bias: Tensor | None, precision: LinearPrecision, dtype: torch.dtype, training: bool
) -> tuple[Tensor, Tensor | None]:
    """(y [rows, out] of `dtype`, the scale that the weight was quantized with if it has one) of an input's operand."""
    weight_q = precision.weight_operand(weight, forward=True, training=training)
    y = matmul_nt(x_q, weight_q, dtype, bias, fast_accumulation=True)
    one_scale = isinstance(weight_q, Float8Operand) and weight_q.granularity == "tensor"
    return y, weight_q.scale if one_scale else None


def products_of_gradient(
    grad: Tensor | None,
    x: Operand | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    precision: LinearPrecision,
    dtype: torch.dtype,
    needs_input: bool,
    needs_weight: bool,
    operands: tuple[Operand, Operand | None] | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """(grad_input [rows, in] of `dtype`, grad_weight like the weight) of grad [rows, out], None for what is not needed.

    Args:
        x: what the weight's gradient takes of the input: its operand for sums over rows, or where backward computes in
            high precision the input itself, [rows, in].
        weight: gathered for as long as it takes, if its values are not there.
        weight_scale: that of forward serves backward too: one pass less over the weight.
        operands: those of the gradient, where they are made; `grad` is not looked at then.
    """
    scaling, transposed_weight = precision.scaling, precision.weight_is_transposed
    grad_input = grad_weight = None
    if scaling.backward_in_high_precision:
        if needs_input:
            with _Gathered(weight):
                values = precision.weight_values(weight).to(grad.dtype)
                grad_input = grad @ (values.t() if transposed_weight else values)
        if needs_weight:
            grad_weight = x.t() @ grad if transposed_weight else grad.t() @ x
    elif needs_input or needs_weight:
        grad_q, grad_t_q = operands or scaling.quantize(precision.layer, "gradients", grad, needs_input, needs_weight)
        if needs_input:
            with _Gathered(weight):
                weight_t_q = precision.weight_operand(weight, forward=False, scale=weight_scale)
                grad_input = matmul_nt(grad_q, weight_t_q, dtype)
                del weight_t_q
        if needs_weight:
            a, b = (x, grad_t_q) if transposed_weight else (grad_t_q, x)
            grad_weight = matmul_nt(a, b, dtype)
    return grad_input, None if grad_weight is None else grad_weight.to(weight.dtype)
