"""The parts of a low-precision linear layer as operators of torch, with which torch.compile keeps it in its graphs.

    cast_input        the operands of x; a graph makes equal calls once, so layers that share an input share them
    linear            y = x W^T
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

_library = torch.library.Library("zeropp_fp8", "DEF")
_layers: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def number_of(layer: nn.Module) -> Tensor:
    """int64 [] on the CPU: a new number of a layer, by which operators find it as long as it lives."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number, device="cpu")


def linear(layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What layer(x) computes, of operators: x [..., in], the result [..., out].

    Args:
        layer: a converted layer, with the `weight` that is its Parameter.
    """
    precision = layer.precision
    scaling = precision.scaling
    training = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    saves_input = training and weight.requires_grad and precision.backward_in_high_precision
    transposed = training and weight.requires_grad and not saves_input
    (caster,) = layer.casts_input
    parts = torch.ops.zeropp_fp8.cast_input(
        x.detach(),
        caster.number,
        scaling.granularity,
        scaling.codes_dtype("activations", x.dtype),
        transposed,
        training,
    )
    features = weight.shape[1 if precision.weight_is_transposed else 0]
    # With delayed scaling backward finds the scale in the table.
    returns_scale = training and scaling.compute.scaling == "current"
    y, _ = torch.ops.zeropp_fp8.linear(
        x, *parts, weight, bias, layer.number, scaling.granularity, features, saves_input, returns_scale, training
    )
    return y


# -- an operand as tensors --------------------------------------------------------------------------------------------


def _parts(operand: Operand | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scale) of an operand; what there is not is empty."""
    if operand is None:
        return like.new_empty(0), like.new_empty(0, dtype=torch.float32)
    if isinstance(operand, Tensor):
        return operand, like.new_empty(0, dtype=torch.float32)
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


def _operand(codes: Tensor, scale: Tensor, shape: tuple[int, int], granularity: str) -> Operand:
    return codes if granularity == "rounded" else Float8Operand(codes, scale, shape, granularity)


# -- operators --------------------------------------------------------------------------------------------------------

_library.define(
    "cast_input(Tensor x, Tensor number, str granularity, ScalarType dtype, bool transposed, bool training) "
    "-> (Tensor codes, Tensor scale, Tensor codes_t, Tensor scale_t)"
)
_library.define(
    "linear(Tensor x, Tensor codes, Tensor scale, Tensor codes_t, Tensor scale_t, Tensor weight, Tensor? bias, "
    "Tensor number, str granularity, int features, bool saves_input, bool returns_scale, bool training) "
    "-> (Tensor y, Tensor weight_scale)"
)
_library.define(
    "linear_backward(Tensor grad, Tensor saved, Tensor saved_scale, Tensor weight_scale, Tensor number, "
    "str granularity, ScalarType dtype, SymInt[] weight_shape, ScalarType weight_dtype, bool needs_input, "
    "bool needs_weight) -> (Tensor grad_input, Tensor grad_weight)"
)


def _empty(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


@torch.library.impl(_library, "cast_input", "CompositeExplicitAutograd")
def _cast_input(x: Tensor, number: Tensor, granularity: str, dtype: torch.dtype, transposed: bool, training: bool):
    precision = _layers[number.item()].precision
    matrix = x.reshape(-1, x.shape[-1])
    pair = precision.scaling.quantize(precision.layer, "activations", matrix, True, transposed, training=training)
    return *_parts(pair[0], x), *_parts(pair[1], x)


@torch.library.register_fake("zeropp_fp8::cast_input", lib=_library)
def _(x: Tensor, number: Tensor, granularity: str, dtype: torch.dtype, transposed: bool, training: bool):
    rows, summed = x.shape[:-1].numel(), x.shape[-1]
    plain = _like_parts((rows, summed), x, granularity, dtype)
    return *plain, *(_like_parts((summed, rows), x, granularity, dtype) if transposed else _parts(None, x))


@torch.library.impl(_library, "linear", "CompositeExplicitAutograd")
def _linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    codes_t: Tensor,
    scale_t: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    number: Tensor,
    granularity: str,
    features: int,
    saves_input: bool,
    returns_scale: bool,
    training: bool,
):
    layer = _layers[number.item()]
    x_q = _operand(codes, scale, (x.shape[:-1].numel(), x.shape[-1]), granularity)
    y, weight_scale = product(x_q, layer.own_weight(), bias, layer.precision, x.dtype, training)
    return y.view(*x.shape[:-1], features), weight_scale.clone() if returns_scale else _empty(x, 0)


@torch.library.register_fake("zeropp_fp8::linear", lib=_library)
def _(x, codes, scale, codes_t, scale_t, weight, bias, number, granularity, features, *flags):
    _, returns_scale, _ = flags
    return _empty(x, *x.shape[:-1], features, dtype=x.dtype), _empty(x, 1 if returns_scale else 0)


def _setup_context(ctx, inputs, output) -> None:
    x, _, _, codes_t, scale_t, weight, bias, number, granularity, _, saves_input, *_ = inputs
    saved = (x, scale_t) if saves_input else (codes_t, scale_t)
    ctx.save_for_backward(*saved, output[1], number)
    ctx.granularity = granularity
    ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
    ctx.weight_shape, ctx.weight_dtype = weight.shape, weight.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx, grad_y: Tensor, _) -> tuple[Tensor | None, ...]:
    saved, saved_scale, weight_scale, number = ctx.saved_tensors
    needs_input, needs_weight, needs_bias = (ctx.needs_input_grad[place] for place in (0, 5, 6))
    grad = grad_y.reshape(-1, grad_y.shape[-1])
    grad_input = grad_weight = None
    if needs_input or needs_weight:
        grad_input, grad_weight = torch.ops.zeropp_fp8.linear_backward(
            grad, saved, saved_scale, weight_scale, number, ctx.granularity, ctx.x_dtype, ctx.weight_shape,
            ctx.weight_dtype, needs_input, needs_weight,
        )  # fmt: skip
    return (
        grad_input.view(ctx.x_shape) if needs_input else None,
        *(None,) * 4,
        grad_weight if needs_weight else None,
        grad.sum(0).to(ctx.bias_dtype) if needs_bias else None,
        *(None,) * 6,
    )


torch.library.register_autograd("zeropp_fp8::linear", _backward, setup_context=_setup_context, lib=_library)


@torch.library.impl(_library, "linear_backward", "CompositeExplicitAutograd")
def _linear_backward(
    grad: Tensor,
    saved: Tensor,
    saved_scale: Tensor,
    weight_scale: Tensor,
    number: Tensor,
    granularity: str,
    dtype: torch.dtype,
    weight_shape: Sequence[int],
    weight_dtype: torch.dtype,
    needs_input: bool,
    needs_weight: bool,
):
    layer = _layers[number.item()]
    x: Operand | None = None
    if needs_weight and layer.precision.backward_in_high_precision:
        x = saved.reshape(-1, saved.shape[-1])
    elif needs_weight:
        x = _operand(saved, saved_scale, (saved.shape[0], grad.shape[0]), granularity)
    grad_input, grad_weight = products_of_gradient(
        grad, x, layer.own_weight(), weight_scale if weight_scale.numel() else None, layer.precision, dtype,
        needs_input, needs_weight,
    )  # fmt: skip
    return (
        _empty(grad, 0, dtype=dtype) if grad_input is None else grad_input,
        _empty(grad, 0, dtype=weight_dtype) if grad_weight is None else grad_weight,
    )


@torch.library.register_fake("zeropp_fp8::linear_backward", lib=_library)
def _(grad, saved, saved_scale, weight_scale, number, granularity, dtype, weight_shape, weight_dtype, *needs):
    needs_input, needs_weight = needs
    features = weight_shape[0] * weight_shape[1] // grad.shape[1]
    return (
        _empty(grad, *((grad.shape[0], features) if needs_input else (0,)), dtype=dtype),
        _empty(grad, *(weight_shape if needs_weight else (0,)), dtype=weight_dtype),
    )
