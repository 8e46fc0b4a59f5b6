"""The parts of a low-precision linear layer as operators of torch, with which torch.compile keeps it in its graphs.

    linear            the layer, which a trace takes apart into
      cast_input        the operands of x; a graph makes equal calls once, so layers that share an input share them
      product           y = x W^T
      linear_backward   grad_input = g W, grad_weight = g^T x

Blocks of one class share a graph, whose inputs are tensors. But a weight may be there as codes on its Parameter, and
scales lie in tables that casts write to: a graph gets the number of the layer, as a tensor, by which its operators find
both. What they return is a graph's own, which may use its memory again.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zeropp_fp8.compute.operand import ALIGNMENT, BLOCK, Float8Operand
from zeropp_fp8.compute.products import product, products_of_gradient
from zeropp_fp8.compute.scaling import Operand

# Codes and scale of the operand [R, C], and of the one [C, R]; one scale of all of it stands in the first place only.
Parts = tuple[Tensor, Tensor, Tensor, Tensor]
library = torch.library.Library("zeropp_fp8", "DEF")
_layers: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def number_of(layer: nn.Module) -> Tensor:
    """int64 [] on the CPU: a new number of a layer, by which operators find it as long as it lives."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number, device="cpu")


def layer_of(number: Tensor) -> nn.Module:
    """The layer that `number_of` gave a number."""
    return _layers[number.item()]


def linear(layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """layer(x) of operators: x [..., in], the result [..., out].

    Args:
        layer: a converted layer, with the `weight` that is its Parameter.
    """
    precision = layer.precision
    scaling = precision.scaling
    training = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    needs_x_t = training and weight.requires_grad
    (caster,) = layer.casts_input
    return torch.ops.zeropp_fp8.linear(
        x,
        weight,
        bias,
        layer.number,
        caster.number,
        scaling.granularity,
        scaling.codes_dtype("activations", x.dtype),
        weight.shape[1 if precision.weight_is_transposed else 0],
        not precision.high.output,
        needs_x_t and precision.high.grad_weight,
        needs_x_t and not precision.high.grad_weight,
        # With delayed scaling backward finds the scale in the table.
        training and scaling.compute.scaling == "current" and not precision.high.output,
        training,
    )


# -- an operand as tensors --------------------------------------------------------------------------------------------


def _parts(operand: Operand | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scale) of an operand; what there is not is empty."""
    if operand is None:
        return like.new_empty(0), _empty(like, 0)
    if isinstance(operand, Tensor):
        return operand, _empty(like, 0)
    # One scale may be a view of a table.
    return operand.codes, operand.scale.clone() if operand.granularity == "tensor" else operand.scale


def _like_parts(shape: Sequence[int], like: Tensor, granularity: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tensors as `_parts` gives them of the operand of a matrix [rows, K]."""
    rows, summed = shape

    def empty(*shape: int) -> Tensor:
        return like.new_empty(shape, dtype=torch.float32)

    multiple = {"tensor": ALIGNMENT, "row": ALIGNMENT, "block": BLOCK, "rounded": 1}[granularity]
    codes = like.new_empty(rows, -(-summed // multiple) * multiple, dtype=dtype)
    if granularity == "block":
        return codes, empty(-(-summed // BLOCK), rows).t()
    return codes, empty(*{"tensor": (1,), "row": (rows, 1), "rounded": (0,)}[granularity])


def _parts_of_pair(pair: tuple[Operand | None, Operand | None], like: Tensor) -> Parts:
    """The tensors of the operands of a matrix `like`."""
    plain, transposed = pair
    if isinstance(transposed, Float8Operand) and transposed.granularity == "tensor":
        codes = _parts(plain, like)[0]
        return codes, transposed.scale.clone(), transposed.codes, _empty(like, 0)
    return *_parts(plain, like), *_parts(transposed, like)


def _like_parts_of_pair(x: Tensor, granularity: str, dtype: torch.dtype, plain: bool, transposed: bool) -> Parts:
    """Tensors as `_parts_of_pair` gives them of the operands of x [..., K]."""
    rows, summed = x.shape[:-1].numel(), x.shape[-1]
    codes, scale = _like_parts((rows, summed), x, granularity, dtype) if plain else _parts(None, x)
    if not transposed:
        return codes, scale, *_parts(None, x)
    codes_t, scale_t = _like_parts((summed, rows), x, granularity, dtype)
    return (codes, scale_t, codes_t, _empty(x, 0)) if granularity == "tensor" else (codes, scale, codes_t, scale_t)


def _operand(codes: Tensor, scale: Tensor, shape: Sequence[int], granularity: str) -> Operand:
    return codes if granularity == "rounded" else Float8Operand(codes, scale, tuple(shape), granularity)


# -- operators --------------------------------------------------------------------------------------------------------

library.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor number, Tensor caster, str granularity, ScalarType dtype, "
    "int features, bool plain, bool saves_input, bool transposed, bool returns_scale, bool training) -> Tensor"
)
library.define(
    "cast_input(Tensor x, Tensor number, str granularity, ScalarType dtype, bool plain, bool transposed, "
    "bool training) -> (Tensor codes, Tensor scale, Tensor codes_t, Tensor scale_t)"
)
library.define(
    "product(Tensor codes, Tensor scale, Tensor weight, Tensor? bias, Tensor number, str granularity, "
    "ScalarType dtype, int features, bool returns_scale, bool training) -> (Tensor y, Tensor weight_scale)"
)
library.define(
    "linear_backward(Tensor grad, Tensor saved, Tensor saved_scale, Tensor weight_scale, Tensor number, "
    "str granularity, ScalarType dtype, int features, SymInt[] weight_shape, ScalarType weight_dtype, "
    "bool needs_input, bool needs_weight) -> (Tensor grad_input, Tensor grad_weight)"
)


@torch.library.impl(library, "linear", "CompositeImplicitAutograd")
def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    number: Tensor,
    caster: Tensor,
    granularity: str,
    dtype: torch.dtype,
    features: int,
    plain: bool,
    saves_input: bool,
    transposed: bool,
    returns_scale: bool,
    training: bool,
) -> Tensor:
    saved, saved_scale = x if saves_input else None, None
    operand = x.detach().reshape(-1, x.shape[-1]), _empty(x, 0)  # what a product in high precision takes
    if plain or transposed:
        parts = torch.ops.zeropp_fp8.cast_input(x.detach(), caster, granularity, dtype, plain, transposed, training)
        if transposed:
            saved, saved_scale = parts[2], parts[1 if granularity == "tensor" else 3]
        operand = parts[:2] if plain else operand
    flags = (granularity, features, returns_scale, training)
    return _Linear.apply(x, weight, bias, number, *operand, saved, saved_scale, *flags)


class _Linear(torch.autograd.Function):
    """A layer as autograd sees it. Of x the product takes its operand only."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        number: Tensor,
        codes: Tensor,
        scale: Tensor,
        saved: Tensor | None,
        saved_scale: Tensor | None,
        granularity: str,
        features: int,
        returns_scale: bool,
        training: bool,
    ) -> Tensor:
        y, weight_scale = torch.ops.zeropp_fp8.product(
            codes, scale, weight, bias, number, granularity, x.dtype, features, returns_scale, training
        )
        if training:
            none = x.new_empty(0)
            ctx.save_for_backward(
                none if saved is None else saved, none if saved_scale is None else saved_scale, weight_scale, number
            )
            ctx.granularity = granularity
            ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
            ctx.weight_shape, ctx.weight_dtype = weight.shape, weight.dtype
            ctx.bias_dtype = None if bias is None else bias.dtype
        return y.view(*x.shape[:-1], features)

    @staticmethod
    def backward(ctx, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad = grad_y.reshape(-1, grad_y.shape[-1])
        grad_input = grad_weight = None
        if needs_input or needs_weight:
            grad_input, grad_weight = torch.ops.zeropp_fp8.linear_backward(
                grad, *ctx.saved_tensors, ctx.granularity, ctx.x_dtype, ctx.x_shape[-1], ctx.weight_shape,
                ctx.weight_dtype, needs_input, needs_weight,
            )  # fmt: skip
        return (
            grad_input.view(ctx.x_shape) if needs_input else None,
            grad_weight if needs_weight else None,
            grad.sum(0).to(ctx.bias_dtype) if needs_bias else None,
            *(None,) * 9,
        )


def _empty(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


@torch.library.impl(library, "cast_input", "CompositeExplicitAutograd")
def _cast_input(
    x: Tensor, number: Tensor, granularity: str, dtype: torch.dtype, plain: bool, transposed: bool, training: bool
):
    precision = layer_of(number).precision
    matrix = x.reshape(-1, x.shape[-1])
    pair = precision.scaling.quantize(precision.layer, "activations", matrix, plain, transposed, training=training)
    return _parts_of_pair(pair, x)


@torch.library.register_fake("zeropp_fp8::cast_input", lib=library)
def _(x: Tensor, number: Tensor, granularity: str, dtype: torch.dtype, plain: bool, transposed: bool, training: bool):
    return _like_parts_of_pair(x, granularity, dtype, plain, transposed)


@torch.library.impl(library, "product", "CompositeExplicitAutograd")
def _product(
    codes: Tensor,
    scale: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    number: Tensor,
    granularity: str,
    dtype: torch.dtype,
    features: int,
    returns_scale: bool,
    training: bool,
):
    layer = layer_of(number)
    # K is never padded: convert.py
    x_q = codes if layer.precision.high.output else _operand(codes, scale, codes.shape, granularity)
    y, weight_scale = product(x_q, layer.own_weight(), bias, layer.precision, dtype, training)
    return y, weight_scale.clone() if returns_scale else _empty(codes, 0)


@torch.library.register_fake("zeropp_fp8::product", lib=library)
def _(codes, scale, weight, bias, number, granularity, dtype, features, returns_scale, training):
    return _empty(codes, codes.shape[0], features, dtype=dtype), _empty(codes, 1 if returns_scale else 0)


@torch.library.impl(library, "linear_backward", "CompositeExplicitAutograd")
def _linear_backward(
    grad: Tensor,
    saved: Tensor,
    saved_scale: Tensor,
    weight_scale: Tensor,
    number: Tensor,
    granularity: str,
    dtype: torch.dtype,
    features: int,
    weight_shape: Sequence[int],
    weight_dtype: torch.dtype,
    needs_input: bool,
    needs_weight: bool,
):
    layer = layer_of(number)
    x: Operand | None = None
    if needs_weight and layer.precision.high.grad_weight:
        x = saved.reshape(-1, features).t()
    elif needs_weight:
        x = _operand(saved, saved_scale, (features, grad.shape[0]), granularity)
    grad_input, grad_weight = products_of_gradient(
        grad, x, layer.own_weight(), weight_scale if weight_scale.numel() else None, layer.precision, dtype,
        needs_input, needs_weight,
    )  # fmt: skip
    return (
        _empty(saved, 0, dtype=dtype) if grad_input is None else grad_input,
        _empty(saved, 0, dtype=weight_dtype) if grad_weight is None else grad_weight,
    )


@torch.library.register_fake("zeropp_fp8::linear_backward", lib=library)
def _(grad, saved, saved_scale, weight_scale, number, granularity, dtype, features, *others):
    weight_shape, weight_dtype, needs_input, needs_weight = others
    return (
        _empty(saved, *((grad.shape[0], features) if needs_input else (0,)), dtype=dtype),
        _empty(saved, *(weight_shape if needs_weight else (0,)), dtype=weight_dtype),
    )
