"""How an optimizer changes weights, on what one owner has of them, whatever formats they rest in: the contract.

A class of optimizers has an `Update` in UPDATES. It names its states, and works out one step from fp32 numbers, which
are decoded before and encoded after it. Where tensors are owned whole it gets whole tensors. AdamW (adamw.py) has a
kernel instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeropp_fp8.formats.noise import Seed, uniform
from zeropp_fp8.optim.gradients import FP8Gradients
from zeropp_fp8.optim.segments import Segments
from zeropp_fp8.optim.state_buffer import StateBuffer
from zeropp_fp8.optim.state_formats import storage_of_dtype

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ENCODED = (FP8Gradients, StateBuffer)
Computed = tuple[Tensor, Sequence[Tensor]]  # a weight and its states after a step, fp32


@dataclass(frozen=True)
class Owned:
    """Some tensors, or parts of tensors, that one step changes.

    Args:
        segments: the layout of all buffers.
        master: the master weights; None: `weights`, in fp32 or bf16, are the master weights themselves.
        states: in the order of the update's names.
        grads: one contiguous tensor per segment, all of one dtype (fp32, bf16 or fp16), at any alignment and of any
            shape; None leaves its segment as it is. Or FP8 codes laid out by the segments, with a multiplier per
            segment or scales that are powers of two.
        weights: one contiguous tensor per segment, all of one dtype, which get the rounded master weights; or None.
        grad_scale: fp32 [1] on the device, multiplies every gradient.
        seed: round the master weights stochastically with the noise of this seed; None: to nearest.
        shapes: of the segments; None: they are flat.

    Raises:
        ValueError: what is given does not fit the segments.
    """

    segments: Segments
    master: StateBuffer | None
    states: Sequence[StateBuffer]
    grads: Sequence[Tensor | None] | FP8Gradients | StateBuffer
    weights: Sequence[Tensor] | None
    grad_scale: Tensor | None = None
    seed: Seed | None = None
    shapes: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        numels = self.segments.numels
        if any(buffer.segments.numels != numels for buffer in (self.master, *self.states) if buffer is not None):
            raise ValueError("a state is laid out by other segments")
        if not isinstance(self.grads, _ENCODED):
            _check_tensors("grads", self.grads, numels)
        elif self.grads.segments.numels != numels:
            raise ValueError("gradients are laid out by other segments")
        if self.weights is not None:
            _check_tensors("weights", self.weights, numels)
        if self.master is None and numels:
            if self.weights is None:
                raise ValueError("without master weights, weights must be given: they are the master weights then")
            storage_of_dtype(self.weights[0].dtype)

    def gradient(self, segment: int) -> Tensor | None:
        """fp32 [numel], not scaled; None where there is none."""
        if isinstance(self.grads, _ENCODED):
            return self.grads.decode(segment)
        grad = self.grads[segment]
        return None if grad is None else grad.detach().reshape(-1).to(torch.float32)

    def change(self, compute: Callable[[Tensor, Tensor, list[Tensor]], Computed]) -> None:
        """Let each segment's weight and states become what `compute` makes of them and the gradient, rounded.

        The model's weights are written from the rounded master weights, so that a resumed run goes on from the same
        numbers.
        """
        for segment, numel in enumerate(self.segments.numels):
            grad = self.gradient(segment) if numel else None
            if grad is None:
                continue
            weight = None if self.weights is None else self.weights[segment].detach()
            old = weight.reshape(-1).to(torch.float32) if self.master is None else self.master.decode(segment)
            shape = (numel,) if self.shapes is None else self.shapes[segment]
            states = [state.decode(segment).view(shape) for state in self.states]
            new, states = compute(old.view(shape), grad.view(shape), states)
            for buffer, state in zip(self.states, states, strict=True):
                buffer.encode_(segment, state.reshape(-1))
            if self.master is not None:
                self.master.encode_(segment, new.reshape(-1), self.seed)
                if weight is not None:
                    weight.copy_(self.master.decode(segment).view_as(weight))
            else:
                noise = (
                    None if self.seed is None else uniform(self.seed, self.segments.ids[segment], numel, weight.device)
                )
                weight.copy_(storage_of_dtype(weight.dtype).codes_of(new.reshape(-1), noise).view_as(weight))


def _check_tensors(name: str, tensors: Sequence[Tensor | None], numels: Sequence[int]) -> None:
    given = [(tensor, numel) for tensor, numel in zip(tensors, numels) if tensor is not None]
    if len(tensors) != len(numels) or any(tensor.numel() != numel for tensor, numel in given):
        raise ValueError(f"{name} must be one tensor of its size per segment, whose sizes are {list(numels)}")
    for tensor, _ in given:
        if tensor.dtype != given[0][0].dtype or tensor.dtype not in _DTYPES or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous and all fp32, all bf16 or all fp16, got {tensor.dtype} after "
                f"{given[0][0].dtype}, contiguous: {tensor.is_contiguous()}"
            )


class Update:
    """Of one kind of optimizers.

    Attributes:
        states: names in the optimizer's own state and in checkpoints -> the moment whose format each rests in,
            "exp_avg" or "exp_avg_sq".
        needs_whole: it is defined for whole tensors only, so each must have one owner.
    """

    states: Mapping[str, str] = {}
    needs_whole = False

    def refusals(self, options: Mapping[str, Any]) -> Iterator[str]:
        """A line for each option of a param group that has no place here."""
        yield from ()

    def options(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
        """The hyperparameters of a step, as numbers."""
        return {"lr": float(group["lr"])}

    def compute(
        self, weight: Tensor, grad: Tensor, states: list[Tensor], step: int, options: Mapping[str, Any]
    ) -> Computed:
        """The next weight and states of one tensor: fp32, in its shape where one owner has all of it, else flat.

        Args:
            step: which update this is, counted from 1.
        """
        raise NotImplementedError

    def apply(self, owned: Owned, step: int, options: Mapping[str, Any]) -> None:
        """One step of all tensors."""

        def compute(weight: Tensor, grad: Tensor, states: list[Tensor]) -> Computed:
            grad = grad if owned.grad_scale is None else grad * owned.grad_scale
            return self.compute(weight, grad, states, step, options)

        owned.change(compute)


UPDATES: dict[str, Update] = {}  # by the name of the class whose `step` it stands for


def update_of(optimizer: torch.optim.Optimizer) -> Update | None:
    """The update of an optimizer's class, or of that which it inherits its step from; None: there is none."""
    updating = next(cls for cls in type(optimizer).__mro__ if "step" in vars(cls))
    return UPDATES.get(updating.__name__)
