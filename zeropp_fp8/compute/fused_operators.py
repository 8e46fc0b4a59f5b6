"""RMSNorm and SwiGLU before low-precision layers as operators of torch, for torch.compile's graphs.

    rms_norm, swiglu    as the modules were written; a trace takes them apart into that, and
      rms_norm_input      the operands of an RMSNorm, of x and the 1 / rms of its rows
      swiglu_input        the operands of silu(gate) * up
      swiglu_gradients    the operands of both gradients

Operands ride on the results to the layers (handed_on.py), and a graph drops what nobody reads: between gate and down
16 bits are neither written nor read, in forward and in backward. What is left of a norm, a compiler fuses with the sum
before it. An operator finds out by itself whether scales are known, so that the first step has the same graph.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zeropp_fp8.compute.casts import gradients_of_swiglu
from zeropp_fp8.compute.fused_module import takes_transposed_codes
from zeropp_fp8.compute.handed_on import hand_on
from zeropp_fp8.compute.linear import LowPrecisionLinear
from zeropp_fp8.compute.operators import layer_of, library, like_pair_of_parts, pair_of_parts


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, linear: LowPrecisionLinear, training: bool) -> Tensor:
    """RMSNorm of x [..., K], with the operands that a layer takes."""
    dtype = linear.precision.scaling.codes_dtype("activations", x.dtype)
    transposed = takes_transposed_codes(linear, training)
    return torch.ops.zeropp_fp8.rms_norm(x, weight, epsilon, linear.number, dtype, transposed, training)


def swiglu(
    gate: Tensor, up: Tensor, sources: tuple[LowPrecisionLinear, ...], down: LowPrecisionLinear, training: bool
) -> Tensor:
    """silu(gate) * up, with the operands that `down` takes.

    Args:
        sources: the layers whose results gate and up are, if their gradients are to come as operands; or nothing.
    """
    scaling = down.precision.scaling
    dtypes = (scaling.codes_dtype(role, gate.dtype) for role in ("activations", "gradients"))
    transposed = takes_transposed_codes(down, training)
    sources_t = any(source._parameters["weight"].requires_grad for source in sources)
    numbers = [source.number for source in sources]
    return torch.ops.zeropp_fp8.swiglu(gate, up, down.number, numbers, *dtypes, transposed, sources_t, training)


# -- operators --------------------------------------------------------------------------------------------------------

_PARTS = "(Tensor codes, Tensor scale, Tensor codes_t, Tensor scale_t)"
library.define(
    "rms_norm(Tensor x, Tensor weight, float epsilon, Tensor number, ScalarType dtype, bool transposed, "
    "bool training) -> Tensor"
)
library.define(
    "rms_norm_input(Tensor x, Tensor weight, Tensor inverse_rms, Tensor number, ScalarType dtype, bool transposed, "
    f"bool training) -> {_PARTS}"
)
library.define(
    "swiglu(Tensor gate, Tensor up, Tensor number, Tensor[] sources, ScalarType dtype, ScalarType grad_dtype, "
    "bool transposed, bool sources_t, bool training) -> Tensor"
)
library.define(
    f"swiglu_input(Tensor gate, Tensor up, Tensor number, ScalarType dtype, bool transposed, bool training) -> {_PARTS}"
)
library.define(
    "swiglu_gradients(Tensor grad, Tensor gate, Tensor up, Tensor gate_number, Tensor up_number, ScalarType dtype, "
    "bool transposed) -> (Tensor gate_codes, Tensor gate_scale, Tensor gate_codes_t, Tensor gate_scale_t, "
    "Tensor up_codes, Tensor up_scale, Tensor up_codes_t, Tensor up_scale_t)"
)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


@torch.library.impl(library, "rms_norm", "CompositeImplicitAutograd")
def _rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, number: Tensor, dtype: torch.dtype, transposed: bool, training: bool
) -> Tensor:
    numbers = x.to(torch.float32)
    inverse_rms = torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + epsilon)
    y = weight * (numbers * inverse_rms).to(x.dtype)
    given = (tensor.detach() for tensor in (x, weight, inverse_rms))
    hand_on(y, torch.ops.zeropp_fp8.rms_norm_input(*given, number, dtype, transposed, training), transposed, training)
    return y


@torch.library.impl(library, "rms_norm_input", "CompositeExplicitAutograd")
def _rms_norm_input(
    x: Tensor,
    weight: Tensor,
    inverse_rms: Tensor,
    number: Tensor,
    dtype: torch.dtype,
    transposed: bool,
    training: bool,
):
    precision = layer_of(number).precision
    _, pair = precision.scaling.rms_norm_input(
        precision.layer, _matrix(x), weight, inverse_rms.view(-1), transposed, training, keep_values=False
    )
    return pair_of_parts(pair, x)


@torch.library.register_fake("zeropp_fp8::rms_norm_input", lib=library)
def _(x, weight, inverse_rms, number, dtype, transposed, training):
    return like_pair_of_parts(x, "tensor", dtype, transposed)


@torch.library.impl(library, "swiglu", "CompositeImplicitAutograd")
def _swiglu(
    gate: Tensor,
    up: Tensor,
    number: Tensor,
    sources: list[Tensor],
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    transposed: bool,
    sources_t: bool,
    training: bool,
) -> Tensor:
    y = _SwiGLU.apply(gate, up, grad_dtype, sources_t, *sources) if sources else F.silu(gate) * up
    parts = torch.ops.zeropp_fp8.swiglu_input(gate.detach(), up.detach(), number, dtype, transposed, training)
    hand_on(y, parts, transposed, training)
    return y


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, whose gradients carry their operands."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, grad_dtype: torch.dtype, transposed: bool, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, *sources)
        ctx.options = grad_dtype, transposed
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, *sources = ctx.saved_tensors
        gradients = gradients_of_swiglu(grad, gate, up)
        _, transposed = ctx.options
        parts = torch.ops.zeropp_fp8.swiglu_gradients(grad, gate, up, *sources, *ctx.options)
        for gradient, own in zip(gradients, (parts[:4], parts[4:])):
            hand_on(gradient, own, transposed, training=True)
        return *gradients, *(None,) * 4


@torch.library.impl(library, "swiglu_input", "CompositeExplicitAutograd")
def _swiglu_input(gate: Tensor, up: Tensor, number: Tensor, dtype: torch.dtype, transposed: bool, training: bool):
    precision = layer_of(number).precision
    _, pair = precision.scaling.swiglu_input(
        precision.layer, _matrix(gate), _matrix(up), transposed, training, keep_values=False
    )
    return pair_of_parts(pair, gate)


@torch.library.register_fake("zeropp_fp8::swiglu_input", lib=library)
def _(gate, up, number, dtype, transposed, training):
    return like_pair_of_parts(gate, "tensor", dtype, transposed)


@torch.library.impl(library, "swiglu_gradients", "CompositeExplicitAutograd")
def _swiglu_gradients(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_number: Tensor,
    up_number: Tensor,
    dtype: torch.dtype,
    transposed: bool,
) -> tuple[Tensor, ...]:
    precisions = [layer_of(number).precision for number in (gate_number, up_number)]
    layers = tuple(precision.layer for precision in precisions)
    pairs = precisions[0].scaling.swiglu_gradients(layers, _matrix(grad), _matrix(gate), _matrix(up), transposed)
    return *pair_of_parts(pairs[0], gate), *pair_of_parts(pairs[1], up)


@torch.library.register_fake("zeropp_fp8::swiglu_gradients", lib=library)
def _(grad, gate, up, gate_number, up_number, dtype, transposed):
    return *like_pair_of_parts(gate, "tensor", dtype, transposed), *like_pair_of_parts(up, "tensor", dtype, transposed)
