"""LoRA layers in one forward: the base layer's product and those of its adapters.

    y = base(x) + sum over adapters of scaling * (B (A x) + bias)        (https://arxiv.org/abs/2106.09685, section 4.1)

PEFT's own forward finds out at every call which adapters are in use and how: 41 calls of Python functions per layer,
and 0.13 to 0.37 ms of an H200's host (benchmarks/results/generation/h200-1-local.json). Here that is looked up once,
and 12 calls are left. DoRA and other variants keep PEFT's forward, and so does a call if something has changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zeropp_fp8.zero.generation.layers import is_linear


class Adapter(NamedTuple):
    """LoRA's two matrices: A [r, K], B [N, r], bias [N] or None, in one dtype."""

    lora_A: Tensor
    lora_B: Tensor
    bias: Tensor | None
    scaling: float


def direct_forward(layer: nn.Module, linear: Callable[[nn.Linear, Sequence[Adapter]], Callable]) -> Callable | None:
    """A function that computes the same as a PEFT layer (`layers.lora_layers`); None where only PEFT can.

    Args:
        layer: evaluates, with hooks of DeepSpeed laid aside and its adapters' values there for as long as this is used.
        linear: the forward of a linear layer with adapters beside it.
    """
    adapters, called = [], []
    if not layer.disable_adapters and not layer.merged:
        variants = getattr(layer, "lora_variant", None)  # an older PEFT has none: left to it
        for name in layer.active_adapters:
            if name not in layer.lora_A:
                continue
            lora_A, lora_B = layer.lora_A[name], layer.lora_B[name]
            plain = variants is not None and name not in variants and is_linear(lora_A) and is_linear(lora_B)
            if not plain or lora_A.bias is not None or lora_A.weight.dtype != lora_B.weight.dtype:
                return None
            bias = None if lora_B.bias is None else lora_B.bias.data
            adapters.append(Adapter(lora_A.weight.data, lora_B.weight.data, bias, float(layer.scaling[name])))
            called += [lora_A, lora_B, layer.lora_dropout[name]]
    elif layer.disable_adapters and layer.merged:
        return None  # PEFT takes them out of the weights first
    base = layer.base_layer
    if is_linear(base):
        called.append(base)
        product = linear(base, adapters)
    else:
        product = with_adapters(base, adapters)
    own = type(layer).forward.__get__(layer)
    hooks = [hooks for module in called for hooks in (module._forward_pre_hooks, module._forward_hooks)]
    active = layer.active_adapter if isinstance(layer.active_adapter, str) else list(layer.active_adapter)
    disabled, merged, scaling = layer.disable_adapters, list(layer.merged_adapters), dict(layer.scaling)

    def forward(input: Tensor, *args, **kwargs) -> Tensor:
        if (
            args
            or kwargs  # an adapter for each sample
            or layer.training  # dropout
            or layer.disable_adapters != disabled
            or layer.active_adapter != active
            or layer.merged_adapters != merged
            or layer.scaling != scaling
            or any(hooks)  # which a user has put on a module within
        ):
            return own(input, *args, **kwargs)
        return product(input)

    return forward


def with_adapters(base: Callable[[Tensor], Tensor], adapters: Sequence[Adapter]) -> Callable[[Tensor], Tensor]:
    """base(x) and adapters beside it, in PEFT's order and dtypes; scaling and sum are rounded together."""
    if not adapters:
        return base

    def forward(input: Tensor) -> Tensor:
        result = base(input)
        dtype = result.dtype
        for lora_A, lora_B, bias, scaling in adapters:
            input = input.to(lora_A.dtype)
            reduced = torch.ops.aten.linear.default(input, lora_A)
            result = torch.add(result, torch.ops.aten.linear.default(reduced, lora_B, bias), alpha=scaling)
        return result.to(dtype)

    return forward
