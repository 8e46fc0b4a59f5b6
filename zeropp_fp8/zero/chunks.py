"""A torch optimizer's update of a flat partition, some of its elements after the others.

Its `step` wants fp32 gradients of all that it updates. DeepSpeed gives it a sub-group, by default a billion elements:
with 16-bit weights 4 bytes per element, for the time of the update. Where an element's update needs nothing of other
elements, a chunk's gradients do, and all results keep their bits.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from deepspeed.ops.adam import FusedAdam
from torch import Tensor
from torch.optim import optimizer as of_torch

# Elements of a chunk: 256 MiB of fp32 gradients. On an H100 a fused update of so many takes the memory 0.6 ms (28 bytes
# each), more than Python needs to issue it.
CHUNK = 2**26
# Classes whose `step` computes each element from its own gradient and states; subclasses may do anything.
_ELEMENTWISE = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop),
    FusedAdam,
)


def may_be_cut(optimizer: torch.optim.Optimizer) -> bool:
    """Whether several steps on parts of a tensor are one step on all of it, and nobody counts the steps."""
    hooks = (
        *(optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks),
        *(of_torch._global_optimizer_pre_hooks, of_torch._global_optimizer_post_hooks),
    )
    step = vars(optimizer).get("step")  # put there to see steps; torch's schedulers only note that there was one
    seen = any(hooks) or not (step is None or hasattr(step, "_wrapped_by_lr_sched"))
    return type(optimizer) in _ELEMENTWISE and not seen


@torch.no_grad()
def step_by_chunks(optimizer: torch.optim.Optimizer, flat: Tensor, step: Callable[[int, Tensor], None]) -> None:
    """Update `flat` [elements] by `step(start, part)` for each chunk: a view whose `grad` is a buffer to be filled.

    Of what the optimizer keeps per element of `flat`, a part has a view. Of anything else (a count of steps) it has a
    copy, and what the last part makes of it is kept.
    """
    kept, made, size = optimizer.state.get(flat, {}), {}, min(CHUNK, flat.numel())
    buffer = torch.empty(size, dtype=flat.dtype, device=flat.device)
    starts = range(0, max(1, flat.numel()), CHUNK)  # a rank that owns nothing counts its steps too
    for start in starts:
        own = slice(start, start + size)
        part = flat.detach()[own]
        part.grad = buffer[: part.numel()]
        given = {}
        for name, state in kept.items():
            copied = torch.is_tensor(state) and start != starts[-1]
            given[name] = state[own] if _is_like(state, flat) else state.clone() if copied else state
        if given:
            optimizer.state[part] = dict(given)
        step(start, part)
        for name, state in optimizer.state.pop(part, {}).items():
            if not _is_like(state, part):
                made[name] = state
            elif state is not given.get(name):  # made by this step, the first
                if name not in made:
                    made[name] = torch.empty(flat.shape, dtype=state.dtype, device=state.device)
                made[name][own] = state
    if made:
        optimizer.state[flat].update(made)


def _is_like(state: object, tensor: Tensor) -> bool:
    return torch.is_tensor(state) and state.shape == tensor.shape


class Ranges:
    """Tensors of these sizes, one after the other in a flat one."""

    def __init__(self, numels: Sequence[int]) -> None:
        self._ends = list(itertools.accumulate(numels))
        self._numels = list(numels)

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """(index, first, last, place) of tensors whose elements first to last begin at `place` of a range."""
        for index in range(bisect.bisect_right(self._ends, start), len(self._ends)):
            begin = self._ends[index] - self._numels[index]
            if begin >= stop:
                return
            first, last = max(start - begin, 0), min(self._ends[index], stop) - begin
            if first < last:
                yield index, first, last, begin + first - start
