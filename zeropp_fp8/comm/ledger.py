"""Count bytes on the wire where buffers are handed to the backend.

An all-gather over g ranks of a payload of b bytes sends (g-1) b bytes from each rank; an all-to-all of a buffer of
b bytes sends (g-1)/g b. The ledger also counts what stock ZeRO-3 would send for the same events: one ring over all W
ranks in 16 bits, (W-1)/W of the bytes from each rank; the ranks of a node share its part of the N links between nodes
evenly. For activations stock's all-to-all sends the same elements to the same ranks, in 16 bits.

A report needs no communication: all ranks send W times what one does, because shards are padded to equal size; of
tensors with owners a rank knows what each has. Of activations with unequal shares the sum is an estimate.

A step counts the weights it computes with, even if they were gathered before it: steps of equal work send equal bytes.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from typing import Any

from zeropp_fp8.comm.topology import Topology

STEP_KINDS = ("weights_forward", "weights_backward", "gradients", "activations", "other")
OUTSIDE = "outside_steps"
STOCK_BYTES_PER_ELEMENT = 2


SENT, STOCK = "per_step", "stock_per_step"  # sent by this project; sent by stock
_LINKS = ("inter", "intra")
_OF_ALL = {link: f"{link}, all ranks" for link in _LINKS}
_KEYS = {False: dict(zip(_LINKS, _LINKS)), True: _OF_ALL}  # key: whether the bytes are those of all ranks
Bill = Counter  # bytes by (SENT or STOCK, key of a link)


class Meter:
    """Bytes of the steps that have ended since the engine was made, or since the meter was last set to zero."""

    def __init__(self) -> None:
        self.set_to_zero()

    def set_to_zero(self) -> None:
        self.steps, self.bytes = 0, Counter()  # by (SENT or STOCK, kind, key of a link)

    def report(self, total: bool = False) -> dict[str, Any]:
        """Return the number of steps, and the mean bytes of this rank, or with `total` of all ranks, and of stock."""
        tables = {
            table: {
                kind: {
                    link: exact(self.bytes[table, kind, key] / max(self.steps, 1)) for link, key in _KEYS[total].items()
                }
                for kind in STEP_KINDS
            }
            for table in (SENT, STOCK)
        }
        return {"steps": self.steps, **tables}

    def of_link(self, link: str) -> tuple[float, float]:
        """Return the mean bytes that this rank, and stock, sends over a link for all kinds."""
        report = self.report()
        return tuple(sum(kind[link] for kind in report[table].values()) for table in (SENT, STOCK))


class _Counting:
    """A context in which a ledger counts for a kind. (A generator takes 3 times the calls, 300 times per step.)"""

    def __init__(self, ledger: WireLedger, kind: str, bill: Bill | None = None) -> None:
        self._ledger, self._now = ledger, (kind, bill)

    def __enter__(self) -> None:
        self._before = self._ledger.kind, self._ledger.bill
        self._ledger.kind, self._ledger.bill = self._now

    def __exit__(self, *exc) -> None:
        self._ledger.kind, self._ledger.bill = self._before


class WireLedger:
    """Count the bytes of one engine on one rank.

    The bytes of a step stay pending until `end_step()`; reports average over finished steps.
    """

    def __init__(self, nodes: int, ranks_per_node: int) -> None:
        self.nodes = nodes
        self.ranks_per_node = ranks_per_node
        self.world_size = nodes * ranks_per_node
        self.copies = 1  # of the model, each on so many ranks, of which this ledger is one rank's
        self.kind = OUTSIDE
        self.bill: Bill | None = None
        # For issue.py: DeepSpeed's comms logger; and a list of (link, collective under way) while links are timed.
        self.comms_logger: Any = None
        self.times: list[tuple[str, Any]] | None = None
        self.of_run = Meter()
        self.pending, self.outside = Counter(), Counter()  # keys of a meter; keys of a bill
        self._meters = weakref.WeakSet([self.of_run])

    @property
    def steps(self) -> int:
        """Return the number of finished optimizer steps."""
        return self.of_run.steps

    def meter(self) -> Meter:
        """Return another meter of the steps, for a user who sets it to zero in between."""
        made = copy.deepcopy(self.of_run)
        self._meters.add(made)
        return made

    def counting(self, kind: str) -> _Counting:
        """Count bytes sent inside for `kind`: one of STEP_KINDS, or OUTSIDE."""
        return _Counting(self, kind)

    def billed(self, bill: Bill) -> _Counting:
        """Also note bytes that are sent inside, but outside of steps, in `bill`, for the step that uses them."""
        return _Counting(self, self.kind, bill)

    def pay(self, bill: Bill) -> None:
        """Count bytes sent outside of steps for the step that uses them, for stock too; do nothing outside of steps."""
        if self.kind == OUTSIDE or not bill:
            return
        for (table, key), num_bytes in bill.items():
            self.pending[table, self.kind, key] += num_bytes
        self.outside.subtract(bill)
        bill.clear()

    def _count(self, table: str, link: str, num_bytes: float, by_all: float | None = None) -> None:
        by_all = num_bytes * self.world_size * self.copies if by_all is None else by_all
        if self.kind != OUTSIDE:
            self.pending[table, self.kind, link] += num_bytes
            self.pending[table, self.kind, _OF_ALL[link]] += by_all
            return
        for counts in (self.outside,) if self.bill is None else (self.outside, self.bill):
            counts[table, link] += num_bytes
            counts[table, _OF_ALL[link]] += by_all

    def sent(self, link: str, num_bytes: float, by_all: float | None = None) -> None:
        """Count `num_bytes` that this rank hands to the backend for other ranks, over `link` ("inter" or "intra").

        `by_all`: bytes from all ranks together; None: each rank sends as much as this one.
        """
        self._count(SENT, link, num_bytes, by_all)

    def sent_around_ring(self, num_bytes: float, rounds: float = 1.0, ring: Topology | None = None) -> None:
        """Count a collective that DeepSpeed issues, by the ring formula; `rounds`: 2 for all-reduce."""
        for link, share in self.ring_bytes(num_bytes * rounds, ring).items():
            self.sent(link, share)

    def stock_would_send(self, numel: int, ring: Topology | None = None) -> None:
        """Count `numel` elements (of the full tensor) that stock ZeRO-3 would move around the ring in 16 bits here."""
        for link, share in self.ring_bytes(numel * STOCK_BYTES_PER_ELEMENT, ring).items():
            self._count(STOCK, link, share)

    def stock_would_send_over(self, link: str, numel: int) -> None:
        """Count `numel` elements that stock would hand to the backend in 16 bits for other ranks here, over `link`."""
        self._count(STOCK, link, numel * STOCK_BYTES_PER_ELEMENT)

    def ring_bytes(self, num_bytes: float, ring: Topology | None = None) -> dict[str, float]:
        """Return the mean bytes per rank of a ring all-gather (or reduce-scatter) over its ranks; None: over all."""
        nodes, world = (ring or self).nodes, (ring or self).world_size
        per_rank = num_bytes * (world - 1) / world
        # N of the W links of the ring lead to another node (none if there is one node).
        crossing = nodes / world if nodes > 1 else 0.0
        return {"inter": per_rank * crossing, "intra": per_rank * (1 - crossing)}

    def end_step(self) -> None:
        """End an optimizer step (also one that is skipped for overflow)."""
        for meter in self._meters:
            meter.steps += 1
            meter.bytes.update(self.pending)
        self.pending.clear()

    def report(self, total: bool = False) -> dict[str, Any]:
        """Return the bytes per step of this rank, or with `total` of all ranks; see zeropp_fp8.wire_report."""
        outside = {link: exact(self.outside[SENT, key]) for link, key in _KEYS[total].items()}
        return self.of_run.report(total) | {OUTSIDE: outside}


def exact(value: float) -> float | int:
    """Return a whole number as int."""
    return int(value) if value == int(value) else value
