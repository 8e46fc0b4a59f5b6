"""Several tensors in one payload row, codes and scales together, whatever their formats.

A row holds one slice of each tensor, one after the other, each with its own scales. Blocks never straddle two tensors,
so results do not depend on which tensors are sent together. On a GPU one launch of a kernel handles all tensors that
share a format. Elsewhere the torch code of formats/ does the same, tensor by tensor; it also does so for formats
without a kernel: scales per tensor, and all but decoding of NF4 and double-quantized scales.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from zeropp_fp8.comm.error_feedback import Residuals
from zeropp_fp8.formats import WireFormat
from zeropp_fp8.formats.scale_table import OF_GRADIENTS, OF_PARTIAL_SUMS, OF_RESULTS, SharedScales


class SliceOrder:
    """The order of slices in the rows of a payload."""

    def __init__(self, slices: Sequence[int], device: torch.device) -> None:
        natural = range(len(slices))
        self.is_natural = slices == natural or tuple(slices) == tuple(natural)
        self.slices = natural if self.is_natural else tuple(slices)
        if self.is_natural:  # there may be one for each of many tokens
            self.on_device = torch.arange(len(slices), dtype=torch.int32, device=device)
        else:
            self.on_device = torch.tensor(self.slices, dtype=torch.int32, device="cpu").to(device)


@functools.cache
def _kernels() -> ModuleType:
    """Return the kernels, if Triton exists. An import statement would take three calls in Python, twice per launch."""
    from zeropp_fp8 import kernels

    return kernels


@dataclass
class _Group:
    """Tensors of a payload that share formats and dtype."""

    members: list[int]
    wire_format: WireFormat
    segments: object = None  # kernels.SegmentTable, if kernels encode, decode and sum
    decoded_segments: object = None  # the same, if kernels decode
    index: Tensor | None = None  # int64, `members` on the device, if ranks share their scales


class PayloadLayout:
    """The place of each tensor in a payload row; it encodes, decodes and reduces such rows.

    Args:
        slice_numels: elements of a slice, for each tensor.
        formats: wire format of each tensor.
        dtypes: dtype of each tensor on this side of the wire.
        device: where the tensors live.
        partner_formats: formats of the layout that `reduce_to_payload` writes or reads, for the same tensors.
        use_kernels: Triton kernels instead of torch operations; None: on a GPU.
        left_out: tensors that have a place in the rows but are neither encoded nor decoded here.
    """

    def __init__(
        self,
        slice_numels: Sequence[int],
        formats: Sequence[WireFormat],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        partner_formats: Sequence[WireFormat] | None = None,
        use_kernels: bool | None = None,
        left_out: Sequence[int] = (),
    ) -> None:
        self.slice_numels = tuple(slice_numels)
        self.formats = tuple(formats)
        self.device = device
        self.sizes = [f.payload_bytes(n) for f, n in zip(formats, slice_numels)]
        self.offsets = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self.row_bytes = sum(self.sizes)
        use_kernels = device.type == "cuda" if use_kernels is None else use_kernels
        partners = partner_formats or formats
        by_key: dict[Hashable, list[int]] = defaultdict(list)
        for index, (mine, partner, dtype) in enumerate(zip(formats, partners, dtypes)):
            if self.slice_numels[index] == 0 or index in left_out:
                continue  # no data, or nothing to do
            by_key[(mine.key, partner.key, dtype)].append(index)
        self._groups = [self._make_group(members, partners, use_kernels) for members in by_key.values()]
        self._tables: dict[Hashable, object] = {}
        self._residual_tables: dict[Hashable, object] = {}
        self._use_kernels = use_kernels
        self._joined: dict[Hashable, PayloadLayout] = {}

    def joined(self, rows: int, tensors: Sequence[Tensor]) -> PayloadLayout:
        """Return the layout of `rows` rows as one row: it repeats the tensors, which have the dtypes of `tensors`."""
        dtypes = tuple(tensor.dtype for tensor in tensors)
        key = (rows, dtypes)
        if key not in self._joined:
            args = (self.slice_numels * rows, self.formats * rows, dtypes * rows, self.device)
            self._joined[key] = PayloadLayout(*args, use_kernels=self._use_kernels)
        return self._joined[key]

    def _make_group(self, members: list[int], partners: Sequence[WireFormat], use_kernels: bool) -> _Group:
        group = _Group(members, self.formats[members[0]])
        if group.wire_format.scales == "caller":
            group.index = torch.tensor(members, device=self.device)
        if use_kernels:
            mine, partner = group.wire_format, partners[members[0]]
            numels, offsets = [self.slice_numels[i] for i in members], [self.offsets[i] for i in members]
            if _kernels().supports(mine) and _kernels().supports(partner):
                like = partner if partner.scales == "payload" else None
                group.segments = _kernels().SegmentTable(mine, numels, offsets, self.device, like=like)
                group.decoded_segments = group.segments
            elif _kernels().decodes(mine):
                group.decoded_segments = _kernels().SegmentTable(mine, numels, offsets, self.device)
        return group

    def _table(
        self, index: int, role: str, tensors: Sequence[Tensor], segments, places: Hashable | None = None
    ) -> object:
        """Return the TensorTable of a group's tensors; make it again only when their places have changed."""
        key = _kernels().table_key(tensors) if places is None else places
        held = self._tables.get((index, role))
        if held is None or held[0] != key:
            held = self._tables[(index, role)] = (key, _kernels().TensorTable(tensors, segments, self.device))
        return held[1]

    # -- tensors -> rows ---------------------------------------------------------------------------------------------

    def encode(
        self,
        tensors: Sequence[Tensor],
        order: SliceOrder,
        payload: Tensor,
        shared: SharedScales | None = None,
        residuals: Residuals | None = None,
    ) -> None:
        """Encode slices of contiguous `tensors` into `payload`, uint8 [rows, row_bytes].

        `shared`: the scales of all tensors, for those whose format is a SharedScaleFormat. Without it these are left
        out, for a caller that writes such codes itself. `residuals`: they are added to the rows, and replaced by what
        rounding drops of the sums. Unquantized tensors have none.
        """
        for index, group in enumerate(self._groups):
            members = [tensors[i] for i in group.members]
            scales = None
            if group.wire_format.scales == "caller":
                if shared is None:
                    continue
                scales = shared.of(group.members, group.index)
            if residuals is not None and not group.wire_format.is_exact:
                self._encode_with_residuals(index, members, order, payload, residuals)
            elif group.segments is not None:
                table = self._table(index, "source", members, group.segments)
                _kernels().quantize(members[0], table, group.segments, order.on_device, payload, scales)
            else:
                self._encode_by_torch(group, members, order, payload, scales)
            if scales is not None:
                shared.recorded(scales, group.index)

    def _encode_by_torch(
        self, group: _Group, members: list[Tensor], order: SliceOrder, payload: Tensor, scales: SharedScales | None
    ) -> None:
        for place, (i, tensor) in enumerate(zip(group.members, members)):
            rows = slices_of(tensor, self.slice_numels[i], order)
            if scales is None:
                group.wire_format.encode_rows(rows, self._part(payload, i))
                continue
            scale = scales.encode[place : place + 1]
            group.wire_format.encode_scaled(rows, scale, self._part(payload, i), scales.counts[OF_GRADIENTS])
            magnitudes = rows.float().abs()
            finite = magnitudes.masked_fill_(magnitudes.isfinite().logical_not_(), 0.0)
            scales.amax[place] = torch.maximum(scales.amax[place], finite.amax())

    def _encode_with_residuals(
        self, index: int, members: list[Tensor], order: SliceOrder, payload: Tensor, residuals: Residuals
    ) -> None:
        group = self._groups[index]
        if group.segments is not None:
            kept_at = self._residual_table(index, residuals)
            if _kernels().can_feed_back(group.segments, kept_at):
                table = self._table(index, "source", members, group.segments)
                sources = members[0], table, group.segments, order.on_device, payload
                _kernels().quantize_with_residuals(*sources, kept_at, residuals.rows)
                return
        for i, tensor in zip(group.members, members):
            numel, part, kept = self.slice_numels[i], self._part(payload, i), residuals.of(i)
            wanted = slices_of(tensor, numel, order).float()
            wanted = wanted + residuals.wire_format.decode_rows(kept, numel, torch.float32)
            group.wire_format.encode_rows(wanted, part)
            dropped = wanted - group.wire_format.decode_rows(part, numel, torch.float32)
            residuals.wire_format.encode_rows(dropped.nan_to_num_(0.0, 0.0, 0.0), kept)

    def _residual_table(self, index: int, residuals: Residuals) -> object:
        """Return the table of a group's residuals in their rows."""
        key = (index, residuals.wire_format.key, *residuals.offsets)
        if key not in self._residual_tables:
            members = self._groups[index].members
            numels, offsets = [self.slice_numels[i] for i in members], [residuals.offsets[i] for i in members]
            self._residual_tables[key] = _kernels().SegmentTable(residuals.wire_format, numels, offsets, self.device)
        return self._residual_tables[key]

    # -- rows -> tensors ---------------------------------------------------------------------------------------------

    def decode(
        self, payload: Tensor, order: SliceOrder, tensors: Sequence[Tensor], places: Hashable | None = None
    ) -> None:
        """Decode `payload`, uint8 [rows, row_bytes], into the slices of contiguous `tensors` that its rows hold.

        `places`: equal for tensors that lie alike in their buffer, which begins at a multiple of 16; None: the tensors'
        addresses decide.

        Codes with a shared scale are left out (their entries of `tensors` are not read): a caller that gathers such
        codes needs them unchanged.
        """
        for index, group in enumerate(self._groups):
            if group.wire_format.scales == "caller":
                continue
            members = [tensors[i] for i in group.members]
            if group.decoded_segments is not None:
                table = self._table(index, "destination", members, group.decoded_segments, places)
                _kernels().dequantize(members[0], table, group.decoded_segments, order.on_device, payload)
                continue
            for i, tensor in zip(group.members, members):
                part, slice_numel, flat = self._part(payload, i), self.slice_numels[i], tensor.view(-1)
                if order.is_natural and flat.numel() == len(order.slices) * slice_numel:
                    group.wire_format.decode_rows(part, slice_numel, tensor.dtype, flat.view(-1, slice_numel))
                else:
                    _write_slices(group.wire_format.decode_rows(part, slice_numel, tensor.dtype), order, flat)

    def _part(self, payload: Tensor, i: int) -> Tensor:
        """Return the bytes of tensor i in payload rows [..., row_bytes]."""
        return payload[..., self.offsets[i] : self.offsets[i] + self.sizes[i]]

    # -- rows of several ranks -> their mean -------------------------------------------------------------------------

    def mean(self, received: Tensor, i: int) -> Tensor:
        """Return fp32 [rows, slice numel]: the mean over ranks of tensor i in uint8 [ranks, rows, row_bytes]."""
        return self.formats[i].mean_of_rows(list(self._part(received, i)), self.slice_numels[i])

    def reduce_to_payload(
        self, received: Tensor, then: PayloadLayout, payload: Tensor, shared: SharedScales | None = None
    ) -> None:
        """Encode the mean over ranks of `received`, uint8 [ranks, rows, row_bytes], into `payload` by layout `then`.

        With a shared scale `payload` gets the sum of the codes, because their mean would lose bits.
        """
        for group, next_group in zip(self._groups, then._groups):
            is_shared = group.wire_format.scales == "caller"
            mine, theirs = group.segments, next_group.segments
            if mine is not None and theirs is not None and _kernels().can_chain(mine, theirs):
                _kernels().reduce_to_payload(received, mine, theirs, payload, shared if is_shared else None)
                continue
            for i in group.members:
                part = then._part(payload, i)
                if is_shared:
                    total = group.wire_format.sum_of_rows(self._part(received, i), self.slice_numels[i])
                    one, counts = torch.ones_like(shared.encode[:1]), shared.counts[OF_PARTIAL_SUMS]
                    next_group.wire_format.encode_scaled(total, one, part, counts)
                    continue
                next_group.wire_format.encode_rows(self.mean(received, i), part)

    def reduce_to_tensors(
        self, received: Tensor, tensors: Sequence[Tensor], accumulate: bool = False, shared: SharedScales | None = None
    ) -> None:
        """Write the mean over ranks of `received`, uint8 [ranks, row_bytes], to `tensors`, or add it to them.

        A tensor may have fewer elements than its slice: padding is dropped. With a shared scale a uint8 tensor gets the
        FP8 code of the sum over ranks (`shared.decode` decodes it to the mean), and cannot be added to.
        """
        for index, group in enumerate(self._groups):
            members = [tensors[i] for i in group.members]
            scales = None
            if group.wire_format.scales == "caller":
                scales = shared.of(group.members, group.index)
                if accumulate and any(tensor.dtype == torch.uint8 for tensor in members):
                    raise ValueError("codes with a shared scale cannot be added to codes; accumulate in 16 or 32 bits")
            if group.segments is not None:
                table = self._table(index, "result", members, group.segments)
                _kernels().reduce_to_tensors(received, group.segments, members[0], table, accumulate, scales)
                continue
            for place, (i, tensor) in enumerate(zip(group.members, members)):
                rows = received.unsqueeze(1)
                if scales is None:
                    mean = self.mean(rows, i)
                else:
                    mean = group.wire_format.sum_of_rows(self._part(rows, i), self.slice_numels[i])
                mean = mean.view(-1)[: tensor.numel()].view(tensor.shape)
                if tensor.dtype == torch.uint8:
                    one, counts = torch.ones_like(scales.decode[:1]), scales.counts[OF_RESULTS]
                    group.wire_format.encode_scaled(mean.view(1, -1), one, tensor.view(1, -1), counts)
                    continue
                if scales is not None:
                    mean = mean * scales.decode[place]
                if accumulate:
                    tensor += mean.to(tensor.dtype)
                else:
                    tensor.copy_(mean)


def slices_of(tensor: Tensor, slice_numel: int, order: SliceOrder) -> Tensor:
    """Return the slices of a tensor in the order of the rows, [rows, slice_numel], with zeros beyond its end."""
    count = max(order.slices) + 1
    flat = tensor.reshape(-1)[: count * slice_numel]
    if flat.numel() != count * slice_numel:
        flat = F.pad(flat, (0, count * slice_numel - flat.numel()))
    rows = flat.view(count, slice_numel)
    return rows if order.is_natural else rows[list(order.slices)]


def _write_slices(rows: Tensor, order: SliceOrder, flat: Tensor) -> None:
    """Invert slices_of; drop values beyond the tensor's end."""
    if order.is_natural and rows.numel() >= flat.numel():
        flat.copy_(rows.view(-1)[: flat.numel()])
        return
    slice_numel = rows.shape[1]
    for row, index in zip(rows, order.slices):
        piece = flat[index * slice_numel : (index + 1) * slice_numel]
        piece.copy_(row[: piece.numel()])
