"""Modules that hand the codes of their result to the linear layer after them (rms_norm.py, swiglu.py)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from zeropp_fp8.compute.linear import LowPrecisionLinear
from zeropp_fp8.compute.scaling import DelayedScaling


class FusedModule(nn.Module):
    """The base of the class that a module has while it is fused."""


@functools.cache
def _fused_class(module_class: type, fused: type[FusedModule]) -> type:
    return type(f"Fused{module_class.__name__}", (fused, module_class), {"plain_class": module_class})


def fuse(module: nn.Module, fused: type[FusedModule]) -> None:
    """Let a module have the forward of `fused`. In place."""
    module.__class__ = _fused_class(type(module), fused)


def restore_fused(module: nn.Module) -> None:
    """Undo `fuse`, if it was done."""
    if isinstance(module, FusedModule):
        module.__class__ = type(module).plain_class
        module.__dict__.pop("feeds", None)


def takes_transposed_codes(linear: LowPrecisionLinear, training: bool) -> bool:
    """Whether a layer multiplies codes of its input in the gradient of its weight, too."""
    return training and linear.weight_requires_grad and not linear.precision.high.grad_weight


def scales_are_known(linear: nn.Module | None) -> bool:
    """Whether a layer's input is cast with a scale of earlier steps."""
    return type(linear) is LowPrecisionLinear and isinstance(linear.precision.scaling, DelayedScaling)


def takes_codes(linear: nn.Module, x: Tensor, other_dtype: torch.dtype) -> bool:
    """Whether a layer takes codes that are made of `x` and something of another dtype: by kernels."""
    if torch.compiler.is_compiling():  # graphs hold the modules as they were written
        return False
    if type(linear) is not LowPrecisionLinear or x.dtype != other_dtype or x.dtype.itemsize != 2 or x.numel() == 0:
        return False
    if linear.precision.high.output:
        return False
    return x.device.type == "cuda" and linear.precision.scaling.knows_input(linear.precision.layer)
