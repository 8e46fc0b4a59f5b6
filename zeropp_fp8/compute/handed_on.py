"""Operands that were made together with a tensor: inside a trace they ride on it to the layer that multiplies it.

Graphs of torch.compile have no memory by which eager code would recognize a tensor (scaling.py). But the Python objects
that a trace passes from operator to operator, forward and backward, are there as long as it lasts. Where the objects
differ after all, or somebody has written into the tensor, a layer casts it by itself.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Codes and scale of the operand [R, C], and of the one [C, R]; one scale of all of it stands in the first place only.
Parts = tuple[Tensor, Tensor, Tensor, Tensor]
_ATTRIBUTE = "zeropp_fp8_operands"


class _HandedOn(NamedTuple):
    parts: Parts
    transposed: bool
    training: bool
    version: int


def hand_on(tensor: Tensor, parts: Parts, transposed: bool, training: bool) -> None:
    """Let a tensor carry its operands, of which `transposed` says whether the second one was made."""
    if not tensor.is_inference():  # which do not count changes
        setattr(tensor, _ATTRIBUTE, _HandedOn(parts, transposed, training, tensor._version))


def handed_on(tensor: Tensor, transposed: bool, training: bool) -> Parts | None:
    """The operands that a tensor carries, if they serve; those of an evaluation have recorded nothing."""
    found: _HandedOn | None = getattr(tensor, _ATTRIBUTE, None)
    if found is None or found.version != tensor._version or found.training != training:
        return None
    return found.parts if found.transposed or not transposed else None
