"""A linear layer whose three GEMMs (products.py) run in low precision.

Under ZeRO-3 the Parameter itself is saved for backward, not its values, and they are gathered again if nobody did.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeropp_fp8 import sharded
from zeropp_fp8.compute import operators
from zeropp_fp8.compute.differentiable_once import applied, differentiable_once
from zeropp_fp8.compute.grouped import Groups
from zeropp_fp8.compute.operand import Float8Operand
from zeropp_fp8.compute.products import LinearPrecision, decode_for_readers, product, products_of_gradient


class _LowPrecisionLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        precision: LinearPrecision,
        training: bool,
        groups: Groups | None,
    ):
        needs_x_t = training and weight.requires_grad
        x_q, x_t_q = precision.input_operands(x, needs_x_t, training)
        y, weight_scale = product(x_q, weight, bias, precision, x.dtype, training, groups)
        shape = x.shape
        if training:
            ctx.precision, ctx.x_shape, ctx.x_dtype, ctx.groups = precision, shape, x.dtype, groups
            ctx.bias_dtype = None if bias is None else bias.dtype
            # A single number, which lies in a table or is as little as that.
            ctx.weight_scale = weight_scale
            # What is large through autograd, so that activation checkpointing can drop it. But a ZeRO-3 Parameter as
            # it is: non-reentrant checkpointing hands backward a detached tensor instead, without codes and status.
            ctx.parameter = weight if sharded.is_sharded(weight) else None
            saved = [] if ctx.parameter is not None else [weight]
            ctx.of_x_t = None
            if isinstance(x_t_q, Float8Operand):
                one_scale = x_t_q.granularity == "tensor"
                ctx.of_x_t = x_t_q.scale if one_scale else None, x_t_q.shape, x_t_q.granularity
                saved += [x_t_q.right] if one_scale else [x_t_q.right, x_t_q.scale]
            elif needs_x_t:
                saved.append(x if x_t_q is None else x_t_q)
            ctx.save_for_backward(*saved)
        return y if x.dim() == 2 else y.view(*shape[:-1], y.shape[1])

    @staticmethod
    @differentiable_once
    def backward(ctx, grad_output: Tensor):
        device_type = grad_output.device.type
        if torch.is_autocast_enabled(device_type):  # by code that calls loss.backward() in its context
            with torch.autocast(device_type, enabled=False):
                return _LowPrecisionLinear.backward(ctx, grad_output)
        weight, saved, precision = ctx.parameter, ctx.saved_tensors, ctx.precision
        if weight is None:
            weight, *saved = saved
        precision.scaling.forget_input()
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        shape = ctx.x_shape
        grad = grad_output if grad_output.dim() == 2 else grad_output.reshape(-1, grad_output.shape[-1])
        x = None
        if ctx.of_x_t is not None:
            scale, *others = ctx.of_x_t
            x = Float8Operand(None, saved[1] if scale is None else scale, *others, saved[0])
        elif saved:
            x = saved[0].reshape(-1, shape[-1]).t() if precision.high.grad_weight else saved[0]
        grad_input, grad_weight = products_of_gradient(
            grad, x, weight, ctx.weight_scale, precision, ctx.x_dtype, needs_input, needs_weight, ctx.groups
        )
        if grad_input is not None and grad_output.dim() != 2:
            grad_input = grad_input.view(shape)
        grad_bias = torch.sum(grad, 0).to(ctx.bias_dtype) if needs_bias else None
        return grad_input, grad_weight, grad_bias, None, None, None


apply_linear = applied(_LowPrecisionLinear)


def refuse_fp16(weight: Tensor, precision: LinearPrecision, fn: Callable[[Tensor], Tensor]) -> None:
    """Raise RuntimeError if what a module applies to its tensors would make a weight fp16."""
    if precision.scaling.compute.allow_fp16 or weight.dtype == torch.float16:
        return
    if fn(torch.empty(0, dtype=weight.dtype, device=weight.device)).dtype == torch.float16:
        raise RuntimeError(
            f"{precision.name} computes in {precision.scaling.formats['weights']}: weights that were trained so may "
            'leave the range of fp16, which has no scale; use bfloat16, or set "compute.allow_fp16" to true'
        )


class _LowPrecisionModule(nn.Module):
    """The base of converted modules; compute.convert_linear_layers makes them.

    Attributes:
        number, kind: by which operators find it, and what they know of it (operators.py).
        casts_input: (the layer by whose scale its input is cast in graphs,), in a tuple so that it is no submodule.
    """

    precision: LinearPrecision
    number: Tensor
    kind: str
    casts_input: tuple[_LowPrecisionModule]

    def compute_in(self, precision: LinearPrecision) -> None:
        """Compute in low precision from now on."""
        self.precision, self.casts_input = precision, (self,)
        self.number, self.kind = operators.number_of(self), operators.kind_of(precision)

    def compute_as(self, module_class: type[nn.Module]) -> None:
        """Be a plain layer again."""
        del self.precision, self.casts_input, self.number, self.kind
        self.__class__ = module_class

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)  # a copy is a layer of its own
        self.number = operators.number_of(self)

    def _multiply(self, x: Tensor) -> Tensor:
        """The forward pass. Subclasses define `forward`, whose argument has the name that the plain class gives it.

        Under autocast the input, and the result, have autocast's dtype.
        """
        if x.numel() == 0:  # no token: nothing to quantize
            return self._multiply_in_high_precision(x)
        device_type = x.device.type
        if torch.is_autocast_enabled(device_type):
            x = x.to(torch.get_autocast_dtype(device_type))
        if not torch.compiler.is_compiling():
            return self._multiply_eagerly(x)
        if "weight" in self._parameters:
            return operators.linear(self, x, self._parameters["weight"], self.bias)
        return self._multiply_untraced(x)

    def _multiply_eagerly(self, x: Tensor) -> Tensor:
        weight, own = self.own_weight(), self._parameters
        bias = own["bias"] if "bias" in own else self.bias  # noqa: SIM401 (ZeRO-3's dict gathers where it is indexed)
        training = torch.is_grad_enabled() and (
            x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        )
        arguments, device_type = (x, weight, bias, self.precision, training, None), x.device.type
        if not torch.is_autocast_enabled(device_type):  # entering a context takes 20 calls
            return apply_linear(*arguments)
        with torch.autocast(device_type, enabled=False):
            return apply_linear(*arguments)

    _multiply_untraced = torch.compiler.disable(_multiply_eagerly)

    @torch.compiler.disable
    def _multiply_in_high_precision(self, x: Tensor) -> Tensor:
        values = self.precision.weight_values(self.own_weight()).to(x.dtype)
        return F.linear(x, values.t() if self.precision.weight_is_transposed else values, self.bias)

    def own_weight(self) -> Tensor:
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
        refuse_fp16(self.own_weight(), self.precision, fn)
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.precision}"


class LowPrecisionLinear(_LowPrecisionModule, nn.Linear):
    """nn.Linear with its GEMMs in FP8 or MX."""

    def forward(self, input: Tensor) -> Tensor:
        return self._multiply(input)
