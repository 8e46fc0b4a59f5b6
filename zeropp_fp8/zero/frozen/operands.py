"""Weights of the frozen store that are stored as FP8 operands.

Where a linear layer computes in FP8 with one scale per tensor, a weight stored in FP8 with one scale is the operand
already: its codes are copied into one piece (1 and 1 byte per element), and keep their scale.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.compute.operand import Float8Operand
from zeropp_fp8.formats import TensorScaledFormat
from zeropp_fp8.formats.shapes import one_matrix
from zeropp_fp8.zero.frozen.store import stored_weight
from zeropp_fp8.zero.session import Session

_ONE_SCALE = ("delayed", "current")


class FrozenOperands:
    """The weights of one engine that their GEMMs multiply as they are stored, and their scales.

    Empty unless linear layers compute in FP8 with one scale per tensor.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._scales: dict[int, Tensor | None] = {}  # by sharded.key, once they are known: fp32 [1] each

    def attach(self, params: Iterable[Parameter]) -> None:
        """Take over an engine's parameters that are stored so and are weights of layers that compute so."""
        conversion = self._session.conversion
        if conversion is None or conversion.scaling.compute.scaling not in _ONE_SCALE:
            return
        weights = conversion.multiplied_as_they_are()
        found = [p for p in params if isinstance(stored_weight(p).wire_format, TensorScaledFormat) and id(p) in weights]
        self._scales |= {sharded.key(param): None for param in found}

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

    def stored_operand(
        self, param: Parameter, rows: Tensor, slice_numel: int, order: Tensor | None = None
    ) -> Float8Operand:
        """The operand of one of them.

        Args:
            rows: the payloads of its slices, uint8 [slices, bytes].
            order: int64 [slices], which row holds slice s; None: row s.
        """
        wire_format, shape, key = stored_weight(param).wire_format, one_matrix(sharded.shape(param)), sharded.key(param)
        scale = self._scales[key]
        if scale is None:
            scale = self._scales[key] = wire_format.decode_scales(rows[:1]).view(1)
        codes = wire_format.codes(rows, slice_numel, order).view(-1)[: sharded.numel(param)]
        return Float8Operand(codes.view(shape), scale, shape, "tensor")
