"""The three products of a linear layer in low precision, and the weight that they find.

    output        y = x W^T                 x  [rows, in]      W   [out, in]
    grad_input    g W                       g  [rows, out]     W^T [in, out]
    grad_weight   g^T x                     g^T [out, rows]    x^T [in, rows]

Each product sums over another axis, so each matrix is quantized along both of its axes. Biases, and sums of gradients
over tokens, stay in high precision; a product that stays there takes the matrices themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zeropp_fp8 import sharded
from zeropp_fp8.compute.gemm import matmul_nt
from zeropp_fp8.compute.grouped import Groups
from zeropp_fp8.compute.operand import Float8Operand
from zeropp_fp8.compute.scaling import Operand, Scaling


class HighPrecision(NamedTuple):
    """Which products of a layer stay in high precision."""

    output: bool = False
    grad_input: bool = False
    grad_weight: bool = False


_NONE_IN_HIGH = HighPrecision()


@dataclass(frozen=True)
class LinearPrecision:
    """How one layer computes.

    Attributes:
        weight_is_transposed: the weight is [in, out] (transformers' Conv1D), not [out, in].
        high: its products in high precision.
    """

    scaling: Scaling
    layer: int
    name: str
    weight_is_transposed: bool = False
    high: HighPrecision = _NONE_IN_HIGH

    def __str__(self) -> str:
        in_high = ", ".join(name for name, is_high in self.high._asdict().items() if is_high)
        said = f"{self.scaling.formats}, scaling={self.scaling.compute.scaling}"
        return f"{said}, {in_high} in high precision" if in_high else said

    def input_operands(self, x: Tensor, transposed: bool, training: bool) -> tuple[Operand, Operand | None]:
        """The input [..., in] for y = x W^T, [rows, in], and (`transposed`) for grad_weight = g^T x, [in, rows].

        None for grad_weight in high precision, which takes x itself.
        """
        high, plain = self.high, None
        transposed = transposed and not high.grad_weight
        if high.output:
            plain = x.reshape(-1, x.shape[-1])
            if not transposed:
                return plain, None
        made, made_t = self.scaling.quantize_input(self.layer, x, plain is None, transposed, training)
        # Layers that share an input may have made a copy that this one, frozen, does not need; a recomputation in
        # activation checkpointing may not find it, and must save as many tensors.
        return made if plain is None else plain, made_t if transposed else None

    def weight_operand(
        self, weight: Tensor, forward: bool, scale: Tensor | None = None, training: bool = True
    ) -> Operand:
        """The weight for y = x W^T, [out, in], or for grad_input = g W, [in, out]; of a stack the rows of all matrices
        one after the other, [matrices * out, in], or [in, matrices * out]."""
        plain = forward != self.weight_is_transposed
        if self.high.output if forward else self.high.grad_input:
            values = self.weight_values(weight).detach().flatten(0, -2)
            return values if plain else values.t()
        gathered: Float8Operand | None = sharded.known(weight).operand
        if gathered is not None:
            if plain:
                return gathered
            if gathered.granularity != "row":
                return gathered.transposed()
            weight = gathered.dequantize(weight.dtype)  # its scales are those of the other axis
        if torch.is_grad_enabled():  # as it is not inside of an autograd.Function
            weight = weight.detach()
        if weight.dim() == 3:
            weight = weight.flatten(0, 1)
        pair = self.scaling.quantize(self.layer, "weights", weight, plain, not plain, scale, training)
        return pair[0] if plain else pair[1]

    def weight_values(self, weight: Tensor) -> Tensor:
        """The weight in its own dtype, as it is stored; a gradient reaches the weight."""
        gathered: Float8Operand | None = sharded.known(weight).operand
        return weight if gathered is None else _Decoded.apply(weight, gathered)


class _Decoded(torch.autograd.Function):
    """The values of a weight that is there as codes; the gradient goes to the weight as it is."""

    @staticmethod
    def forward(ctx, weight: Tensor, gathered: Float8Operand) -> Tensor:
        return gathered.dequantize(weight.dtype).view(sharded.shape(weight))

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


@torch.compiler.disable
@torch.inference_mode(False)  # what an evaluation in inference mode decodes, training may find
@torch.no_grad()
def decode_for_readers(weight: Tensor) -> None:
    """Let a Parameter that is there as codes hold their values too, now and whenever it is gathered again."""
    gathered: Float8Operand | None = sharded.known(weight).operand
    if gathered is not None and not sharded.known(weight).as_numbers:
        sharded.remember(weight, as_numbers=True)
        weight.data = gathered.dequantize(weight.dtype).view(sharded.shape(weight))


def product(
    x_q: Operand,
    weight: Tensor,
    bias: Tensor | None,
    precision: LinearPrecision,
    dtype: torch.dtype,
    training: bool,
    groups: Groups | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(y [rows, out] of `dtype`, the scale that the weight was quantized with if it has one) of an input's operand.

    `groups` of rows go through a matrix each, of a stack without a bias.
    """
    weight_q = precision.weight_operand(weight, forward=True, training=training)
    if groups is None:
        y = matmul_nt(x_q, weight_q, dtype, bias, fast_accumulation=True)
    else:
        y = groups.product(x_q, weight_q, dtype, fast_accumulation=True)
    one_scale = isinstance(weight_q, Float8Operand) and weight_q.granularity == "tensor"
    return y, weight_q.scale if one_scale else None


def products_of_gradient(
    grad: Tensor,
    x: Operand | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    precision: LinearPrecision,
    dtype: torch.dtype,
    needs_input: bool,
    needs_weight: bool,
    groups: Groups | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """(grad_input [rows, in] of `dtype`, grad_weight like the weight) of grad [rows, out], None for what is not needed.

    Args:
        x: what the weight's gradient takes of the input, [in, rows].
        weight: gathered for as long as it takes, if its values are not there.
        weight_scale: that of forward serves backward too: one pass less over the weight.
    """
    grad_input = grad_weight = None
    high = precision.high
    low, low_t = needs_input and not high.grad_input, needs_weight and not high.grad_weight
    grad_q = grad_t_q = None
    if low or low_t:
        grad_q, grad_t_q = precision.scaling.quantize(precision.layer, "gradients", grad, low, low_t)
    if needs_input:
        dropped = sharded.is_dropped(weight)
        if dropped:
            weight.all_gather()
        try:
            weight_t_q = precision.weight_operand(weight, False, weight_scale)
            multiply = matmul_nt if groups is None else groups.product
            grad_input = multiply(grad_q if low else grad, weight_t_q, dtype)
            del weight_t_q
        finally:
            if dropped:
                weight.partition()
    if needs_weight:
        grad_t_q = grad_t_q if low_t else grad.t()
        a, b = (x, grad_t_q) if precision.weight_is_transposed else (grad_t_q, x)
        grad_weight = (matmul_nt if groups is None else groups.sum)(a, b, dtype)
        if dtype != weight.dtype:
            grad_weight = grad_weight.to(weight.dtype)
    return grad_input, grad_weight
