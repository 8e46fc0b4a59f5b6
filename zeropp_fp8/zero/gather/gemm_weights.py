"""One code for wire and GEMM: FP8 weights are sent as the codes that their linear layer multiplies.

Shards are encoded with scales of the full weight, so ZeRO-3's flat slices may cut rows and tiles anywhere, and the
gathered bytes are the GEMM's operand. No scale is sent: after a step every rank finds the amax of its shards,
one all-reduce gives those of all weights, and every rank computes the same scales. Which products use the bytes:

    delayed, current   one scale per tensor   y = x W^T as they are; grad_input = g W after a transposition of the bytes
    block              128 x 128 tiles        the same
    per_channel        one scale per row      y = x W^T only; backward decodes and quantizes along the other axis

The bytes are the operand itself if one hop brings them in rank order (one node, one rank per node, or a secondary copy
on each rank's own device). After two hops one copy of 1 byte per element sorts the slices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm.issue import all_reduce
from zeropp_fp8.compute import casts
from zeropp_fp8.compute.operand import BLOCK, Float8Operand, Granularity
from zeropp_fp8.compute.products import LinearPrecision
from zeropp_fp8.compute.scaling import SCALE_STRIDE
from zeropp_fp8.formats.shapes import one_matrix
from zeropp_fp8.zero.gather.waiting import named
from zeropp_fp8.zero.session import Session

_GRANULARITY: dict[str, Granularity] = {"delayed": "tensor", "current": "tensor", "per_channel": "row", "block": "tile"}
WIRE_FORMAT = "fp8_e4m3"
DTYPE = torch.float8_e4m3fn


@dataclass
class _Weight:
    """One weight, and the place of its scales among the scales of all weights."""

    param: Parameter
    scales: slice
    scale_shape: tuple[int, ...]


class GemmWeights:
    """The weights of one engine that are sent as GEMM operands, and their scales.

    It is empty if wire and GEMM do not agree: other formats, rotated weights, one rank.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._weights: dict[int, _Weight] = {}
        # Both are made once per step, and not in each gather:
        self._scales: dict[int, Tensor] = {}  # by sharded.key of the weight: fp32, views of one table
        self._multipliers: Tensor | None = None  # fp32: 1 (for parameters that are no operand), then 1 / that table
        self.stale = True
        self.granularity: Granularity = "tensor"

    def attach(self, params: Iterable[Parameter]) -> None:
        """Attach the ZeRO-3 parameters among `params` that are weights of converted layers, if formats agree."""
        conversion, wire = self.session.conversion, self.session.formats.weights
        if conversion is None or wire is None:  # an engine that has fallen back has no wire format
            return
        scaling = conversion.scaling.compute.scaling
        exact_codes = wire.name == WIRE_FORMAT and not wire.hadamard
        if not exact_codes or scaling not in _GRANULARITY:
            return
        self.granularity = _GRANULARITY[scaling]
        precisions = conversion.multiplied_as_they_are()
        for param in params:
            if id(param) in precisions and param not in self:  # known parameters come back when a later engine ends
                self._add(param, precisions[id(param)])

    def _add(self, param: Parameter, precision: LinearPrecision) -> None:
        if precision.weight_is_transposed and self.granularity == "row":
            return  # [in, out]: y = x W^T needs scales per column
        rows, columns = one_matrix(sharded.shape(param))
        shape = {"tensor": (1,), "row": (rows, 1), "tile": (-(-rows // BLOCK), -(-columns // BLOCK))}[self.granularity]
        start = max((w.scales.stop for w in self._weights.values()), default=0)
        start += -start % SCALE_STRIDE
        count = math.prod(shape)
        self._weights[sharded.key(param)] = _Weight(param, slice(start, start + count), shape)

    def __contains__(self, param: Parameter) -> bool:
        return sharded.key(param) in self._weights

    def __len__(self) -> int:
        return len(self._weights)

    def clear(self) -> None:
        """Send weights as operands no more."""
        self._weights.clear()

    def changed(self, params: Iterable[Parameter] | None) -> None:
        """Weights (None: all) were written: find their scales again before the next gather."""
        self.stale = self.stale or params is None or any(p in self for p in params)

    # -- scales ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def refresh_scales(self, names: Sequence[str]) -> None:
        """Find the scales of all weights, if any was written. Collective: one all-reduce with one number per scale.

        `names`: the parameters that the caller waits for.
        """
        if not self.stale:
            return
        device = self.session.device
        count = max(w.scales.stop for w in self._weights.values())
        amax = torch.zeros(count, dtype=torch.float32, device=device)
        if self.granularity == "tensor":
            params = [weight.param for weight in self._weights.values()]
            if any(sharded.shard(param).device != device for param in params):
                # Offloaded shards go one after the other, or all of them would be on the device at once.
                norms = [torch._foreach_norm([self._own_or_zero(param)], torch.inf)[0] for param in params]
            else:
                norms = torch._foreach_norm([self._own_or_zero(param) for param in params], torch.inf)
            amax[::SCALE_STRIDE] = torch.stack(norms).float()
        else:
            for weight in self._weights.values():
                self._add_amax(weight, amax[weight.scales].view(weight.scale_shape))
        # A backend's maximum may drop NaN. With an infinite scale every code is 0 and decodes to 0 * Inf = NaN.
        amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        try:
            all_reduce(amax, dist.ReduceOp.MAX, self.session.topology.group, self.session.ledger)
        except RuntimeError as error:
            raise named(error, names) from error
        self._take(casts.scale_of_amax(amax, DTYPE))
        self.stale = False

    def _take(self, table: Tensor) -> None:
        """Set the scales: fp32, of all weights one after the other."""
        if self.granularity == "tensor":
            # Contiguous ones: graphs would copy each of a stride.
            views = [place[:1] for place in table.split(SCALE_STRIDE)]
        else:
            views = [table[weight.scales].view(weight.scale_shape) for weight in self._weights.values()]
        self._scales = dict(zip(self._weights, views))
        self._multipliers = torch.cat((table.new_ones(1), torch.ones_like(table) / table))

    def _own(self, param: Parameter) -> Tensor:
        """This rank's elements of a weight, flat, without the padding of the last slices (padding is never written)."""
        own = self.session.placement.own_numel(param)
        return sharded.unpadded(param, own).to(self.session.device, non_blocking=True)

    def _own_or_zero(self, param: Parameter) -> Tensor:
        own = self._own(param)
        return own if own.numel() else own.new_zeros(1)

    def _own_ranges(self, param: Parameter) -> Iterator[tuple[int, Tensor]]:
        """(first element, values) of each range of a weight that this rank has."""
        own, taken = self._own(param), 0
        for start, numel in self.session.placement.ranges(param):
            yield start, own[taken : taken + numel]
            taken += numel

    @staticmethod
    def _as_rows(param: Parameter, start: int, values: Tensor) -> tuple[Tensor, int, int]:
        """Returns (the range as rows of the weight, index of the first row, elements of that row before the range).

        Elements outside the range are zero in the first and last row.
        """
        columns = sharded.shape(param)[-1]
        lead = start % columns
        rows = F.pad(values, (lead, -(lead + values.numel()) % columns)).view(-1, columns)
        return rows, start // columns, lead

    def _add_amax(self, weight: _Weight, amax: Tensor) -> None:
        for start, values in self._own_ranges(weight.param):
            rows, first, _ = self._as_rows(weight.param, start, values)
            if self.granularity == "row":
                mine = amax[first : first + rows.shape[0], 0]
                torch.maximum(mine, rows.abs().amax(dim=1).float(), out=mine)
                continue
            by_row = rows.abs().unflatten(1, (-1, BLOCK)).amax(dim=2).float()
            lead = first % BLOCK
            by_row = F.pad(by_row, (0, 0, lead, -(lead + rows.shape[0]) % BLOCK))
            by_tile = by_row.unflatten(0, (-1, BLOCK)).amax(dim=1)
            mine = amax[first // BLOCK : first // BLOCK + by_tile.shape[0]]
            torch.maximum(mine, by_tile, out=mine)

    # -- codes -----------------------------------------------------------------------------------------------------

    def slice_bytes(self, param: Parameter) -> int:
        """Bytes of a rank's slice on the wire: one per element, so that slices of all ranks make one matrix."""
        return sharded.shard_numel(param)

    @torch.no_grad()
    def encode(self, param: Parameter, out: Tensor) -> None:
        """Write the codes of this rank's slice to `out`, uint8 [slice_bytes]; padding becomes zeros."""
        done = 0
        for start, values in self._own_ranges(param):
            self.encode_range(param, start, values, out[done : done + values.numel()])
            done += values.numel()
        out[done:] = 0

    def encode_range(self, param: Parameter, start: int, values: Tensor, out: Tensor) -> None:
        """Write the codes of flat `values`, the elements of a weight from `start` on, to uint8 `out` [values]."""
        scale = self._scales[sharded.key(param)]
        if self.granularity == "tensor":
            codes = casts.codes_of(values.view(1, -1), scale, DTYPE).view(-1)
        else:
            rows, first, lead = self._as_rows(param, start, values)
            own_scales = scale[first : first + rows.shape[0]]
            if self.granularity == "tile":
                tile_rows = torch.arange(first, first + rows.shape[0], device=rows.device) // BLOCK
                own_scales = scale[tile_rows].repeat_interleave(BLOCK, dim=1)
            codes = casts.codes_of(rows, own_scales, DTYPE).view(-1)[lead : lead + values.numel()]
        out.copy_(codes.view(torch.uint8))

    def places(self, params: Iterable[Parameter]) -> Tensor:
        """int64 [params]: the argument of `multipliers` for them; 0 for parameters that are no operand."""
        starts = [self._weights[sharded.key(p)].scales.start + 1 if p in self else 0 for p in params]
        return torch.tensor(starts, dtype=torch.int64, device=self.session.device)

    def multipliers(self, places: Tensor) -> Tensor:
        """fp32 [places]: code = FP8(weight * this), with one scale per tensor; 1 for parameters that are no operand."""
        return self._multipliers.index_select(0, places)

    def operand(self, param: Parameter, codes: Tensor, start: int = 0) -> Float8Operand:
        """The operand of a weight. Its codes are in flat FP8 `codes` from `start` on, in rank order, and stay there."""
        shape = one_matrix(sharded.shape(param))
        # One operation instead of three for each of some 340 operands per step of 24 blocks.
        matrix = codes.as_strided(shape, (shape[1], 1), codes.storage_offset() + start)
        return Float8Operand(matrix, self._scales[sharded.key(param)], shape, self.granularity)
