"""Packed experts of which only those are gathered that some rank has tokens for (`"experts.gather": "used"`).

The routing is an argument of the experts' forward. When it is known, the ranks agree on the experts that any of them
uses, by one all-reduce of a byte per expert, and the host waits for it, because the sizes of the hops depend on it.
With T tokens on all ranks and k of E experts per token, (1 - k / E)^T of the experts are not sent: of 128 experts with
8 per token 60 % at 8 tokens, 13 % at 32, none at 1,024.

A parameter lies in the ranks' rows as equal slices, whatever its experts, so each rank sends those bytes of its row
that the used experts need: more or fewer than another. What is not sent decodes to NaN: code that reads it is seen.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm.issue import all_reduce
from zeropp_fp8.compute.experts import LowPrecisionExperts, projections_of
from zeropp_fp8.config import SECTION, ConfigError, PluginConfig
from zeropp_fp8.zero.gather.sliced import SlicedUnit
from zeropp_fp8.zero.gather.storage import Storage
from zeropp_fp8.zero.gather.units import Arrived, Unit

if TYPE_CHECKING:
    from zeropp_fp8.zero.gather.gatherer import Gatherer

_NOT_SENT = 0xFF  # NaN as a number of 16 or 32 bits, as an FP8 code, and as a scale of any format

Span = tuple[int, int]  # (first byte, byte after the last)


class InParts(SlicedUnit):
    """A unit of packed experts; `in_parts` makes the classes.

    `wanted` are the experts that a gather brings which starts now; None: all.
    """

    may_prefetch = False  # before the routing is known
    wanted: frozenset[int] | None = None

    def lay_out(self) -> None:
        before = self.layout
        super().lay_out()
        if self.layout is not before:
            self.brought = self._known = None
            self._parts = [list(self._parts_of(rank)) for rank in range(self.route.world_size)]

    def _parts_of(self, rank: int) -> Iterator[tuple[int | None, int, int]]:
        """(expert, or None for what all need; first byte, byte after the last) of the parts of a rank's row."""
        layout, count = self.layout, sharded.shape(self.params[0])[0]
        places = zip(layout.offsets, layout.sizes, layout.formats, layout.slice_numels)
        for param, (start, size, wire_format, numel) in zip(self.packed, places):
            granule, each, first = wire_format.granule, sharded.numel(param) // count, rank * numel
            if numel % granule:  # its last block has bytes of its own
                yield None, start, start + size
                continue
            shared = wire_format.shared_bytes(numel)
            yield None, start + shared.start, start + shared.stop
            for expert in range(first // each, min(count, -(-(first + numel) // each))):
                begin, end = max(expert * each - first, 0) // granule, min((expert + 1) * each - first, numel)
                for at, num_bytes in wire_format.granule_runs(numel):
                    yield expert, start + at + begin * num_bytes, start + at + -(-end // granule) * num_bytes

    def _spans_of(self, experts: frozenset[int]) -> tuple[list[list[Span]], list[int]]:
        """(the bytes of each rank's row that these experts need, how many they are)."""
        if self._known is None or self._known[0] != experts:
            spans = [_joined((s, e) for x, s, e in parts if x is None or x in experts) for parts in self._parts]
            self._known = experts, spans, [sum(end - start for start, end in each) for each in spans]
        return self._known[1:]

    def _packed(self, rows: Tensor, ranks: Sequence[int]) -> Tensor:
        """Flat uint8: what is wanted of the payloads `rows` [rows, row bytes] of these ranks."""
        spans, _ = self._spans_of(self.wanted)
        parts = [row[start:end] for row, rank in zip(rows, ranks) for start, end in spans[rank]]
        return torch.cat([rows[0, :0], *parts])  # a rank may have none

    @property
    def may_send_parts(self) -> bool:
        """Whether fewer experts are fewer bytes: not if each rank keeps a copy of all."""
        return self.route.last.size > 1 or not self.keeps_secondary

    @property
    def _first_hops_in_part(self) -> bool:
        """Whether the first hops bring only what is wanted: there is no copy of all, and no stored codes here."""
        return self.wanted is not None and not self.keeps_secondary and self.stored_payload() is None

    @property
    def held_bytes(self) -> int:
        if not self._first_hops_in_part:
            return super().held_bytes
        return sum(self._spans_of(self.wanted)[1][rank] for rank in self.route.held_ranks)

    @property
    def gathered_bytes(self) -> int:
        return super().gathered_bytes if self.wanted is None else sum(self._spans_of(self.wanted)[1])

    def first_hops(self, held: Tensor) -> list[dist.Work]:
        self.brought, route = self.wanted if self._first_hops_in_part else None, self.route
        if self.brought is None:
            return super().first_hops(held)
        row = torch.empty(1, self.layout.row_bytes, dtype=torch.uint8, device=route.device)
        self._encode([row])
        have, sizes = self._packed(row, [route.session.topology.rank]), self._spans_of(self.wanted)[1]
        if not route.unequal.before:
            held.copy_(have)
        return route.unequal.start_before(sizes, held, have, self.wait_for)

    def last_hop(self, held: Tensor, gathered: Tensor) -> list[dist.Work]:
        self.brought = self.wanted
        if self.wanted is None:
            return super().last_hop(held, gathered)
        if not self._first_hops_in_part:
            held = self._packed(held.view(self.route.reached, -1), self.route.held_ranks)
        return [self.route.unequal.start(self._spans_of(self.wanted)[1], len(self.route.before), gathered, held)]

    def decode(self, gathered: Tensor) -> Arrived:
        if self.brought is None:
            return super().decode(gathered)
        shape = self.route.world_size, self.layout.row_bytes
        rows = torch.full(shape, _NOT_SENT, dtype=torch.uint8, device=gathered.device)
        spans, _ = self._spans_of(self.brought)
        of_rows = [(row, *span) for row, rank in zip(rows, self.route.rank_order.slices) for span in spans[rank]]
        parts = gathered.split([end - start for _, start, end in of_rows])
        if of_rows:  # no rank may have chosen any
            torch._foreach_copy_([row[start:end] for row, start, end in of_rows], parts)
        values, operands = super().decode(rows.view(-1))
        return Arrived([(param, value, False) for param, value, _ in values], operands)


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Sorted spans without overlaps, none beside another, none empty."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        elif start < end:
            joined.append((start, end))
    return joined


@functools.cache
def in_parts(whole: type[Unit]) -> type[Unit]:
    """The class of units that are gathered in parts."""
    return type(f"{whole.__name__}InParts", (InParts, whole), {"__module__": __name__})


class Routing:
    """Which experts of one module are used, in its forward and in the backward of that.

    Args:
        units: its units in parts.
    """

    def __init__(self, gatherer: Gatherer, units: Sequence[InParts], experts: int) -> None:
        self._gatherer, self._units, self._experts = gatherer, units, experts
        self._calls, self._used = 0, frozenset()  # forwards whose backward has not ended, and what they have used

    def forward_begins(self, chosen: Tensor, comes_back: bool) -> None:
        """Agree with all ranks on the experts to gather, and start to. Collective.

        Args:
            chosen: int [tokens, k], the experts of each token; numbers from the experts' on are of none.
            comes_back: a backward of this forward will come.
        """
        if self._gatherer.resident:
            return
        session, used = self._gatherer.session, frozenset(range(self._experts))
        if any(self._is_to_come(unit) for unit in self._units):  # else a rank may be alone with what is gathered
            mask = torch.zeros(self._experts + 1, dtype=torch.uint8, device=chosen.device)
            mask[chosen.reshape(-1).clamp(max=self._experts)] = 1
            mask = mask[:-1].to(session.device)
            all_reduce(mask, dist.ReduceOp.MAX, session.topology.group, session.ledger)
            used = frozenset(mask.nonzero().flatten().tolist())
        if comes_back:
            self._calls += 1
            self._used |= used
        self._want(used)

    def backward_begins(self) -> None:
        """Start to gather what the forwards have used; all, if none of them is known."""
        if self._calls:
            self._want(self._used)

    def backward_ends(self) -> None:
        self._calls -= 1
        if self._calls <= 0:
            self.forget()

    def forget(self) -> None:
        """No forward that has been will have a backward."""
        self._calls, self._used = 0, frozenset()

    @staticmethod
    def _is_to_come(unit: InParts) -> bool:
        """Whether a unit may come in parts, the same on all ranks; not if a script has gathered all of it."""
        return bool(unit.may_send_parts and (unit.missing or unit.live))

    def _want(self, used: frozenset[int]) -> None:
        wanted = None if len(used) == self._experts else used
        for unit in self._units:
            if not self._is_to_come(unit):
                continue
            if unit.live or unit.is_pending:
                if unit.brought is None or (wanted is not None and wanted <= unit.brought):
                    continue
                self._gatherer.hops.cancel(unit)
                self._gatherer.release(unit, even_used=True)
            unit.wanted = wanted
            try:
                self._gatherer.hops.start(unit)
            finally:
                unit.wanted = None


def places_of(model: nn.Module, config: PluginConfig) -> dict[nn.Module, int]:
    """{module that is given the routing: number of experts}; with "experts.gather": "all" there is none.

    Such a module has packed experts, or is the outermost of PEFT's layers around them, which need the weights before.

    Raises:
        ConfigError: the model has no experts of which some can be gathered.
    """
    if config.experts.gather == "all":
        return {}
    experts: dict[nn.Module, nn.Module] = {}
    for module in model.modules():  # from outside
        base = module
        while "base_layer" in base._modules:
            base = base._modules["base_layer"]
        if projections_of(base):
            experts.setdefault(base, module)
    key = f'"{SECTION}.experts.gather": "used"'
    if not experts:
        raise ConfigError(
            f"{key} gathers some of the packed experts of transformers' mixtures, and this model has none; remove it"
        )
    if any(isinstance(each, LowPrecisionExperts) for each in experts):
        raise ConfigError(
            f'{key} does not go with experts that compute in "compute.format": a scale may belong to all of them; add '
            'their names to "compute.skip_modules", or set it to "all"'
        )
    return {place: each.num_experts for each, place in experts.items()}


def class_of(experts: int, storage: Storage, params: Sequence[Parameter]) -> type[Unit]:
    """The class of a unit at such a place; adapters among these parameters are gathered whole."""
    are_stacks = all(sharded.shape(param)[0] == experts for param in params)
    return in_parts(storage.unit_class) if are_stacks else storage.unit_class
