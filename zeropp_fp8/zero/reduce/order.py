"""The one order in which gradients are reduced on every rank.

Stock ZeRO-3 puts a gradient into the bucket when autograd produces it. Ranks whose unused parameters differ (a mixture
of experts, a conditional layer) then fill different buckets, and hang or mix up tensors. Here units (a transformer
block, or a single parameter) enter the bucket in one order, the reverse of registration, in which backward finishes
blocks. A gradient that has not come when a module's backward ends, and cannot come any more, is sent as zeros; so is
one that has not come when the whole backward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.formats.shapes import is_vector


def reduction_units(
    parameters: Sequence[Parameter], registered: Iterable[Parameter], blocks: Sequence[nn.Module], joined_numel: int = 0
) -> list[list[Parameter]]:
    """Cut the trainable `parameters` (in the optimizer's order) into units, in the order of their reduction.

    `registered`: the model's parameters. Units in the order of an optimizer that has them otherwise would wait for one
    another until backward ends. Inside a block the optimizer's order is kept, as in stock's leaf modules.
    `joined_numel` joins tensors that would be small messages: neighbours outside blocks up to that many elements; and
    the vectors (norms, biases) of all blocks, whose format differs from that of the matrices, with the last unit.
    """
    block_of = {id(p): index for index, block in enumerate(blocks) for p in block.parameters()}
    units: dict[object, list[Parameter]] = {}
    vectors: list[Parameter] = []
    for param in parameters:
        index, shared_by = block_of.get(id(param)), sharded.experts_group(param)
        if joined_numel and index is not None and shared_by is None and is_vector(sharded.shape(param)):
            vectors.append(param)
        else:  # those with a tuple for a key are not joined with others
            within = param if index is None else index
            apart = index is not None or shared_by is not None
            units.setdefault((within, shared_by) if apart else param, []).append(param)
    place = {id(p): index for index, p in enumerate(registered)}
    ordered = sorted(units.items(), key=lambda item: max(place[id(p)] for p in item[1]), reverse=True)
    if vectors:
        ordered.append((vectors[0], vectors))
    joined: list[list[Parameter]] = []
    open_numel = None  # elements of the last unit, if it may grow
    for key, unit in ordered:
        numel = sum(sharded.numel(p) for p in unit)
        if isinstance(key, tuple):
            joined.append(unit)
            open_numel = None
        elif open_numel is not None and open_numel + numel <= joined_numel:
            joined[-1] += unit
            open_numel += numel
        else:
            joined.append(unit)
            open_numel = numel
    return joined


def is_still_to_come(param: Parameter) -> bool:
    """Whether the running backward will add, or has added, to the gradient of `param`. Call it inside the backward."""
    if not param.requires_grad:
        return False
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(param).node)
    except RuntimeError:  # torch.autograd.grad() returns this gradient, and adds to none
        return False


def runs_to_its_leaves() -> bool:
    """Whether the running backward goes to all leaves. Call it inside a node.

    torch.autograd.grad() goes to the tensors that it names: it passes modules, but no parameter gets a gradient.
    """
    node = torch._C._current_autograd_node()
    below = node
    while below is not None:  # every way down ends at a leaf
        node, below = below, next((f for f, _ in below.next_functions if f is not None), None)
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad() named the leaf itself
        return False


class FixedOrder:
    """Hand units of parameters to `reduce` in the fixed order, during one backward pass.

    Attributes:
        has_begun: a backward has reached the model, and `finish` has not been called since.
    """

    def __init__(self, units: list[list[Parameter]], reduce: Callable[[list[Parameter]], None]) -> None:
        self.units = units
        self._reduce = reduce
        self._unit_of = {id(p): index for index, unit in enumerate(units) for p in unit}
        self.start_again()

    def start_again(self) -> None:
        """Forget the gradients that a backward has brought so far."""
        self.has_begun = False
        self._next = 0
        self._ready: set[int] = set()
        self._missing = [len(unit) for unit in self.units]

    def begin(self) -> None:
        """Begin a backward that has reached the model. It has on every rank, whatever gradients each rank gets."""
        self.has_begun = True

    def is_ready(self, param: Parameter) -> None:
        """Count `param.grad`, which autograd has produced."""
        self.has_begun = True
        key = id(param)
        index = self._unit_of[key]
        if index < self._next:
            # A second gradient in one backward, after the first has been reduced, adds to the first.
            self._reduce([param])
            return
        if key not in self._ready:
            self._ready.add(key)
            self._missing[index] -= 1
        while self._next < len(self.units) and self._missing[self._next] == 0:
            self._reduce_next()

    def module_ended(self, params: Iterable[Parameter]) -> None:
        """End the backward of the only module that has `params`: send zeros for gradients that do not come.

        A rank that uses no part of a block then reduces the block where the others do, before it gathers the next one.
        If it waited for the end of backward, ranks would meet in different collectives and hang. A parameter that is
        read before the module's forward (by its parent, by weight_norm) gets its gradient after the module's backward.
        """
        for param in params:
            index = self._unit_of.get(id(param))
            waits = index is not None and index >= self._next and id(param) not in self._ready
            if waits and not is_still_to_come(param):
                set_zero_gradient(param)
                self.is_ready(param)

    def finish(self) -> None:
        """End a backward: reduce the remaining units, with zeros for gradients that did not come.

        A second call does nothing (engine.allreduce_gradients() after engine.backward()): another round of zeros
        would replace the gradients, or be added to the error feedback.
        """
        if not self.has_begun:
            return
        while self._next < len(self.units):
            for param in self.units[self._next]:
                if param.grad is None:
                    set_zero_gradient(param)
            self._reduce_next()
        self.start_again()

    def _reduce_next(self) -> None:
        self._reduce(self.units[self._next])
        self._next += 1


def set_zero_gradient(param: Parameter) -> None:
    """Give a ZeRO-3 parameter, gathered or not, a gradient of zeros in its full shape."""
    data = param.data
    # torch checks a gradient's shape against data's; a zero-stride view has the shape without the memory.
    param.data = torch.zeros(1, dtype=data.dtype, device=data.device).expand(sharded.shape(param))
    param.grad = torch.zeros(sharded.shape(param), dtype=data.dtype, device=data.device)
    param.data = data
