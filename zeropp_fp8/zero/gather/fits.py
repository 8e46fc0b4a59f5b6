"""Whether differences fitted: found on the device, unit by unit, and brought to the host for all units at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zeropp_fp8.comm.lanes import mark

if TYPE_CHECKING:
    from zeropp_fp8.zero.gather.difference import Difference


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
