"""Functions of autograd without a part of what torch's own code for them costs per call."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable


def differentiable_once(backward: Callable) -> Callable:
    """torch's `once_differentiable` for the backward of an autograd.Function.

    Its no_grad makes about 15 calls, 240 times a step of 24 blocks; where nobody asks for gradients of gradients
    (create_graph) the grad mode is off in backward anyway.
    """
    guarded = once_differentiable(backward)

    @functools.wraps(backward)
    def either(ctx, *grads):
        return guarded(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return either


def applied(function: type[torch.autograd.Function]) -> Callable:
    """`function.apply`, which asks each argument whether a transform of functorch has left it behind: 12 calls.

    Where a transform is active, torch's own way refuses a function that has no `setup_context`.
    """
    general, single = function.apply, super(torch.autograd.Function, function).apply

    def apply(*args):
        return (general if torch._C._are_functorch_transforms_active() else single)(*args)

    return apply
