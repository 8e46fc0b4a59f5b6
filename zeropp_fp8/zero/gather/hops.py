"""Pending gathers: which hop of a unit comes next, on which lane, into which buffer.

On a GPU the hops run on lanes (streams) of their own: encoding and the hop between nodes on one, the hop within nodes
on another, so that consecutive units use both kinds of link at the same time. If nodes exchange differences
(difference.py), a third lane adds them to the copies. The lanes are far ahead of the computation, so a user of a unit's
result waits for that unit, never for a lane.

A gather's buffers are of the compute stream's memory, for that gather alone, so that activations can use it at their
peak. For this a gather waits for what has been computed when it starts, a unit or more ahead; over NVLink no time is
lost (benchmarks/results/before_after/h200-2-nvlink-buffers.json).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zeropp_fp8.comm.all_gather import gather_through
from zeropp_fp8.comm.lanes import BufferRing, Lane, after, buffer_for, mark, stream_number, used_last
from zeropp_fp8.zero.gather.route import Route
from zeropp_fp8.zero.gather.units import PendingGather, Unit

# Units whose differences may be on their way at a time: one is sent, one is added, one waits.
_MOST_COMING = 3


class Hops:
    """The lanes and buffers of one engine's gathers.

    Attributes:
        pending_numel: elements of units whose values are on their way.
    """

    def __init__(self, route: Route, units: Callable[[], Sequence[Unit]]) -> None:
        self.route, self.device, self._ledger = route, route.device, route.session.ledger
        self._units = units  # all that this engine gathers
        self.pending_numel = 0
        self._network = Lane(self.device)
        self._node = Lane(self.device)
        self._adding = Lane(self.device)
        self._brought_ring = BufferRing(self.device, _MOST_COMING)
        self._coming: deque[Unit] = deque()  # units whose differences are not yet added
        self._weights_ready = None  # device event: the last write to the weights

    def written(self) -> None:
        """The current stream has the last write to weights."""
        self._weights_ready = mark(self.device)

    def free(self) -> None:
        """Free the buffers that serve gather after gather."""
        self._brought_ring.clear()

    def settle(self) -> None:
        """Complete all copies, for the current stream."""
        for unit in list(self._coming):
            self._add_differences(unit)
        for lane in (self._network, self._adding):
            lane.before_current()

    # -- the stages of a gather --------------------------------------------------------------------------------------

    def start_first(self, unit: Unit) -> None:
        """Encode this rank's shards and start the hops up to the secondary shard, unless that is current."""
        if unit.pending is not None or unit.secondary_is_current or unit.shards_are_values:
            return
        unit.lay_out()
        if unit.prepare():
            self.written()
        pending, stored = PendingGather(unit), unit.stored_payload()
        pending.held = self._held_buffer(pending) if stored is None else stored
        with self._network, self._ledger.billed(unit.copy_bill if unit.keeps_secondary else pending.bill):
            after(self._weights_ready)
            differs = unit.difference.is_due
            if differs:
                if not unit.difference.sizes:
                    self._agree(unit.route)
                pending.brought = self._brought_ring.take(unit.difference.brought_bytes)
                pending.first_work = unit.difference.send(pending.held, pending.brought)
            elif stored is None:
                pending.first_work = unit.first_hops(pending.held)
            if not pending.first_work:
                pending.filled = mark(self.device)
        unit.pending = pending
        if unit.keeps_secondary:
            unit.secondary, unit.secondary_is_current = pending.held, True
        if differs:
            self._coming.append(unit)
            while len(self._coming) >= _MOST_COMING:
                self._add_differences(self._coming[0])

    def _agree(self, route: Route) -> None:
        """Let all ranks of a route know how long the payloads of differences are, of all units that are written.

        The host waits for these weights.
        """
        for unit in (units := [unit for unit in self._units() if unit.difference.is_unknown]):
            unit.lay_out()  # which may end its differences
        units = [unit for unit in units if unit.difference.begun and unit.route is route]
        needs = torch.cat([unit.difference.measure() for unit in units])
        rows = gather_through(needs.view(torch.uint8), route.levels, self._ledger).view(torch.int64)
        of_ranks = rows.view(-1, len(units))[route.rows_in_rank_order].t().tolist()
        for unit, sizes in zip(units, of_ranks):
            unit.difference.agree(sizes)
        known = [unit for unit in self._units() if unit.difference.sizes]
        sent = sum(sum(unit.difference.sizes) for unit in known)
        self.route.session.formats.difference_bits = 8 * sent / sum(unit.numel for unit in known)

    def _add_differences(self, unit: Unit) -> None:
        """Add the differences of a unit to its copy once they have arrived; on a CPU the host waits for them."""
        pending = unit.pending
        self._coming.remove(unit)
        with self._adding:
            unit.wait_for(pending.first_work)
            unit.difference.add(pending.brought, pending.held)
            self._brought_ring.give_back(pending.brought)
            pending.filled = mark(self.device)
        pending.first_work, pending.brought = [], None

    def _held_buffer(self, pending: PendingGather) -> Tensor:
        """The buffer for the first hops' result: the secondary shard, or one for this gather."""
        unit = pending.unit
        if not unit.keeps_secondary:
            return self._take(pending, self._network, unit.held_bytes)
        if unit.secondary is not None and unit.secondary.numel() == unit.held_bytes:
            return unit.secondary
        with self._network:
            return torch.empty(unit.held_bytes, dtype=torch.uint8, device=self.device)

    def _take(self, pending: PendingGather, lane: Lane, num_bytes: int) -> Tensor:
        """A buffer for one gather; `lane` fills it. Call it on the stream that decodes."""
        buffer = buffer_for(lane, num_bytes, self.device)
        pending.taken.append(buffer)
        pending.taken_on = stream_number(self.device)
        return buffer

    def start(self, unit: Unit, ahead: bool = False) -> None:
        """Start to gather a unit's parameters for computing; does nothing if that is already pending.

        `ahead`: the values are not needed yet. On a CPU the last hop is then left to the call that needs them, unless
        it can start at once, because waiting for the first hops would block.
        """
        self.start_first(unit)
        if unit.pending is None:
            if not unit.secondary_is_current:
                return  # shards are values
            unit.pending = PendingGather(unit, unit.secondary)
        elif unit.pending.gathered is not None:
            return
        if not unit.pending.asked_for:
            unit.pending.asked_for = True
            self.pending_numel += unit.numel
        if not (ahead and unit.pending.first_work and self.device.type == "cpu"):
            self._start_last(unit.pending)

    def _start_last(self, pending: PendingGather) -> None:
        unit = pending.unit
        if pending.brought is not None:
            self._add_differences(unit)
        if unit.route.last.size == 1:
            pending.gathered = pending.held
            return
        pending.gathered = self._take(pending, self._node, unit.gathered_bytes)
        with self._node, self._ledger.billed(pending.bill):
            pending.wait_for_first_hops()
            pending.last_work = unit.last_hop(pending.held, pending.gathered)

    def end(self, unit: Unit) -> None:
        """The current stream has the last use of a gather's result, but for operands, which may be views of it."""
        pending, unit.pending = unit.pending, None
        if pending.asked_for:
            self.pending_numel -= unit.numel
        if pending.taken and pending.taken_on != stream_number(self.device):
            for buffer in pending.taken:
                used_last(buffer)

    def cancel(self, unit: Unit) -> None:
        """End a gather that nothing will use."""
        pending = unit.pending
        if pending is None:
            return
        if pending.brought is not None:
            self._add_differences(unit)
        if pending.gathered is None:
            with self._node:  # the next use of the copy may begin on this lane
                pending.wait_for_first_hops()
        pending.wait()
        self.end(unit)
