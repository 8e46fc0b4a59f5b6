"""A low-precision linear layer in graphs of torch.compile.

    linear    the layer, which a trace takes apart into
      cast      the operands of a matrix; a graph makes equal calls once, so layers that share an input share them
      products  y = x W^T, and in backward grad_input = g W, grad_weight = g^T x: torch's own operators

Blocks of one class share a graph, whose inputs are tensors. So a weight that is there as codes on its Parameter enters
as these codes, in tensors that stay the same from gather to gather (`sharded.set_operand`): backward saves them and
finds in them what was gathered for it. Scales lie in tables that casts write to: a graph gets the number of the layer,
as a tensor, by which `cast` finds them. What `cast` returns is a graph's own, which may use its memory again.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zeropp_fp8 import sharded
from zeropp_fp8.compute.operand import ALIGNMENT, BLOCK, TILE_SCALES, Float8Operand
from zeropp_fp8.compute.products import HighPrecision, LinearPrecision, product, products_of_gradient
from zeropp_fp8.compute.scaling import FP8_DTYPES, ROLES, Operand, Role

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


# -- what a graph knows of a layer -------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """The common traits of layers that share a graph."""

    granularity: str
    formats: tuple[str, ...]  # in the order of ROLES
    weight_is_transposed: bool
    high: HighPrecision

    def codes_dtype(self, role: Role, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.granularity == "rounded" else FP8_DTYPES[self.formats[ROLES.index(role)]]

    def granularity_of(self, role: Role) -> str:
        return "tile" if role == "weights" and self.granularity == "block" else self.granularity


def kind_of(precision: LinearPrecision) -> str:
    """A layer's kind as an argument of operators: text, for graphs are kept on disk for other processes."""
    formats = ",".join(precision.scaling.formats[role] for role in ROLES)
    flags = ",".join(str(int(flag)) for flag in (precision.weight_is_transposed, *precision.high))
    return f"{precision.scaling.granularity} {formats} {flags}"


@functools.cache
def _kind(text: str) -> _Kind:
    granularity, formats, flags = text.split()
    transposed, *high = (flag == "1" for flag in flags.split(","))
    return _Kind(granularity, tuple(formats.split(",")), transposed, HighPrecision(*high))


class _ScalingInGraphs:
    """Stands for a layer's `Scaling` while it is traced: its casts are nodes of the graph. An input has the scale of
    `caster`, another layer's number."""

    def __init__(self, kind: str, number: Tensor, caster: Tensor) -> None:
        self._kind, self._number, self._caster = kind, number, caster

    def quantize(self, layer, role, matrix, plain, transposed, scale=None, training=True):
        return self._cast(self._number, role, matrix, plain, transposed, scale, training)

    def quantize_input(self, layer, x, plain, transposed, training):
        matrix = x.reshape(-1, x.shape[-1])
        return self._cast(self._caster, "activations", matrix, plain, transposed, None, training)

    def _cast(self, number, role, matrix, plain, transposed, scale, training):
        parts = torch.ops.zeropp_fp8.cast(matrix, scale, number, role, self._kind, plain, transposed, training)
        (rows, columns), granularity = matrix.shape, _kind(self._kind).granularity_of(role)
        shapes = [(rows, columns)] * plain + [(columns, rows)] * transposed
        codes, scales = parts[: len(shapes)], parts[len(shapes) :]
        if granularity != "rounded":
            scales = scales * len(codes) if granularity == "tensor" else scales
            codes = [Float8Operand(*each, granularity) for each in zip(codes, scales, shapes, strict=True)]
        return codes[0] if plain else None, codes[-1] if transposed else None


class _GatheredOperand(Float8Operand):
    """Codes of a weight that enter a graph."""

    def transposed(self) -> Float8Operand:
        """As a graph makes them; sides are multiples of what GEMMs want (convert.py)."""
        codes_t = self.codes.view(torch.uint8).t().contiguous().view(self.dtype)
        scale = self.scale.t().contiguous() if self.granularity == "tile" else self.scale
        return Float8Operand(codes_t, scale, self.shape[::-1], self.granularity)


def _precision(kind: str, number: Tensor, caster: Tensor) -> LinearPrecision:
    known = _kind(kind)
    scaling = _ScalingInGraphs(kind, number, caster)
    return LinearPrecision(scaling, 0, "a layer in a graph", known.weight_is_transposed, known.high)


def _with_codes(weight: Tensor, codes: Tensor | None, scale: Tensor | None, kind: str) -> Tensor:
    """The weight, which has its codes as a Parameter has them."""
    if codes is not None:
        granularity = _kind(kind).granularity_of("weights")
        sharded.remember(weight, operand=_GatheredOperand(codes, scale, tuple(weight.shape), granularity))
    return weight


# -- the layer ---------------------------------------------------------------------------------------------------------

library.define(
    "linear(Tensor x, Tensor weight, Tensor? codes, Tensor? scale, Tensor? bias, Tensor number, Tensor caster, "
    "str kind, bool training) -> Tensor"
)


def linear(layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """layer(x) of operators: x [..., in], the result [..., out].

    Args:
        layer: a converted layer, with the `weight` that is its Parameter.
    """
    training = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    known = getattr(weight, sharded.SLOT, None)  # a trace follows attributes, not __dict__
    codes, scale = (None, None) if known is None or known.operand is None else known.in_graphs
    (caster,) = layer.casts_input
    return torch.ops.zeropp_fp8.linear(x, weight, codes, scale, bias, layer.number, caster.number, layer.kind, training)


@torch.library.impl(library, "linear", "CompositeImplicitAutograd")
def _linear(
    x: Tensor,
    weight: Tensor,
    codes: Tensor | None,
    scale: Tensor | None,
    bias: Tensor | None,
    number: Tensor,
    caster: Tensor,
    kind: str,
    training: bool,
) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        precision, needs_x = _precision(kind, number, caster), training and weight.requires_grad
        x_q, x_t_q = precision.input_operands(x.detach(), needs_x, training)
        saved = x.detach() if needs_x and x_t_q is None else x_t_q
        return _Linear.apply(x, weight, bias, codes, scale, number, x_q, saved, kind, training)


class _Linear(torch.autograd.Function):
    """A layer as autograd sees it. Of x the product takes its operand only."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        codes: Tensor | None,
        scale: Tensor | None,
        number: Tensor,
        x_q: Operand,
        saved_x: Operand | None,
        kind: str,
        training: bool,
    ) -> Tensor:
        precision = _precision(kind, number, number)
        y, weight_scale = product(x_q, _with_codes(weight, codes, scale, kind), bias, precision, x.dtype, training)
        if training:
            ctx.of_x, tensors = None, () if saved_x is None else (saved_x,)
            if isinstance(saved_x, Float8Operand):
                ctx.of_x, tensors = (saved_x.shape, saved_x.granularity), (saved_x.codes, saved_x.scale)
            ctx.save_for_backward(weight, codes, scale, number, weight_scale, *tensors)
            ctx.kind, ctx.x_shape, ctx.x_dtype = kind, x.shape, x.dtype
            ctx.bias_dtype = None if bias is None else bias.dtype
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        weight, codes, scale, number, weight_scale, *saved = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad = grad_y.reshape(-1, grad_y.shape[-1])
        x = saved[0] if saved else None
        if ctx.of_x is not None:
            x = Float8Operand(*saved, *ctx.of_x)
        elif saved and _kind(ctx.kind).high.grad_weight:
            x = x.reshape(grad.shape[0], -1).t()
        with torch.autocast(grad.device.type, enabled=False):
            grad_input, grad_weight = products_of_gradient(
                grad, x, _with_codes(weight, codes, scale, ctx.kind), weight_scale,
                _precision(ctx.kind, number, number), ctx.x_dtype, needs_input, needs_weight,
            )  # fmt: skip
            grad_bias = grad.sum(0).to(ctx.bias_dtype) if needs_bias else None
        return None if grad_input is None else grad_input.view(ctx.x_shape), grad_weight, grad_bias, *(None,) * 7


# -- the cast ----------------------------------------------------------------------------------------------------------

library.define(
    "cast(Tensor matrix, Tensor? scale, Tensor number, str role, str kind, bool plain, bool transposed, "
    "bool training) -> Tensor[]"
)


@torch.library.impl(library, "cast", "CompositeExplicitAutograd")
def _cast(
    matrix: Tensor,
    scale: Tensor | None,
    number: Tensor,
    role: Role,
    kind: str,
    plain: bool,
    transposed: bool,
    training: bool,
) -> list[Tensor]:
    """The codes of the operands asked for, [R, C] before [C, R], then their scales: one where they share it."""
    precision = layer_of(number).precision
    pair = precision.scaling.quantize(precision.layer, role, matrix, plain, transposed, scale, training, True)
    operands = [operand for operand, asked in zip(pair, (plain, transposed)) if asked]
    if isinstance(operands[0], Tensor):
        return operands
    scales = [operand.scale for operand in operands]
    if operands[0].granularity == "tensor":
        scales = scales[:1]
    return [operand.codes for operand in operands] + scales


@torch.library.register_fake("zeropp_fp8::cast", lib=library)
def _(matrix, scale, number, role, kind, plain, transposed, training):
    granularity, dtype = _kind(kind).granularity_of(role), _kind(kind).codes_dtype(role, matrix.dtype)
    shapes = [matrix.shape] * plain + [matrix.shape[::-1]] * transposed
    multiple = {"tensor": ALIGNMENT, "row": ALIGNMENT, "rounded": 1}.get(granularity, BLOCK)
    codes = [matrix.new_empty(rows, -(-summed // multiple) * multiple, dtype=dtype) for rows, summed in shapes]
    if granularity == "rounded":
        return codes
    if granularity == "tensor":
        return [*codes, matrix.new_empty(1, dtype=torch.float32)]
    return codes + [_like_scale(rows, summed, granularity, matrix) for rows, summed in shapes]


def _like_scale(rows: int, summed: int, granularity: str, like: Tensor) -> Tensor:
    """A tensor as the scale of an operand [rows, K] is laid out."""

    def empty(*shape: int) -> Tensor:
        return like.new_empty(shape, dtype=torch.float32)

    columns = -(-summed // BLOCK)
    if granularity == "row":
        return empty(rows, 1)
    if granularity == "block":
        return empty(columns, rows).t()
    return empty(-(-rows // BLOCK), -(-columns // TILE_SCALES) * TILE_SCALES)[:, :columns]
