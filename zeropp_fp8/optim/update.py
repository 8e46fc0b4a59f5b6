"""How an optimizer changes weights, on what one owner has of them, whatever formats store them: the contract.

A class of optimizers has an `Update` in UPDATES. It names its states, and works out one step from fp32 numbers, which
are decoded before and encoded after it. Where tensors are owned whole it gets whole tensors. AdamW (adamw.py) has a
kernel instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeropp_fp8.optim.gradients import FP8Gradients
from zeropp_fp8.optim.segments import Segments
from zeropp_fp8.optim.state_buffer import StateBuffer

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ENCODED = (FP8Gradients, StateBuffer)
_TOGETHER = 1 << 24  # elements that are changed together: one matrix of 4096 x 4096 keeps a GPU busy
Computed = tuple[Tensor, Sequence[Tensor]]  # a weight and its states after a step, fp32


@dataclass(frozen=True)
class Owned:
    """Some tensors, or parts of tensors, that one step changes.

    Args:
        segments: the layout of all buffers.
        master: the master weights.
        states: in the order of the update's names.
        grads: one contiguous tensor per segment, all of one dtype (fp32, bf16 or fp16), at any alignment and of any
            shape. Or FP8 codes laid out by the segments, with a multiplier per segment or scales that are powers of
            two.
        weights: one contiguous tensor per segment, all of one dtype, which get the rounded master weights.
        grad_scale: fp32 [1] on the device, multiplies every gradient.
        shapes: of the segments.

    Raises:
        ValueError: what is given does not fit the segments.
    """

    segments: Segments
    master: StateBuffer
    states: Sequence[StateBuffer]
    grads: Sequence[Tensor] | FP8Gradients | StateBuffer
    weights: Sequence[Tensor]
    grad_scale: Tensor
    shapes: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        numels = self.segments.numels
        if any(buffer.segments.numels != numels for buffer in (self.master, *self.states)):
            raise ValueError("a state is laid out by other segments")
        if not isinstance(self.grads, _ENCODED):
            _check_tensors("grads", self.grads, numels)
        elif self.grads.segments.numels != numels:
            raise ValueError("gradients are laid out by other segments")
        _check_tensors("weights", self.weights, numels)

    def gradient(self, segment: int) -> Tensor:
        """fp32 [numel], scaled."""
        encoded = isinstance(self.grads, _ENCODED)
        grad = self.grads.decode(segment) if encoded else self.grads[segment].detach().reshape(-1).to(torch.float32)
        return grad * self.grad_scale

    def change(self, compute: Callable[[Tensor, Tensor, list[Tensor]], Computed]) -> None:
        """Let weights and states become what `compute` makes of them and the gradients, rounded.

        It gets tensors of one shape together: [how many, *shape]. The model's weights are written from the rounded
        master weights, so that a resumed run goes on from the same numbers.
        """
        for segments in self._of_one_shape():
            shape = (len(segments), *self.shapes[segments[0]])
            decoded = [_stacked(map(buffer.decode, segments), shape) for buffer in (self.master, *self.states)]
            new, states = compute(decoded[0], _stacked(map(self.gradient, segments), shape), decoded[1:])
            for row, segment in enumerate(segments):
                for buffer, state in zip(self.states, states, strict=True):
                    buffer.encode_(segment, state[row].reshape(-1))
                self.master.encode_(segment, new[row].reshape(-1))
                weight = self.weights[segment].detach()
                weight.copy_(self.master.decode(segment).view_as(weight))

    def _of_one_shape(self) -> Iterator[list[int]]:
        """Segments that are changed together: small ones of one shape."""
        together: dict[tuple[int, ...], list[int]] = {}
        for segment, numel in enumerate(self.segments.numels):
            batch = together.setdefault(tuple(self.shapes[segment]), []) if numel else []
            batch.append(segment)
            if numel and (len(batch) + 1) * numel > _TOGETHER:
                yield together.pop(tuple(self.shapes[segment]))
        yield from together.values()


def _stacked(tensors: Iterable[Tensor], shape: Sequence[int]) -> Tensor:
    first, *others = tensors
    return (torch.stack([first, *others]) if others else first).view(shape)


def _check_tensors(name: str, tensors: Sequence[Tensor], numels: Sequence[int]) -> None:
    if tuple(tensor.numel() for tensor in tensors) != tuple(numels):
        raise ValueError(f"{name} must be one tensor of its size per segment, whose sizes are {list(numels)}")
    for tensor in tensors:
        if tensor.dtype != tensors[0].dtype or tensor.dtype not in _DTYPES or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous and all fp32, all bf16 or all fp16, got {tensor.dtype} after "
                f"{tensors[0].dtype}, contiguous: {tensor.is_contiguous()}"
            )


class Update:
    """The update of one kind of optimizers.

    Attributes:
        states: names in the optimizer's own state -> the moment whose format stores it, "exp_avg" or "exp_avg_sq",
            and by whose name it is saved; each moment once.
        needs_whole: it is defined for whole tensors only: each has one owner.
        takes_vectors: it is defined for tensors of fewer than two dimensions too.
    """

    states: Mapping[str, str] = {}
    needs_whole = False
    takes_vectors = True

    def __init_subclass__(cls) -> None:
        if len(set(cls.states.values())) < len(cls.states):
            raise TypeError(f"{cls.__name__}: states are saved by the names of moments, so each moment may come once")

    def of_group(self, group: Mapping[str, Any]) -> Update:
        """The update of a param group, of the same optimizer."""
        return self

    def refusals(self, options: Mapping[str, Any]) -> Iterator[str]:
        """A line for each option of a param group that has no place here."""
        yield from ()

    def options(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
        """The hyperparameters of a step, as numbers."""
        return {"lr": float(group["lr"])}

    def operations(self, shape: Sequence[int], group: Mapping[str, Any]) -> int:
        """Floating-point operations of a step for a tensor of this shape, where it needs whole tensors; else 0."""
        return 0

    def compute(
        self, weight: Tensor, grad: Tensor, states: list[Tensor], step: int, options: Mapping[str, Any]
    ) -> Computed:
        """The next weights and states of tensors of one shape, fp32 [how many, *shape]; flat where one owner does not
        have all of a tensor.

        Args:
            step: which update this is, counted from 1.
        """
        raise NotImplementedError

    def apply(self, owned: Owned, step: int, options: Mapping[str, Any]) -> None:
        """One step of all tensors."""
        owned.change(functools.partial(self.compute, step=step, options=options))


UPDATES: dict[str, Update] = {}  # by the name of the class whose `step` it stands for


def update_of(optimizer: torch.optim.Optimizer) -> Update | None:
    """The update of an optimizer's class, or of that which it inherits its step from; None: there is none."""
    updating = next((cls.__name__ for cls in type(optimizer).__mro__ if "step" in vars(cls)), None)
    return UPDATES.get(updating)  # DeepSpeed's DummyOptim has no step
