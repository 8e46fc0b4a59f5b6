"""The codes of a unit as its gather brings them, to be kept and multiplied with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.zero.gather.gatherer import Gatherer
from zeropp_fp8.zero.gather.sliced import SlicedUnit

if TYPE_CHECKING:
    from zeropp_fp8.kernels.linear.quantized_weight import QuantizedWeight  # needs Triton, which is loaded on first use


def holds_codes(unit: SlicedUnit) -> bool:
    """Whether this rank has the payloads of all ranks between gathers."""
    route = unit.route
    return route.world_size == 1 or (unit.keeps_secondary and route.world_size == route.reached)


def take_codes(gatherer: Gatherer, unit: SlicedUnit) -> Tensor:
    """uint8 [ranks, row bytes]: the payloads of all ranks. Collective.

    They stay as they are until the weights change: memory of their own, unless this rank has them anyway.
    """
    gatherer.hops.start(unit)
    unit.pending.wait()
    codes = unit.codes_in(unit.pending.gathered)
    if not holds_codes(unit):
        codes = codes.clone()
    gatherer.hops.end(unit)
    return codes


def values_of(unit: SlicedUnit, codes: Tensor) -> dict[int, Tensor]:
    """The values of its parameters, by id(parameter), out of `take_codes`."""
    return {id(param): value for param, value in zip(unit.packed, unit.values_in(codes))}


def quantized_weight(unit: SlicedUnit, param: Parameter, codes: Tensor) -> QuantizedWeight | None:
    """The operand of `quantized_linear` for a parameter in `codes`, a stack as one matrix; None where it cannot."""
    from zeropp_fp8.kernels.linear.quantized_weight import can_multiply

    index = next(i for i, packed in enumerate(unit.packed) if packed is param)
    wire_format, slice_numel = unit.layout.formats[index], unit.layout.slice_numels[index]
    if not can_multiply(wire_format) or slice_numel % wire_format.block_size:
        return None
    if sharded.shape(param)[-1] % wire_format.block_size:  # a block of codes would reach into the next row
        return None
    return unit.weight_in(index, codes)
