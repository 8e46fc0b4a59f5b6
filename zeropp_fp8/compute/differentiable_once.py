"""Backward passes that have no backward pass of their own, without what torch's decorator for them costs a call."""

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
