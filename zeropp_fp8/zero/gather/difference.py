"""Quantized weight differences: nodes send each other the changes of weights, not the weights.

Every rank that keeps a secondary shard holds a copy W' of all previous weights. After a step each rank encodes W - W'
of its own slice in 4, 3 or 2 bits (SDP4Bit, arXiv 2410.15526, section 3.1). The hops up to the secondary shard bring
all differences, and every rank adds them to its copy. All do the same operations on the same bytes, so W' stays equal
on all of them, bit for bit. The next difference contains what quantization dropped: errors do not add up.

W' is stored in the format in which weights are sent without differences (`weights.format`), and the hop behind the
secondary shard sends it as before. Differences are taken of the 16-bit weights and not of their fp32 masters: a
checkpoint, an exact gather and stock's forward use the former, and with a 16-bit W' the rounding would come back.

Vectors are sent as they are. A full gather replaces differences if no copy exists yet, if anything but a step wrote the
weights, or if a difference did not fit: its largest number was more than a quarter of its tensor's largest weight. All
ranks with a copy see that in the decoded numbers, and the host reads it one step later, when the device is long done.
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

# With a difference this large, in 4 bits at 18.6 dB, weights keep 30.6 dB, as with FP8; INT8 has 43.
_LARGEST_SHARE = 0.25


@dataclass(frozen=True)
class Contents:
    """The contents of a row of payloads.

    Attributes:
        numels: elements of each tensor.
        held_formats: their formats in the secondary shard.
        formats: the formats of their differences; unquantized: the tensor itself is sent.
    """

    numels: Sequence[int]
    held_formats: Sequence[WireFormat]
    formats: Sequence[WireFormat]

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a payload with differences."""
        return sum(one.payload_bytes(numel) for one, numel in zip(self.formats, self.numels))


def _layouts(
    contents: Contents, dtypes: Sequence[torch.dtype], device: torch.device
) -> tuple[PayloadLayout, PayloadLayout]:
    """The layouts of rows with differences, and of rows of the copy."""
    both = contents.formats, contents.held_formats
    return tuple(PayloadLayout(contents.numels, mine, dtypes, device, partner) for mine, partner in (both, both[::-1]))


class Fits:
    """Collects differences whose `fits` the device has computed since the last copy to the host.

    With one copy per unit, each copy would block the queue to the host until the unit has crossed between nodes, and
    other reads of a forward might have to wait behind it.
    """

    def __init__(self) -> None:
        self._found: list[Difference] = []
        self._copied: torch.Event | None = None

    def note(self, difference: Difference) -> None:
        """Note a difference whose `fits` is on the device, written by work on the current stream."""
        self._found.append(difference)

    def bring_to_host(self) -> None:
        """Start to copy all noted `fits`, on the stream that wrote them."""
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
        """Let the host wait for that copy, in the next step, when it is long done."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None


class Difference:
    """Encodes and adds the differences of one unit whose ranks hold a copy of its previous weights.

    Args:
        own, brought: contents of this rank's row, and of each row that the hops bring.
        device: the device of the secondary shard.
        all_fits: the Fits of all units (default: for this unit alone).

    Attributes:
        begun: a copy is held that differences can be added to.
        steps: differences since the last full gather.
        fits: bool [], whether the last difference fitted; None if there has been none.
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
        self._own: tuple[PayloadLayout, PayloadLayout] | None = None  # these depend on the shards' dtypes
        self.begun = False
        self.steps = 0
        self.fits: Tensor | None = None
        self._all_fits = all_fits or Fits()

    @property
    def is_due(self) -> bool:
        """Whether the next gather brings differences. The answer is the same on all ranks that exchange them."""
        return self.begun and not self._was_too_large()

    def _was_too_large(self) -> bool:
        self._all_fits.wait()
        return self.fits is not None and not self.fits

    def begin(self) -> None:
        """A full gather has filled the secondary shard."""
        self.begun, self.steps, self.fits = True, 0, None

    def forget(self) -> None:
        """Stop using the copy as the base of differences, until the next full gather."""
        self.begun = False

    def encode(self, shards: Sequence[Tensor], held: Tensor, out: Tensor) -> None:
        """Write this rank's payload to `out`, uint8 [1, row bytes].

        Args:
            shards: its part of each tensor, flat; elements missing at the end are padding, zeros.
            held: uint8 [1, row bytes of the secondary shard], its own row in the shard.
        """
        if not shards:  # a rank may own no whole tensor
            return
        if self._own is None:
            self._own = _layouts(self.own, [shard.dtype for shard in shards], self.device)
        differences, weights = self._own
        differences.encode(shards, self._one_row, out, held=Held(weights, held))

    def add(self, brought: Tensor, held: Tensor) -> None:
        """Update uint8 `held` [rows, row bytes of the secondary shard] with `brought` [rows, row bytes].

        All ranks do the same.
        """
        differences, weights = self._brought
        self.steps += 1
        of_differences, of_weights = differences.add(brought, Held(weights, held))
        self.fits = (of_differences <= _LARGEST_SHARE * of_weights).all()  # NaN does not fit
        self._all_fits.note(self)

    # -- extra state -------------------------------------------------------------------------------------------------

    def state(self) -> dict:
        """The number of differences since the last full gather, and whether the last one was too large."""
        return {"steps": self.steps, "too large": self._was_too_large()}

    def continue_from(self, state: dict) -> None:
        """Go on from the point where `state` was taken; the copy has been restored."""
        self.begin()
        self.steps, self.fits = state["steps"], torch.tensor(not state["too large"], device="cpu")
