"""FP8 operands straight from the codes of the frozen store.

Where a linear layer computes in FP8 with one scale per tensor, decoding its weight to 16 bits (2 bytes written),
reading that (2) and casting it (1) is one kernel here: codes in (0.5), FP8 codes out (1). The scale is that of the
largest magnitude of the decoded weight, which never changes, so it is found once. A weight that rests in FP8 with one
scale is the operand already: its codes are copied into one piece (1 and 1 byte per element), and keep their scale.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.compute import casts
from zeropp_fp8.compute.operand import Float8Operand
from zeropp_fp8.formats import TensorScaledFormat
from zeropp_fp8.formats.shapes import is_matrix
from zeropp_fp8.zero.frozen.store import stored_weight
from zeropp_fp8.zero.session import Session

if TYPE_CHECKING:
    from zeropp_fp8.kernels.linear.quantized_weight import QuantizedWeight

_ONE_SCALE = ("delayed", "current")
DTYPE = torch.float8_e4m3fn


class FrozenOperands:
    """The stored weights of one engine that go to their GEMMs as FP8 codes, and their scales.

    Empty unless linear layers compute in FP8 with one scale per tensor.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        # By sharded.key, once they are known: fp32 [1] each, (the multiplier of decoding, that of encoding if needed).
        self._scales: dict[int, tuple[Tensor, Tensor | None] | None] = {}

    def attach(self, params: Iterable[Parameter]) -> None:
        """Take over those of an engine's parameters that are stored and are weights of layers that compute in FP8."""
        conversion = self._session.conversion
        if conversion is None:
            return
        compute = conversion.scaling.compute
        if compute.scaling not in _ONE_SCALE:
            return
        in_high = {id(module.weight): module.precision.high.takes_weight for module in conversion.converted.values()}
        self._scales |= {
            sharded.key(p): None for p in params if id(p) in in_high and _is_convertible(p, in_high[id(p)])
        }

    def __contains__(self, param: Parameter) -> bool:
        return sharded.key(param) in self._scales

    def __len__(self) -> int:
        return len(self._scales)

    def clear(self) -> None:
        """Codes go to no product any more: their layers multiply what they decode to."""
        self._scales.clear()

    def changed(self, params: Iterable[Parameter] | None) -> None:
        """Weights (None: all) were written: their scales are to be found again."""
        ids = list(self._scales) if params is None else [sharded.key(p) for p in params if p in self]
        self._scales.update(dict.fromkeys(ids))

    def rests_as_operand(self, param: Parameter) -> bool:
        """Whether the codes at rest are those that the GEMM multiplies."""
        return param in self and isinstance(stored_weight(param).wire_format, TensorScaledFormat)

    def operand_at_rest(
        self, param: Parameter, rows: Tensor, slice_numel: int, order: Tensor | None = None
    ) -> Float8Operand:
        """The operand of a weight that `rests_as_operand`.

        Args:
            rows: the payloads of its slices, uint8 [slices, bytes].
            order: int64 [slices], which row holds slice s; None: row s.
        """
        wire_format, shape = stored_weight(param).wire_format, tuple(sharded.shape(param))
        if self._scales[sharded.key(param)] is None:
            self._scales[sharded.key(param)] = wire_format.decode_scales(rows[:1]).view(1), None
        scale, _ = self._scales[sharded.key(param)]
        codes = wire_format.codes(rows, slice_numel, order).view(-1)[: sharded.numel(param)]
        return Float8Operand(codes.view(shape), scale, shape, "tensor")

    def operand(self, param: Parameter, weight: QuantizedWeight) -> Float8Operand:
        """The operand of the gathered codes of a weight in another format."""
        from zeropp_fp8.kernels.linear.quantized_to_fp8 import quantized_to_fp8
        from zeropp_fp8.kernels.linear.quantized_weight import largest_magnitude

        scales = self._scales[sharded.key(param)]
        if scales is None:
            scale = casts.scale_of_amax(largest_magnitude(weight).view(1), DTYPE)
            scales = self._scales[sharded.key(param)] = scale, torch.ones_like(scale) / scale
        scale, multiplier = scales
        codes = quantized_to_fp8(weight, multiplier)
        return Float8Operand(codes.view(DTYPE), scale, tuple(weight.shape), "tensor")


def _is_convertible(param: Parameter, in_high: bool) -> bool:
    """`in_high`: products in high precision take it too, which codes made of codes would round a second time."""
    from zeropp_fp8.kernels.linear.quantized_weight import can_multiply

    stored = stored_weight(param)
    if stored is None or not is_matrix(sharded.shape(param)):
        return False
    return isinstance(stored.wire_format, TensorScaledFormat) or (not in_high and can_multiply(stored.wire_format))
