"""Quantized weight differences: between nodes travels how weights have changed, not what they are.

Every rank that keeps a secondary shard holds what all weights were (W'). After a step each encodes W - W' of its own
slice in 4, 3 or 2 bits (SDP4Bit, arXiv 2410.15526, section 3.1), the hops up to the secondary shard bring all of them,
and every rank adds them to what it holds: the same operations on the same bytes, so that W' stays the same, bit for
bit, wherever it is held. What quantization dropped is in the next difference: errors do not add up.

W' rests in the format that weights travel in without differences (`weights.format`), which the hop behind the
secondary shard sends on as ever. Differences are of the 16-bit weights and not of their fp32 masters: these are what a
checkpoint, an exact gather and stock's forward have, and where W' has 16 bits too their rounding would come back.

Vectors travel as they are. A full gather begins (and takes the place of) differences where nothing is held yet, where
weights were written by anything but a step, and where a difference did not fit: one whose
largest number was more than a quarter of the largest weight of its tensor. That is seen by all ranks that hold it in
what they decoded, and read by the host one step later, when the device has long been done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zeropp_fp8.comm.lanes import mark
from zeropp_fp8.comm.payload import Held, PayloadLayout, SliceOrder
from zeropp_fp8.formats import WireFormat

# A difference this large, in 4 bits at 18.6 dB, leaves weights 30.6 dB, as FP8 does; INT8 has 43.
_LARGEST_SHARE = 0.25


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

    @cached_property
    def row_bytes(self) -> int:
        """Of a payload with differences."""
        return sum(one.payload_bytes(numel) for one, numel in zip(self.formats, self.numels))


def _layouts(
    contents: Contents, dtypes: Sequence[torch.dtype], device: torch.device
) -> tuple[PayloadLayout, PayloadLayout]:
    """Of rows with differences, and of what is held."""
    both = contents.formats, contents.held_formats
    return tuple(PayloadLayout(contents.numels, mine, dtypes, device, partner) for mine, partner in (both, both[::-1]))


class Fits:
    """Differences whose `fits` the device has found since the last copy to the host.

    A copy a unit would lie in a queue to the host until the unit has crossed between nodes, and whatever else a forward
    asks the device may have to wait behind it.
    """

    def __init__(self) -> None:
        self._found: list[Difference] = []
        self._copied: torch.Event | None = None

    def note(self, difference: Difference) -> None:
        """Its `fits` is on the device, written by what the current stream has been given."""
        self._found.append(difference)

    def bring_to_host(self) -> None:
        """Start copying all that has been noted, on the stream that wrote it."""
        found = [difference for difference in self._found if difference.fits is not None]
        self._found = []
        if not found:
            return
        fits = torch.stack([difference.fits for difference in found])
        on_host = torch.empty(fits.shape, dtype=torch.bool, pin_memory=fits.is_cuda, device="cpu")
        on_host.copy_(fits, non_blocking=True)
        self._copied = mark(fits.device)
        for difference, one in zip(found, on_host.unbind()):
            difference.fits = one

    def wait(self) -> None:
        """The host waits for that copy: in the step after, when it has long been there."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None


class Difference:
    """What one unit's ranks send where they hold what its weights were.

    Args:
        own, brought: what lies in the row of this rank, and in each of those that the hops bring.
        device: where the secondary shard lies.
        all_fits: of all units (default: this one is alone).

    Attributes:
        begun: something is held that differences can be added to.
        steps: differences since the last full gather.
        fits: bool [], whether the last one did; None where there has been none.
    """

    def __init__(
        self,
        own: Contents,
        brought: Contents,
        device: torch.device,
        all_fits: Fits | None = None,
    ) -> None:
        self.own, self.brought = own, brought
        self.device = device
        self._one_row = SliceOrder([0], device)
        self._brought = _layouts(brought, [torch.float32] * len(brought.numels), device)
        self._own: tuple[PayloadLayout, PayloadLayout] | None = None  # which depend on the shards' dtypes
        self.begun = False
        self.steps = 0
        self.fits: Tensor | None = None
        self._all_fits = all_fits or Fits()

    @property
    def is_due(self) -> bool:
        """Whether the next gather brings differences. The same on all ranks that exchange them."""
        return self.begun and not self._was_too_large()

    def _was_too_large(self) -> bool:
        self._all_fits.wait()
        return self.fits is not None and not self.fits

    def begin(self) -> None:
        """A full gather has filled the secondary shard."""
        self.begun, self.steps, self.fits = True, 0, None

    def forget(self) -> None:
        """What is held, or will be, is no base of a difference."""
        self.begun = False

    def encode(self, shards: Sequence[Tensor], held: Tensor, out: Tensor) -> None:
        """Write what this rank sends to `out`, uint8 [1, row bytes].

        Args:
            shards: its part of each tensor, flat; what is missing at the end of one is padding, zeros.
            held: uint8 [1, row bytes of the secondary shard], its own row there.
        """
        if not shards:  # of whole tensors a rank may own none
            return
        if self._own is None:
            self._own = _layouts(self.own, [shard.dtype for shard in shards], self.device)
        differences, weights = self._own
        differences.encode(shards, self._one_row, out, held=Held(weights, held))

    def add(self, brought: Tensor, held: Tensor) -> None:
        """Bring uint8 `held` [rows, row bytes of the secondary shard] up to date with `brought` [rows, row bytes].

        Alike on all ranks.
        """
        differences, weights = self._brought
        self.steps += 1
        of_differences, of_weights = differences.add(brought, Held(weights, held))
        self.fits = (of_differences <= _LARGEST_SHARE * of_weights).all()  # NaN does not
        self._all_fits.note(self)

    # -- what training depends on ------------------------------------------------------------------------------------

    def state(self) -> dict:
        """Differences since the last full gather, and whether the last one was too large."""
        return {"steps": self.steps, "too large": self._was_too_large()}

    def continue_from(self, state: dict) -> None:
        """What was held has been put there again: go on where `state` was taken."""
        self.begin()
        self.steps, self.fits = state["steps"], torch.tensor(not state["too large"], device="cpu")
