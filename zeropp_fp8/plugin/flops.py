"""DeepSpeed's FLOPs profiler for layers that do not compute by the torch functions that it counts.

While the profiler runs on a model of the plugin, each linear layer counts once, as in a plain model, whatever computes
it. (DeepSpeed counts ZeRO-3's linear function and also the product inside it, so its own count is twice the model's.)
Torch operations of decoding, casts and collectives count nothing, as kernels that do the same.

The number for backward is DeepSpeed's estimate, 2 x forward. Neither counts code that torch.compile has compiled.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from zeropp_fp8 import sharded
from zeropp_fp8.compute.experts import LowPrecisionExperts, Projection
from zeropp_fp8.compute.grouped import Groups
from zeropp_fp8.compute.linear import _LowPrecisionModule
from zeropp_fp8.compute.swiglu import _SwiGLU

_PUT_BACK = "_zeropp_fp8_put_back"


def counting_start(stock_start: Callable) -> Callable:

    @functools.wraps(stock_start)
    def start_profile(self, ignore_list=None):
        stock_linear = F.linear
        stock_start(self, ignore_list)
        if not _is_plugins(self.model):
            return
        from zeropp_fp8.zero.generation.layers import lora_layers
        from zeropp_fp8.zero.offload import ZeroppOffload

        counted_linear = _counted(stock_linear, _linear_macs)
        counted_linear.__str__ = F.linear.__str__  # stop_profile finds the original function by this name
        F.linear = counted_linear
        put_back: list[tuple[Any, str, Any]] = []

        def replace(owner: Any, name: str, value: Any) -> None:
            put_back.append((owner, name, owner.__dict__.get(name)))
            setattr(owner, name, value)

        replace(_LowPrecisionModule, "_multiply", _counted(_LowPrecisionModule._multiply, _layer_macs, _layer_flops))
        replace(Projection, "__call__", _counted(Projection.__call__, _projection_macs))
        replace(_SwiGLU, "apply", staticmethod(_counted(_SwiGLU.apply, _nothing, _silu_flops)))
        for name in ("pre_sub_module_forward_function", "post_sub_module_forward_function"):
            replace(ZeroppOffload, name, _counted(getattr(ZeroppOffload, name), _nothing))
        loras = {id(layer) for layer in lora_layers(self.model)}
        for layer in self.model.modules():  # inside zeropp_fp8.generation layers have a forward of their own
            if "forward" in layer.__dict__ and (id(layer) in loras or isinstance(layer, nn.Linear)):
                macs = functools.partial(_lora_macs if id(layer) in loras else _layer_macs, layer)
                replace(layer, "forward", _counted(layer.forward, macs))
        setattr(self, _PUT_BACK, put_back)

    return start_profile


def ending_stop(stock_stop: Callable) -> Callable:

    @functools.wraps(stock_stop)
    def stop_profile(self):
        for owner, name, before in reversed(self.__dict__.pop(_PUT_BACK, ())):
            delattr(owner, name) if before is None else setattr(owner, name, before)
        stock_stop(self)

    return stop_profile


def _is_plugins(model: nn.Module) -> bool:
    return any(sharded.known(p).wire is not None for p in model.parameters()) or any(
        isinstance(module, (_LowPrecisionModule, LowPrecisionExperts)) for module in model.modules()
    )


def _counted(function: Callable, macs_of: Callable[..., int], flops_of: Callable[..., int] | None = None) -> Callable:
    """Wrap a function: it counts as these multiply-adds and FLOPs (default: 2 each); calls inside it count nothing."""
    from deepspeed.profiling.flops_profiler import profiler

    counters = profiler.module_flop_count, profiler.module_mac_count

    @functools.wraps(function)
    def counted(*args, **kwargs):
        macs = macs_of(*args, **kwargs)
        flops = 2 * macs if flops_of is None else flops_of(*args, **kwargs)
        for counter, number in zip(counters, (flops, macs)):
            if counter and number:
                counter[-1].append((function.__name__, number))
            counter.append([])
        try:
            return function(*args, **kwargs)
        finally:
            for counter in counters:
                counter.pop()

    return counted


def _nothing(*args, **kwargs) -> int:
    return 0


def _linear_macs(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> int:
    return input.numel() * weight.shape[0]


def _features(layer: nn.Module) -> int:
    """Return the number of output features of a linear layer or a Conv1D."""
    return layer.out_features if isinstance(layer, nn.Linear) else layer.nf


def _layer_macs(layer: nn.Module, input: Tensor) -> int:
    return input.numel() * _features(layer)


def _projection_macs(projection: Projection, x: Tensor, groups: Groups) -> int:
    return groups.row_of.numel() * math.prod(sharded.shape(projection.weight)[1:])


def _layer_flops(layer: nn.Module, input: Tensor) -> int:
    # DeepSpeed counts transformers' Conv1D as torch.addmm, with the numbers of its bias.
    return 2 * _layer_macs(layer, input) + (0 if isinstance(layer, nn.Linear) else layer.nf)


def _lora_macs(layer: nn.Module, input: Tensor, *args, **kwargs) -> int:
    """Count a PEFT layer, including the adapters that are not merged into it."""
    base, macs = layer.base_layer, input.numel() * _features(layer.base_layer)
    active = () if layer.disable_adapters or layer.merged else layer.active_adapters
    ranks = [layer.r[name] for name in active if name in layer.lora_A]
    rows = input.numel() // layer.in_features
    return macs + sum(rows * rank * (layer.in_features + _features(base)) for rank in ranks)


def _silu_flops(gate: Tensor, *args) -> int:
    return gate.numel()  # DeepSpeed does not see the product with the other half, which is written `*`
