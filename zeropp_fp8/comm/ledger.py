"""Bytes on the wire, counted where buffers are handed to the backend.

An all-gather over g ranks of a payload of b bytes sends (g-1) b bytes from each of them, an all-to-all of a buffer of
b bytes sends (g-1)/g b. Beside it stands what stock ZeRO-3 would have sent for the same events: one ring over all W
ranks in 16 bits, (W-1)/W of the bytes from each rank, of which the N crossings between nodes are shared evenly by the
ranks of a node. (gloo's own reduce-scatter sends more than a ring does.) Activations are no ring: stock's all-to-all
sends the same elements to the same ranks, in 16 bits.

Every rank counts what all ranks send too, so that asking for it needs no communication. It is W times what one rank
sends where shards are padded to equal size; gradients that are missing on a rank are sent as zeros. Of tensors with
owners every rank knows what each owner has. The exception are activations of which the ranks hold unequal shares (heads
that do not divide evenly by the ranks): the sum then is an estimate.

A step counts what it computes with, for itself and for stock: weights that came before it, for an evaluation or at the
end of another step, count as the step's as soon as it uses them. So steps of equal work send equal bytes, whatever is
done between them.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from typing import Any

STEP_KINDS = ("weights_forward", "weights_backward", "gradients", "activations", "other")
OUTSIDE = "outside_steps"
STOCK_BYTES_PER_ELEMENT = 2


SENT, STOCK = "per_step", "stock_per_step"  # by this project; by stock
_LINKS = ("inter", "intra")
_OF_ALL = {link: f"{link}, all ranks" for link in _LINKS}
_KEYS = {False: dict(zip(_LINKS, _LINKS)), True: _OF_ALL}  # whether of all ranks together
Bill = Counter  # bytes by (SENT or STOCK, key of a link)


class Meter:
    """Bytes of the steps that have ended since the engine was made, or since it was last set to zero."""

    def __init__(self) -> None:
        self.set_to_zero()

    def set_to_zero(self) -> None:
        self.steps, self.bytes = 0, Counter()  # by (SENT or STOCK, kind, key of a link)

    def report(self, total: bool = False) -> dict[str, Any]:
        """The number of steps, and means of what this rank sends, or with `total` all ranks, and of stock's."""
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
        """Means of what this rank sends over a link, and of stock's, of all kinds."""
        report = self.report()
        return tuple(sum(kind[link] for kind in report[table].values()) for table in (SENT, STOCK))


class _Counting:
    """Context in which a ledger counts for a kind. (A generator would take three times the calls, 300 times a step.)"""

    def __init__(self, ledger: WireLedger, kind: str, bill: Bill | None = None) -> None:
        self._ledger, self._now = ledger, (kind, bill)

    def __enter__(self) -> None:
        self._before = self._ledger.kind, self._ledger.bill
        self._ledger.kind, self._ledger.bill = self._now

    def __exit__(self, *exc) -> None:
        self._ledger.kind, self._ledger.bill = self._before


class WireLedger:
    """Counters of one engine on one rank.

    A step's bytes stay pending until `end_step()`; reports average over finished steps.
    """

    def __init__(self, nodes: int, ranks_per_node: int) -> None:
        self.nodes = nodes
        self.ranks_per_node = ranks_per_node
        self.world_size = nodes * ranks_per_node
        self.kind = OUTSIDE
        self.bill: Bill | None = None
        # For issue.py: DeepSpeed's comms logger, and a list for (link, a collective under way) while they are timed.
        self.comms_logger: Any = None
        self.times: list[tuple[str, Any]] | None = None
        self.of_run = Meter()
        self.pending, self.outside = Counter(), Counter()  # keys as a meter's and as a bill's
        self._meters = weakref.WeakSet([self.of_run])

    @property
    def steps(self) -> int:
        """Finished optimizer steps."""
        return self.of_run.steps

    def meter(self) -> Meter:
        """Another count of steps, for who sets it to zero in between."""
        made = copy.deepcopy(self.of_run)
        self._meters.add(made)
        return made

    def counting(self, kind: str) -> _Counting:
        """Bytes sent inside belong to `kind`: one of STEP_KINDS, or OUTSIDE."""
        return _Counting(self, kind)

    def billed(self, bill: Bill) -> _Counting:
        """What is sent inside, if that is outside of steps, is noted in `bill` too, for the step that uses it."""
        return _Counting(self, self.kind, bill)

    def pay(self, bill: Bill) -> None:
        """What came outside of steps is used: if a step uses it, it counts as sent in the step, by stock too."""
        if self.kind == OUTSIDE or not bill:
            return
        for (table, key), num_bytes in bill.items():
            self.pending[table, self.kind, key] += num_bytes
        self.outside.subtract(bill)
        bill.clear()

    def _count(self, table: str, link: str, num_bytes: float, by_all: float | None = None) -> None:
        by_all = num_bytes * self.world_size if by_all is None else by_all
        if self.kind != OUTSIDE:
            self.pending[table, self.kind, link] += num_bytes
            self.pending[table, self.kind, _OF_ALL[link]] += by_all
            return
        for counts in (self.outside,) if self.bill is None else (self.outside, self.bill):
            counts[table, link] += num_bytes
            counts[table, _OF_ALL[link]] += by_all

    def sent(self, link: str, num_bytes: float, by_all: float | None = None) -> None:
        """This rank hands `num_bytes` for other ranks to the backend, over `link` ("inter" or "intra").

        `by_all`: what all ranks together do; None: each as much as this one.
        """
        self._count(SENT, link, num_bytes, by_all)

    def sent_around_ring(self, num_bytes: float, rounds: float = 1.0) -> None:
        """A collective over all ranks that DeepSpeed issues itself, by the ring formula; `rounds` 2 for all-reduce."""
        for link, share in self.ring_bytes(num_bytes * rounds).items():
            self.sent(link, share)

    def stock_would_send(self, numel: int) -> None:
        """Stock ZeRO-3 would move `numel` elements (of the full tensor) around the ring in 16 bits here."""
        for link, share in self.ring_bytes(numel * STOCK_BYTES_PER_ELEMENT).items():
            self._count(STOCK, link, share)

    def stock_would_send_over(self, link: str, numel: int) -> None:
        """Stock would hand `numel` elements for other ranks to the backend in 16 bits here, over `link`."""
        self._count(STOCK, link, numel * STOCK_BYTES_PER_ELEMENT)

    def ring_bytes(self, num_bytes: float) -> dict[str, float]:
        """Mean bytes per rank when a ring all-gather (or reduce-scatter) moves `num_bytes` over all ranks."""
        world = self.world_size
        per_rank = num_bytes * (world - 1) / world
        # Of the W links of the ring N lead to another node (none when there is one node).
        crossing = self.nodes / world if self.nodes > 1 else 0.0
        return {"inter": per_rank * crossing, "intra": per_rank * (1 - crossing)}

    def end_step(self) -> None:
        """An optimizer step ended (also one skipped for overflow)."""
        for meter in self._meters:
            meter.steps += 1
            meter.bytes.update(self.pending)
        self.pending.clear()

    def report(self, total: bool = False) -> dict[str, Any]:
        """Bytes per step sent by this rank, or by all ranks with `total`; see zeropp_fp8.wire_report."""
        outside = {link: exact(self.outside[SENT, key]) for link, key in _KEYS[total].items()}
        return self.of_run.report(total) | {OUTSIDE: outside}


def exact(value: float) -> float | int:
    """A whole number as int."""
    return int(value) if value == int(value) else value
