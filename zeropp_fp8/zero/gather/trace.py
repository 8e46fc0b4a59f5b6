"""Learns the order in which a step fetches units, to prefetch in the next step and to keep units that are reused.

All ranks see the same calls in the same order (ZeRO-3 needs that anyway: a gather is collective), so all of them
learn the same order and make the same decisions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from zeropp_fp8.zero.gather.units import Unit

Fetch = tuple[tuple[Unit, ...], str]


class FetchTrace:
    """The fetches of one forward and backward pass (or of a forward alone, in evaluation)."""

    def __init__(self) -> None:
        self._known: list[Fetch] = []
        self._positions: dict[int, list[int]] = {}  # id(unit) -> positions of its fetches
        self._numel_before: list[int] = []
        self._now: list[Fetch] = []
        self._follows_known = False

    def start_pass(self) -> None:
        """A forward begins. The pass before becomes the known order, if it differed from that."""
        if self._now and not (self._follows_known and len(self._now) <= len(self._known)):
            self._learn(self._now)
        self._now = []
        self._follows_known = bool(self._known)

    def _learn(self, fetches: list[Fetch]) -> None:
        self._known = fetches
        self._positions = {}
        self._numel_before = [0]
        for position, (units, _) in enumerate(fetches):
            for unit in units:
                self._positions.setdefault(id(unit), []).append(position)
            self._numel_before.append(self._numel_before[-1] + sum(unit.numel for unit in units))

    def forget(self) -> None:
        """Start from nothing, for example because the model's hooks changed."""
        self.__init__()

    def fetched(self, units: tuple[Unit, ...], kind: str) -> None:
        """Add the next fetch of this pass; `kind` is the ledger's name for its bytes."""
        position = len(self._now)
        self._now.append((units, kind))
        if self._follows_known:
            known = self._known[position][0] if position < len(self._known) else None
            self._follows_known = known == units  # units are compared by identity

    @property
    def position(self) -> int:
        """The number of fetches in this pass so far."""
        return len(self._now)

    def coming(self, start: int) -> Iterator[tuple[int, Unit, str]]:
        """(position, unit, kind) of the fetches expected from position `start` on; none if the order is unknown."""
        if self._follows_known:
            for position in range(start, len(self._known)):
                units, kind = self._known[position]
                for unit in units:
                    yield position, unit, kind

    def first_order(self) -> Sequence[Unit]:
        """Every unit of the known order once, by its first fetch."""
        return list({id(unit): unit for units, _ in self._known for unit in units}.values())

    def numel_until(self, unit: Unit) -> int | None:
        """Elements fetched before `unit` is needed again in this pass; None if it is not, or if that is unknown."""
        if not self._follows_known:
            return None
        positions = self._positions.get(id(unit), ())
        index = bisect_right(positions, len(self._now) - 1)
        if index == len(positions):
            return None
        return self._numel_before[positions[index]] - self._numel_before[len(self._now)]
