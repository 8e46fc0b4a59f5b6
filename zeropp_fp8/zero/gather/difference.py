"""Quantized weight differences: between nodes travels how weights have changed, not what they are.

Every rank that keeps a secondary shard holds what all weights were (W'). After a step each encodes W - W' of its own
slice in 4, 3 or 2 bits (SDP4Bit, arXiv 2410.15526, section 3.1), the hops up to the secondary shard bring all of them,
and every rank adds them to what it holds: the same operations on the same bytes, so that W' stays the same, bit for
bit, wherever it is held. What quantization dropped is in the next difference: errors do not add up.

W' rests in the format that weights travel in without differences (`weights.format`), which the hop behind the
secondary shard sends on as ever. Differences are of the 16-bit weights and not of their fp32 masters: these are what a
checkpoint, an exact gather and stock's forward have, and where W' has 16 bits too their rounding would come back.

Vectors travel as they are. A full gather begins (and takes the place of) differences where nothing is held yet, where
weights were written by anything but a step, every `refresh_every` steps, and where a difference did not fit: one whose
largest number was more than a quarter of the largest weight of its tensor. That is seen by all ranks that hold it in
what they decoded, and read by the host one step later, when the device has long been done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder
from zeropp_fp8.formats import UnquantizedFormat, WireFormat

# A difference this large, in 4 bits at 18.6 dB, leaves weights 30.6 dB, as FP8 does; INT8 has 43.
_LARGEST_SHARE = 0.25
# Elements of held weights that are brought up to date at a time; in fp32 there are two buffers of as many.
_AT_ONCE = 1 << 25


@dataclass(frozen=True)
class Contents:
    """What lies in a row of payloads.

    Attributes:
        numels: elements of each tensor.
        held_formats: what they rest in in the secondary shard.
        formats: what their differences travel in; unquantized: the tensor travels as it is.
    """

    numels: Sequence[int]
    held_formats: Sequence[WireFormat]
    formats: Sequence[WireFormat]

    @property
    def row_bytes(self) -> int:
        """Of a payload with differences."""
        return sum(one.payload_bytes(numel) for one, numel in zip(self.formats, self.numels))

    @property
    def added(self) -> list[int]:
        """Indices of the tensors that are added to what is held."""
        some = enumerate(zip(self.formats, self.numels))
        return [index for index, (one, numel) in some if numel and not isinstance(one, UnquantizedFormat)]


class _Rows:
    """So many rows of payloads as fp32 numbers: buffers for these, and how they are decoded and encoded.

    Launch tables belong to tensors of one size and to one stream, so each number of rows has its own on each lane.
    """

    def __init__(self, rows: int, contents: Contents, device: torch.device) -> None:
        numels, wide = contents.numels, [torch.float32] * len(contents.numels)
        self.added = contents.added
        whole = [index for index in range(len(numels)) if index not in set(self.added)]
        self.order = SliceOrder(range(rows), device)
        self.differences = PayloadLayout(numels, contents.formats, wide, device)
        self.held = PayloadLayout(numels, contents.held_formats, wide, device)
        self.held_matrices = PayloadLayout(numels, contents.held_formats, wide, device, left_out=whole)
        self._shapes, self._device = [(rows, numel) for numel in numels], device
        self._sizes = [rows * -(-numel // 4) * 4 for numel in numels]  # aligned to 16 bytes

    def buffers(self) -> list[Tensor]:
        """fp32 [rows, numel] for each tensor, in one buffer."""
        flat = torch.empty(sum(self._sizes), dtype=torch.float32, device=self._device)
        return [part[: math.prod(shape)].view(shape) for part, shape in zip(flat.split(self._sizes), self._shapes)]


class Difference:
    """What one unit's ranks send where they hold what its weights were.

    Args:
        own, brought: what lies in the row of this rank, and in each of those that the hops bring.
        device: where the secondary shard lies.
        refresh_every: steps from one full gather to the next; 0: none is due.

    Attributes:
        begun: something is held that differences can be added to.
        steps: differences since the last full gather.
    """

    def __init__(self, own: Contents, brought: Contents, device: torch.device, refresh_every: int = 0) -> None:
        self.own, self.brought = own, brought
        self.device, self.refresh_every = device, refresh_every
        self._rows_at_once = max(1, _AT_ONCE // max(1, sum(brought.numels)))
        self._own_row: _Rows | None = None
        self._brought_rows: dict[int, _Rows] = {}
        self.begun = False
        self.steps = 0
        self._too_large: Tensor | None = None  # bool [], on the host once the event is over
        self._copied: torch.cuda.Event | None = None

    @property
    def is_due(self) -> bool:
        """Whether the next gather brings differences. The same on all ranks that exchange them."""
        if not self.begun or (self.refresh_every and self.steps >= self.refresh_every):
            return False
        return not self._was_too_large()

    def _was_too_large(self) -> bool:
        if self._copied is not None:
            self._copied.synchronize()  # of the step before: nobody waits here
            self._copied = None
        return self._too_large is not None and bool(self._too_large)

    def begin(self) -> None:
        """A full gather has filled the secondary shard."""
        self.begun, self.steps, self._too_large, self._copied = True, 0, None, None

    def forget(self) -> None:
        """What is held, or will be, is no base of a difference."""
        self.begun = False

    @torch.no_grad()
    def encode(self, shards: Sequence[Tensor], held: Tensor, out: Tensor) -> None:
        """Write what this rank sends to `out`, uint8 [1, row bytes].

        Args:
            shards: its part of each tensor, flat; what is missing at the end of one is padding, zeros.
            held: uint8 [1, row bytes of the secondary shard], its own row there.
        """
        if not shards:  # of whole tensors a rank may own none
            return
        if self._own_row is None:
            self._own_row = _Rows(1, self.own, self.device)
        own = self._own_row
        values, was = own.buffers(), own.buffers()
        own.held_matrices.decode(held, own.order, was)
        torch._foreach_zero_(values)
        torch._foreach_copy_([value.view(-1)[: shard.numel()] for value, shard in zip(values, shards)], shards)
        if own.added:
            torch._foreach_sub_([values[index] for index in own.added], [was[index] for index in own.added])
        own.differences.encode(values, own.order, out)

    @torch.no_grad()
    def add(self, brought: Tensor, held: Tensor) -> None:
        """Bring uint8 `held` [rows, row bytes of the secondary shard] up to date with `brought` [rows, row bytes].

        Element by element, and alike on all ranks.
        """
        largest = [[], []]  # of differences, of weights
        for some_brought, some_held in zip(brought.split(self._rows_at_once), held.split(self._rows_at_once)):
            rows = len(some_held)
            if rows not in self._brought_rows:
                self._brought_rows[rows] = _Rows(rows, self.brought, self.device)
            some = self._brought_rows[rows]
            values, weights = some.buffers(), some.buffers()
            some.differences.decode(some_brought, some.order, values)
            some.held_matrices.decode(some_held, some.order, weights)
            added = [(values[index], weights[index]) for index in some.added]
            if added:
                for found, tensors in zip(largest, zip(*added)):
                    found.append(torch.stack(torch._foreach_norm(tensors, torch.inf)))
                torch._foreach_add_([value for value, _ in added], [weight for _, weight in added])
            some.held.encode(values, some.order, some_held)
        self.steps += 1
        if largest[0]:
            self._look_at(*(torch.stack(found).amax(dim=0) for found in largest))

    def _look_at(self, differences: Tensor, weights: Tensor) -> None:
        """Remember whether a difference was too large, without waiting for the device. NaN is."""
        fits = (differences <= _LARGEST_SHARE * weights).all()
        if self.device.type != "cuda":
            self._too_large = ~fits
            return
        self._too_large = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._too_large.copy_(~fits, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    # -- what training depends on ------------------------------------------------------------------------------------

    def state(self) -> dict:
        """Differences since the last full gather, and whether the last one was too large."""
        return {"steps": self.steps, "too large": self._was_too_large()}

    def continue_from(self, state: dict) -> None:
        """What was held has been put there again: go on where `state` was taken."""
        self.begin()
        self.steps, self._too_large = state["steps"], torch.tensor(state["too large"])
