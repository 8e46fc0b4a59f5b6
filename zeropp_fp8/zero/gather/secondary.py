"""Chooses the units that keep their secondary shard, if `secondary.memory_gb` bounds the memory of all shards.

Every kept byte saves the same in later gathers, whatever its unit. Copies of frozen weights survive steps, so they come
first. The other units follow in the order of the model, and a unit that no longer fits is left out. Those are then the
last of a forward, when the first hops of the others are over, and the first of the backward, where units may still be
live. Parameters that stay gathered between steps need no copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from zeropp_fp8.config import SECTION, ConfigError
from zeropp_fp8.zero.gather.units import Unit
from zeropp_fp8.zero.memory import device_bytes, free_bytes
from zeropp_fp8.zero.session import Session

GB = 1e9
# The share of memory that "auto" leaves to activations, gathered blocks and pending gathers: 6 of 24 GB.
MARGIN = 0.25


def is_frozen(unit: Unit) -> bool:
    """Whether nothing of a unit is trained, so that copies survive optimizer steps."""
    return not any(p.requires_grad for p in unit.params)


def units_that_fit(units: Sequence[Unit], sizes: Sequence[int], limit: float) -> list[Unit]:
    """The units whose secondary shards, of `sizes` bytes, fit into `limit` bytes."""
    kept, left = [], limit
    for unit, size in sorted(zip(units, sizes), key=lambda pair: not is_frozen(pair[0])):
        if size <= left and not unit.persistent:
            kept.append(unit)
            left -= size
    return kept


class SecondaryShards:
    """The secondary shards of one engine; `limit`: bytes that they may take, if bounded, once they are chosen."""

    def __init__(self, session: Session) -> None:
        self.session, self.limit = session, 0

    def choose(self, units: Sequence[Unit]) -> None:
        """Choose the units that keep theirs, once the engine has allocated all that it needs at start.

        It is collective if memory is bounded: all ranks use the largest shard and the least memory of any rank, so that
        they agree on the units to gather.

        Raises:
            ConfigError: a rank has less than the configured memory, and the shards would take more than it has.
        """
        units = [unit for unit in units if unit.route.session.secondary_ranks is not None]
        limit = self.session.config.secondary.memory_gb
        if not units:
            return
        for unit in units if limit == "all" else self._that_fit(units, limit):
            unit.keeps_secondary = True

    def _that_fit(self, units: Sequence[Unit], limit: float | str) -> list[Unit]:
        session = self.session
        place = (session.device, session.ranks_here)
        available = free_bytes(*place) - sum(part.bytes_to_come() for part in session.parts)
        if limit == "auto":
            available -= int(MARGIN * device_bytes(*place))
        *sizes, less = _largest_of_all(units, session, -available)
        available = max(0, -less)
        self.limit = available if limit == "auto" else int(limit * GB)
        kept = units_that_fit(units, sizes, self.limit)
        taken = sum(size for unit, size in zip(units, sizes) if unit in kept)
        if taken > available:
            raise ConfigError(
                f'"{SECTION}.secondary.memory_gb": {limit:g} lets secondary shards take {taken / GB:.3g} GB on each '
                f"rank, and a rank has {available / GB:.3g} GB left for them; set it to less than that, which "
                'activations need too, or to "detect"'
            )
        return kept

    def choose_again(self, units: Sequence[Unit]) -> None:
        """Choose again after formats, and so sizes, have changed, if memory is bounded. Collective then."""
        units = [unit for unit in units if unit.route.session.secondary_ranks is not None]
        if not units or self.session.config.secondary.memory_gb == "all":
            return
        kept = units_that_fit(units, _largest_of_all(units, self.session), self.limit)
        for unit in units:
            unit.keeps_secondary = unit in kept
            unit.drop_copy()


def _largest_of_all(units: Sequence[Unit], session: Session, *others: int) -> list[int]:
    """The largest bytes over all ranks of each unit's secondary shard, and of other numbers. Collective."""
    for unit in units:
        unit.lay_out()
    largest = torch.tensor([*(unit.held_bytes for unit in units), *others], device=session.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=session.topology.group)
    return largest.tolist()
