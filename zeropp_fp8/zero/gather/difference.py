"""Exact differences: nodes send each other what has changed in payloads, and each has all of their bits.

Every rank that keeps a secondary shard has the payloads from before the step. After it each rank sends how its own
differs from its copy (formats/exact.py): numbers of 16 bits, FP8 or INT8 codes. The hops up to the secondary shard
bring all differences, and every rank adds them. A payload of differences has the bytes of other numbers first, then a
header for each chunk of the coded ones, then bodies. Their sizes depend on the step, so all ranks tell each other
before the first gather after it, in one small message for all units that are written. The host waits for it, and so for
the update, which the gather would wait for anyway.

The whole payloads replace differences if no copy exists yet, and if anything but a step wrote the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp_fp8.formats import SharedScaleFormat, UnquantizedFormat, WireFormat, exact
from zeropp_fp8.formats.base import align_up
from zeropp_fp8.zero.gather.route import Route

_WORD_BYTES = exact.WORD // 8


class Measured(NamedTuple):
    """How a rank's payload differs: int32 [1, chunks] headers, and where bodies end, in words; int64 [1] row bytes."""

    headers: Tensor
    ends: Tensor
    row_bytes: Tensor


CODES = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}


def _dtype_of(wire_format: WireFormat) -> torch.dtype | None:
    """The dtype of the numbers in a format's payload, if their differences are coded; else it is sent as it is."""
    if isinstance(wire_format, UnquantizedFormat):
        return wire_format.dtype if wire_format.dtype in exact.MANTISSA else None
    return CODES.get(wire_format.name)  # scales are bytes before codes: any bits are coded without loss


class Rows:
    """The places of tensors in payloads and in their differences.

    Args:
        formats, numels: of each tensor of a payload.
        use_kernels: Triton kernels instead of torch operations; None: on a GPU.
    """

    def __init__(
        self,
        formats: Sequence[WireFormat],
        numels: Sequence[int],
        device: torch.device,
        use_kernels: bool | None = None,
    ) -> None:
        self._device = device
        sizes = [each.payload_bytes(numel) for each, numel in zip(formats, numels)]
        places = [sum(sizes[:i]) for i in range(len(sizes))]
        dtypes = [_dtype_of(each) if numel else None for each, numel in zip(formats, numels)]
        # One kernel codes numbers of one dtype: of those that most bytes are of.
        found = {dtype: sum(size for size, of in zip(sizes, dtypes) if of is dtype) for dtype in dtypes if dtype}
        self._dtype = max(found, key=found.get, default=None)
        self._coded = [i for i, dtype in enumerate(dtypes) if dtype is self._dtype and dtype]
        codes = self._dtype in CODES.values()
        coded = [sizes[i] if codes else numels[i] for i in self._coded]
        firsts = [places[i] // self._dtype.itemsize for i in self._coded]
        self._parts = [slice(first, first + numel) for first, numel in zip(firsts, coded)]  # of numbers in a payload
        self._chunks = [-(-numel // exact.CHUNK) for numel in coded]
        self._whole: list[tuple[slice, slice]] = []  # bytes in a payload, and in its differences
        self._headers_at = 0
        for i in sorted(set(range(len(sizes))) - set(self._coded)):
            begin, self._headers_at = self._headers_at, self._headers_at + sizes[i]
            self._whole.append((slice(places[i], places[i] + sizes[i]), slice(begin, self._headers_at)))
        self._body_at = self._headers_at + align_up(_WORD_BYTES * sum(self._chunks))
        self._segments = None
        if self._coded and (device.type == "cuda" if use_kernels is None else use_kernels):
            from zeropp_fp8 import kernels

            self._kernels, places = kernels, [places[i] for i in self._coded]
            like = SharedScaleFormat("fp8_e4m3") if codes else formats[self._coded[0]]  # chunks know no blocks
            self._segments = kernels.SegmentTable(like, coded, places, device)

    def measure(self, row: Tensor, held: Tensor) -> Measured:
        """How a payload differs from its copy, both uint8 [1, bytes]."""
        if not self._coded:
            headers = torch.zeros(1, 1, dtype=torch.int32, device=self._device)
        elif self._segments is not None:
            headers = self._kernels.make_headers(row, held, self._segments, self._dtype).unsqueeze(0)
        else:
            new, old = row.view(self._dtype), held.view(self._dtype)
            headers = exact.make_headers(new, old, self._parts)
        ends = exact.ends_of(headers)
        words = ends[0, -1:].long() + bool(self._coded)  # kernels read two at once, also of the last
        return Measured(headers, ends, align_up(self._body_at + _WORD_BYTES * words))

    def encode(self, row: Tensor, held: Tensor, measured: Measured, out: Tensor) -> None:
        """Write differences to `out`, uint8 [1, row bytes]; arguments are those of `measure`, and what it gave."""
        for in_payload, in_difference in self._whole:
            out[:, in_difference] = row[:, in_payload]
        if not self._coded:
            return
        headers, ends, _ = measured
        out[:, self._headers_at :][:, : _WORD_BYTES * headers.shape[1]] = headers.view(torch.uint8)
        body = out[:, self._body_at :].zero_()
        if self._segments is not None:
            into = body[0].view(torch.int32)
            self._kernels.encode_exact(row, held, self._segments, self._dtype, headers, ends, into)
            return
        bodies = exact.encode(row.view(self._dtype), held.view(self._dtype), headers, ends, self._parts)
        body.view(torch.int32)[:, : bodies.shape[1]] = bodies

    def add(self, brought: Tensor, held: Tensor, own: int | None = None) -> None:
        """Make uint8 `held` [rows, bytes] the senders' payloads, by `brought` [rows, row bytes]; row `own` is so."""
        for in_payload, in_difference in self._whole:
            held[:, in_payload] = brought[:, in_difference]
        if not self._coded:
            return
        headers = brought[:, self._headers_at :][:, : _WORD_BYTES * sum(self._chunks)].contiguous().view(torch.int32)
        ends = exact.ends_of(headers)
        if self._segments is not None:
            places = self._headers_at, self._body_at
            self._kernels.add_exact(brought, *places, ends, held, self._segments, self._dtype, own)
            return
        others = [row for row in range(len(held)) if row != own]
        numbers, bodies = held.view(self._dtype)[others], brought[others, self._body_at :].view(torch.int32)
        if others:
            exact.add(headers[others], ends[others], bodies, numbers, self._parts)
            held.view(self._dtype)[others] = numbers


class HoldsRows(Protocol):
    """The interface of a unit for its difference. Sizes are bytes of the payload of each rank, in the order of ranks.

    Attributes:
        may_differ: whether the unit's payloads can be sent as differences.
    """

    route: Route
    persistent: bool
    keeps_secondary: bool
    secondary: Tensor | None
    secondary_is_current: bool
    may_differ: bool

    def difference_rows(self) -> tuple[Rows, list[Rows]]:
        """The places in this rank's payload, and in those that the first hops bring, like `held_rows`."""

    def own_payload(self) -> Tensor:
        """uint8 [1, bytes]: this rank's payload, made anew without padding; no bytes if it owns nothing of the unit."""

    def held_rows(self, held: Tensor) -> list[Tensor]:
        """uint8 [rows, bytes] each: the payloads in `held`."""

    def own_held_row(self, held: Tensor) -> Tensor:
        """uint8 [1, bytes]: this rank's payload in `held`."""

    def agreed(self, sizes: list[int]) -> list[int]:
        """How long payloads of differences shall be, of how long each rank's must be."""

    def rows_of_differences(self, brought: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """uint8 [rows, bytes] each: the payloads in `brought`, the result of the first hops, like `held_rows`."""

    def own_row_of_differences(self, brought: Tensor, sizes: Sequence[int]) -> Tensor:
        """uint8 [1, bytes]: this rank's payload of differences in `brought`."""

    def bring_differences(self, brought: Tensor, sizes: Sequence[int]) -> list[dist.Work]:
        """Start the first hops with the row of `own_row_of_differences`; their result is `brought`."""


class Difference:
    """Sends the differences of one unit as it is laid out, and adds them, on ranks that hold its previous weights.

    Attributes:
        begun: the copy is what differences can be added to.
        steps: differences since the last full gather.
        sizes: bytes of the payload of each rank, in the order of ranks, once they have agreed; else empty.
    """

    def __init__(self, unit: HoldsRows) -> None:
        self._unit = unit
        self.begun, self.steps = False, 0
        self.sizes: list[int] = []
        self._own: Rows | None = None
        self._brought: list[Rows] = []
        self._measured: Measured | None = None
        self._row: Tensor | None = None  # this rank's payload, on a CPU from when it is measured until it is sent

    @property
    def is_on(self) -> bool:
        """Whether nodes exchange the unit's differences. Small persistent parameters have no secondary shard."""
        unit = self._unit
        return unit.route.session.formats.differs and unit.may_differ and unit.keeps_secondary and not unit.persistent

    @property
    def is_due(self) -> bool:
        """Whether the next first hops bring differences to the copy; else they bring the whole (`first_hops`).

        The answer is the same on all ranks.
        """
        return self.begun and self.is_on

    @property
    def is_unknown(self) -> bool:
        """Whether the ranks have to agree on the sizes of payloads before the next gather. The same on all of them."""
        return self.is_due and not self.sizes and not self._unit.secondary_is_current

    def measure(self) -> Tensor:
        """int64 [1]: bytes that this rank's payload of differences needs."""
        unit = self._unit
        row = unit.own_payload()
        self._measured = self._own.measure(row, unit.own_held_row(unit.secondary))
        # A GPU makes it again as fast as it reads it, and kept until it is sent it would take as much as its weights.
        self._row = row if row.device.type == "cpu" else None
        return self._measured.row_bytes

    def agree(self, sizes: list[int]) -> None:
        """Take what `measure` has found on each rank, in the order of ranks."""
        self.sizes = self._unit.agreed(sizes)

    @property
    def brought_bytes(self) -> int:
        """Bytes of differences that the first hops bring; 0 if none of those ranks owns anything."""
        return sum(self.sizes[rank] for rank in self._unit.route.held_ranks)

    def begin(self) -> None:
        """The whole unit is about to be sent; it is the copy from then on."""
        self.forget()
        if self.is_on:
            if self._own is None:
                self._own, self._brought = self._unit.difference_rows()
            self.begun, self.steps = True, 0

    def send(self, held: Tensor, brought: Tensor) -> list[dist.Work]:
        """Encode this rank's differences from `held`, and start the first hops; their result is `brought`.

        This rank's payload in `held` is the new one then.
        """
        unit, row = self._unit, self._unit.own_payload() if self._row is None else self._row
        if row.numel():  # a rank may own no whole tensor
            own = unit.own_held_row(held)
            self._own.encode(row, own, self._measured, unit.own_row_of_differences(brought, self.sizes))
            own.copy_(row)
        self._measured = self._row = None
        return unit.bring_differences(brought, self.sizes)

    def add(self, brought: Tensor, held: Tensor) -> None:
        """Add the differences in `brought`, the result of the first hops, to `held`. All ranks do the same."""
        self.steps += 1
        unit = self._unit
        own = unit.route.held_ranks.index(unit.route.session.topology.rank)
        pairs = zip(unit.rows_of_differences(brought, self.sizes), unit.held_rows(held))
        for rows, (differences, payloads) in zip(self._brought, pairs):
            rows.add(differences, payloads, own if 0 <= own < len(payloads) else None)
            own -= len(payloads)

    def changed(self, by_step: bool) -> None:
        """The weights were written; `by_step`: by a step of the optimizer."""
        self.sizes, self._measured, self._row = [], None, None
        if not by_step:
            self.begun = False

    def forget(self) -> None:
        """Stop using the copy as the base of differences, until the next full gather."""
        self.changed(by_step=False)
