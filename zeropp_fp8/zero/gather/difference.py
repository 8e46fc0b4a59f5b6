"""Exact differences: nodes send each other what has changed in weights of 16 bits, and each has all of their bits.

Every rank that keeps a secondary shard holds the weights from before the step. After it each rank sends how its own
slice differs from what is held of it (formats/exact.py); the hops up to the secondary shard bring all differences, and
every rank adds them. In a payload the numbers that are not of 16 bits come first, as they are, then a header for each
chunk of the others, then bodies. How long these are depends on the step, so all ranks tell each other before the first
gather after it, in one small message for all units. The host waits for it, and so for the update, which the gather
would wait for anyway; then it knows every payload's size. So each is as large as it must be, nothing is ever too large,
and no weight is late.

The whole weights replace differences if no copy exists yet, and if anything but a step wrote the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from zeropp_fp8.formats import UnquantizedFormat, exact
from zeropp_fp8.formats.base import align_up
from zeropp_fp8.zero.gather.route import Route

_WORD_BYTES = exact.WORD // 8


class Measured(NamedTuple):
    """How a rank's weights differ: int32 [1, chunks] headers, and where bodies end, in words; int64 [1] row bytes."""

    headers: Tensor
    ends: Tensor
    row_bytes: Tensor


class Rows:
    """The places of tensors in rows of differences, and in rows of what is held of them.

    Args:
        numels, dtypes: of each tensor.
        use_kernels: Triton kernels instead of torch operations; None: on a GPU.
    """

    def __init__(
        self,
        numels: Sequence[int],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        use_kernels: bool | None = None,
    ) -> None:
        self._numels, self._dtypes, self._device = numels, dtypes, device
        self._sizes = [UnquantizedFormat(dtype).payload_bytes(numel) for dtype, numel in zip(dtypes, numels)]
        self._held_at = [sum(self._sizes[:i]) for i in range(len(numels))]
        self._dtype = next((dtype for dtype in dtypes if dtype in exact.MANTISSA), None)
        self._coded = [i for i, dtype in enumerate(dtypes) if dtype is self._dtype and numels[i]]
        self._whole = [i for i in range(len(numels)) if i not in self._coded]
        firsts = [self._held_at[i] // self._dtype.itemsize for i in self._coded]
        self._places = [(first, first + numels[i]) for first, i in zip(firsts, self._coded)]  # in what is held
        self._chunks = [-(-numels[i] // exact.CHUNK) for i in self._coded]
        self._headers_at = sum(self._sizes[i] for i in self._whole)
        self._body_at = self._headers_at + align_up(_WORD_BYTES * sum(self._chunks))
        self._table: tuple = (None, None)
        self._segments = None
        if self._coded and (device.type == "cuda" if use_kernels is None else use_kernels):
            from zeropp_fp8 import kernels

            self._kernels, places = kernels, [self._held_at[i] for i in self._coded]
            coded = [numels[i] for i in self._coded]
            self._segments = kernels.SegmentTable(UnquantizedFormat(self._dtype), coded, places, device)

    def measure(self, tensors: Sequence[Tensor], held: Tensor) -> Measured:
        """How `tensors`, flat, perhaps without zeros at their end, differ from `held`, uint8 [1, bytes]."""
        if not self._coded:
            headers = torch.zeros(1, 1, dtype=torch.int32, device=self._device)
        elif self._segments is not None:
            sources = self._sources(tensors)
            headers = self._kernels.make_headers(*sources, self._segments, held).unsqueeze(0)
        else:
            headers = torch.cat([exact.make_headers(*pair) for pair in self._pairs(tensors, held)], dim=1)
        ends = exact.ends_of(headers)
        words = ends[0, -1:].long() + bool(self._coded)  # kernels read two at once, also of the last
        return Measured(headers, ends, align_up(self._body_at + _WORD_BYTES * words))

    def encode(self, tensors: Sequence[Tensor], held: Tensor, measured: Measured, out: Tensor) -> None:
        """Write a row to `out`, uint8 [1, row bytes]; arguments are those of `measure`, and what it gave."""
        at = 0
        for i in self._whole:
            UnquantizedFormat(self._dtypes[i]).encode_rows(tensors[i].view(1, -1), out[:, at : at + self._sizes[i]])
            at += self._sizes[i]
        if not self._coded:
            return
        headers, ends, _ = measured
        out[:, at : at + _WORD_BYTES * headers.shape[1]] = headers.view(torch.uint8)
        body = out[:, self._body_at :].zero_()
        if self._segments is not None:
            sources = self._sources(tensors)
            self._kernels.encode_exact(*sources, self._segments, held, headers, ends, body[0].view(torch.int32))
            return
        bits, of_chunks = exact.unpacked(body), (headers.split(self._chunks, 1), ends.split(self._chunks, 1))
        for (numbers, of_held), *of_tensor in zip(self._pairs(tensors, held), *of_chunks):
            exact.encode(numbers, of_held, *of_tensor, bits)
        body.copy_(exact.packed(bits))

    def add(self, brought: Tensor, held: Tensor) -> None:
        """Make uint8 `held` [rows, bytes] what the senders' tensors were, by `brought` [rows, row bytes]."""
        at = 0
        for i in self._whole:
            held[:, self._held_at[i] : self._held_at[i] + self._sizes[i]] = brought[:, at : at + self._sizes[i]]
            at += self._sizes[i]
        if not self._coded:
            return
        headers = brought[:, at : at + _WORD_BYTES * sum(self._chunks)].contiguous().view(torch.int32)
        ends = exact.ends_of(headers)
        if self._segments is not None:
            self._kernels.add_exact(brought, at, self._body_at, ends, held, self._segments, self._dtype)
            return
        bits, rows = exact.unpacked(brought[:, self._body_at :]), held.view(self._dtype)
        of_chunks = (headers.split(self._chunks, 1), ends.split(self._chunks, 1))
        for (first, end), *of_tensor in zip(self._places, *of_chunks):
            exact.add(*of_tensor, bits, rows[:, first:end])

    def _sources(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], object]:
        """(the coded tensors, their TensorTable, which is made again only when their places have changed)."""
        coded = [tensors[i].to(self._dtype) for i in self._coded]
        key = self._kernels.table_key(coded)
        if self._table[0] != key:
            self._table = key, self._kernels.TensorTable(coded, self._segments, self._device)
        return coded, self._table[1]

    def _pairs(self, tensors: Sequence[Tensor], held: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(numbers [1, numel], what is held of them) of each coded tensor."""
        rows, pairs = held.view(self._dtype), []
        for i, (first, end) in zip(self._coded, self._places):
            numbers = tensors[i].to(self._dtype)
            if numbers.numel() < end - first:
                numbers = F.pad(numbers, (0, end - first - numbers.numel()))
            pairs.append((numbers.view(1, -1), rows[:, first:end]))
        return pairs


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

    def shards(self) -> list[Tensor]:
        """This rank's part of each tensor of a payload, flat."""

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
        self._measured = self._own.measure(unit.shards(), unit.own_held_row(unit.secondary))
        return self._measured.row_bytes

    def agree(self, sizes: list[int]) -> None:
        """Take what `measure` has found on each rank, in the order of ranks."""
        self.sizes = self._unit.agreed(sizes)

    @property
    def brought_bytes(self) -> int:
        """Bytes of differences that the first hops bring; 0 if none of those ranks owns anything."""
        return sum(self.sizes[rank] for rank in self._unit.route.held_ranks)

    def begin(self) -> None:
        """The whole unit is about to be sent; it is held as a copy from then on."""
        self.forget()
        if self.is_on:
            if self._own is None:
                self._own, self._brought = self._unit.difference_rows()
            self.begun, self.steps = True, 0

    def send(self, held: Tensor, brought: Tensor) -> list[dist.Work]:
        """Encode this rank's differences from `held`, and start the first hops; their result is `brought`."""
        unit, shards = self._unit, self._unit.shards()
        if shards:  # a rank may own no whole tensor
            out = unit.own_row_of_differences(brought, self.sizes)
            self._own.encode(shards, unit.own_held_row(held), self._measured, out)
        self._measured = None
        return unit.bring_differences(brought, self.sizes)

    def add(self, brought: Tensor, held: Tensor) -> None:
        """Add the differences in `brought`, the result of the first hops, to `held`. All ranks do the same."""
        self.steps += 1
        unit = self._unit
        pairs = zip(unit.rows_of_differences(brought, self.sizes), unit.held_rows(held))
        for rows, (differences, numbers) in zip(self._brought, pairs):
            rows.add(differences, numbers)

    def changed(self, by_step: bool) -> None:
        """The weights were written; `by_step`: by a step of the optimizer."""
        self.sizes, self._measured = [], None
        if not by_step:
            self.begun = False

    def forget(self) -> None:
        """Stop using the copy as the base of differences, until the next full gather."""
        self.changed(by_step=False)
