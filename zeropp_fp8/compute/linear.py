"""A linear layer whose three GEMMs run in low precision.

    y           = x  W^T           forward
    grad_input  = g  W             backward
    grad_weight = g^T x            backward

Each product sums over another axis, so each matrix is quantized along both of its axes. Biases, and sums of gradients
over tokens, stay in high precision.

Under ZeRO-3 the Parameter itself is saved for backward, not its values, and they are gathered again if nobody did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

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

    @property
    def backward_in_high_precision(self) -> bool:
        return self.scaling.formats["gradients"] == "none"

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


class _LowPrecisionLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, precision: LinearPrecision, training: bool):
        in_high = precision.backward_in_high_precision
        needs_x_t = training and weight.requires_grad and not in_high
        x_q, x_t_q = precision.scaling.quantize_input(precision.layer, x, needs_x_t, training)
        weight_q = precision.weight_operand(weight, forward=True, training=training)
        y = matmul_nt(x_q, weight_q, x.dtype, bias, fast_accumulation=True)
        if training:
            ctx.precision = precision
            ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
            ctx.bias_dtype = None if bias is None else bias.dtype
            # A scale found in forward serves backward too: one pass less over the weight.
            one_scale = isinstance(weight_q, Float8Operand) and weight_q.granularity == "tensor"
            weight_scale = weight_q.scale if one_scale else None
            # Layers that share an input may have made a copy that this one, frozen, does not need; a recomputation in
            # activation checkpointing may not find it, and must save as many tensors.
            x_t_q = x_t_q if needs_x_t else None
            saved_x, ctx.rebuild_x = _saved(x if in_high and weight.requires_grad else x_t_q)
            # All through autograd, so that activation checkpointing can drop it. But a ZeRO-3 Parameter as it is:
            # non-reentrant checkpointing hands backward a detached tensor instead, without codes and status.
            ctx.parameter = weight if hasattr(weight, "ds_status") else None
            ctx.save_for_backward(weight if ctx.parameter is None else None, weight_scale, *saved_x)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        # Also when loss.backward() is called inside autocast's context: the GEMMs have their precision.
        with torch.autocast(grad_output.device.type, enabled=False):
            return _backward(ctx, grad_output)


def _backward(ctx, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    weight, weight_scale, *saved_x = ctx.saved_tensors
    weight = weight if ctx.parameter is None else ctx.parameter
    precision: LinearPrecision = ctx.precision
    scaling, transposed_weight = precision.scaling, precision.weight_is_transposed
    scaling.forget_input()
    needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    grad = grad_output.reshape(-1, grad_output.shape[-1])
    grad_input = grad_weight = grad_bias = None
    if precision.backward_in_high_precision:
        if needs_input:
            with _Gathered(weight):
                values = precision.weight_values(weight).to(grad.dtype)
                grad_input = grad @ (values.t() if transposed_weight else values)
        if needs_weight:
            x = ctx.rebuild_x(saved_x).reshape(-1, ctx.x_shape[-1])
            grad_weight = x.t() @ grad if transposed_weight else grad.t() @ x
    elif needs_input or needs_weight:
        grad_q, grad_t_q = scaling.quantize(precision.layer, "gradients", grad, needs_input, needs_weight)
        if needs_input:
            with _Gathered(weight):
                weight_t_q = precision.weight_operand(weight, forward=False, scale=weight_scale)
                grad_input = matmul_nt(grad_q, weight_t_q, ctx.x_dtype)
                del weight_t_q
        if needs_weight:
            x_t_q = ctx.rebuild_x(saved_x)
            a, b = (x_t_q, grad_t_q) if transposed_weight else (grad_t_q, x_t_q)
            grad_weight = matmul_nt(a, b, ctx.x_dtype)
    if needs_bias:
        grad_bias = grad.sum(0).to(ctx.bias_dtype)
    return (
        None if grad_input is None else grad_input.view(ctx.x_shape),
        None if grad_weight is None else grad_weight.to(weight.dtype),
        grad_bias,
        None,
        None,
    )


def _saved(operand: Operand | None) -> tuple[list[Tensor], Callable[[list[Tensor]], Operand]]:
    """The tensors of an operand, and how to make it of them again."""
    if operand is None:
        return [], lambda tensors: None
    if isinstance(operand, Tensor):
        return [operand], lambda tensors: tensors[0]
    shape, granularity = operand.shape, operand.granularity
    return [operand.codes, operand.scale], lambda tensors: Float8Operand(*tensors, shape, granularity)


# torch.compile runs the block around it and leaves the layer itself as it is: the casts are kernels of their own.
@torch.compiler.disable
def low_precision_linear(x: Tensor, weight: Tensor, bias: Tensor | None, precision: LinearPrecision) -> Tensor:
    """x [..., in] times the weight, plus bias [out], with the operands that `precision` says; [..., out] of x's dtype.

    Under autocast x, and the result, have autocast's dtype.
    """
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        x = x.to(torch.get_autocast_dtype(device_type))
    if x.numel() == 0:  # no token: nothing to quantize
        values = precision.weight_values(weight).to(x.dtype)
        return F.linear(x, values.t() if precision.weight_is_transposed else values, bias)
    training = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    with torch.autocast(device_type, enabled=False):
        return _LowPrecisionLinear.apply(x, weight, bias, precision, training)


class _LowPrecisionModule(nn.Module):
    """What converted modules share; `precision` is set by compute.convert_linear_layers."""

    precision: LinearPrecision

    def _multiply(self, x: Tensor) -> Tensor:
        """The forward pass. Subclasses define `forward`, whose argument has the name that the plain class gives it."""
        compute = self.precision.scaling.compute
        weight = self._own_weight()
        if not self.training and compute.evaluate_in == "high_precision":
            values = self.precision.weight_values(weight)
            return F.linear(x, values.t() if self.precision.weight_is_transposed else values, self.bias)
        return low_precision_linear(x, weight, self.bias, self.precision)

    def _own_weight(self) -> Tensor:
        """The weight, for the layer itself, which takes codes."""
        if "weight" not in self._parameters:  # old-style weight_norm computes it before each forward
            return self.weight
        return self._parameters["weight"]

    @property
    def weight_requires_grad(self) -> bool:
        """Asked without reading the weight: ZeRO-3 would gather it for whoever asks, and codes would be decoded."""
        if "weight" in self._parameters:
            return dict.__getitem__(self._parameters, "weight").requires_grad
        return self.weight.requires_grad

    def __getattr__(self, name: str):
        """`module.weight`, read by anybody else: the values of a weight that is there as codes are wanted."""
        value = super().__getattr__(name)
        if name == "weight":
            decode_for_readers(value)
        return value

    def _apply(self, fn, recurse=True):
        weight = self._own_weight()
        if not self.precision.scaling.compute.allow_fp16 and weight.dtype != torch.float16:
            probe = fn(torch.empty(0, dtype=weight.dtype, device=weight.device))
            if probe.dtype == torch.float16:
                raise RuntimeError(
                    f"{self.precision.name} computes in {self.precision.scaling.formats['weights']}: weights that were "
                    "trained so may leave the range of fp16, which has no scale; use bfloat16, or set "
                    '"compute.allow_fp16" to true'
                )
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        compute = self.precision.scaling.compute
        return f"{super().extra_repr()}, {self.precision.scaling.formats}, scaling={compute.scaling}"


class LowPrecisionLinear(_LowPrecisionModule, nn.Linear):
    """nn.Linear with its GEMMs in FP8 or MX."""

    def forward(self, input: Tensor) -> Tensor:
        return self._multiply(input)
