"""Gather stored weights: codes are sent as they are stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.compute.operand import Float8Operand
from zeropp_fp8.formats import WireFormat
from zeropp_fp8.zero.fragment import QuantizedFragment
from zeropp_fp8.zero.frozen.checkpoint import fragment_of
from zeropp_fp8.zero.frozen.operands import FrozenOperands
from zeropp_fp8.zero.frozen.store import (
    check_untouched,
    check_usable,
    decode_rows_into,
    note_version,
    partition_stored,
    stored_weight,
)
from zeropp_fp8.zero.gather.route import Route
from zeropp_fp8.zero.gather.sliced import SlicedUnit, gather_rows
from zeropp_fp8.zero.gather.storage import Storage


class StoredUnit(SlicedUnit):
    """A unit of stored parameters. Their codes are stored in one buffer, `payload`.

    Where the node keeps a copy, that is this rank's row of it: on two nodes a third of the codes' memory less.
    """

    storage: Stored
    may_differ = False  # codes never change by a little

    def format_of(self, param: Parameter) -> WireFormat:
        return stored_weight(param).wire_format

    def dtype_of(self, param: Parameter) -> torch.dtype:
        return stored_weight(param).dtype

    def is_exact(self, param: Parameter) -> bool:
        return True

    @property
    def shards_are_values(self) -> bool:
        return False

    def _not_decoded(self) -> list[int]:
        return [index for index, param in enumerate(self.packed) if param in self.storage.operands]

    def _unpadded_numels(self) -> list[int]:
        return []  # nothing is encoded

    def prepare(self) -> bool:
        """Store the codes in one buffer."""
        if self.payload is not None:
            return False
        shards = [sharded.shard(param) for param in self.packed]
        payload = torch.cat(shards)
        if self.keeps_secondary and self.route.reached > 1 and payload.device == self.route.device:
            if self.secondary is None or self.secondary.numel() != self.held_bytes:
                self.secondary = torch.empty(self.held_bytes, dtype=torch.uint8, device=payload.device)
            self.payload = self.own_held_row(self.secondary).view(-1).copy_(payload)
        else:
            self.payload = payload.pin_memory() if shards[0].is_pinned() else payload
        for param, part in zip(self.packed, self.payload.split(self.layout.sizes)):
            sharded.move_shard(param, part)
        return True

    def drop_copy(self) -> None:
        copy = self.secondary
        super().drop_copy()
        self.payload = None
        for param in self.params if copy is not None else ():
            shard = sharded.shard(param)
            if shard.untyped_storage().data_ptr() == copy.untyped_storage().data_ptr():
                sharded.move_shard(param, shard.clone())  # it must not keep the memory of the whole copy

    def stored_payload(self) -> Tensor | None:
        return self.payload if self.route.reached == 1 and self.payload.device == self.route.device else None

    def _operands_in(self, gathered: Tensor) -> list[tuple[Parameter, Float8Operand]]:
        payloads, layout, found = self.codes_in(gathered), self.layout, []
        order = None if self.route.in_rank_order else self.route.rows_in_rank_order
        for index in self._not_decoded():
            param, start, numel = self.packed[index], layout.offsets[index], layout.slice_numels[index]
            rows = payloads[:, start : start + layout.sizes[index]]
            found.append((param, self.storage.operands.stored_operand(param, rows, numel, order)))
        return found


class Stored(Storage):
    """Parameters that are stored as codes.

    Attributes:
        operands: those whose codes go to an FP8 product directly.
    """

    unit_class = StoredUnit
    sends_as_stored = True

    def __init__(self, route: Route) -> None:
        super().__init__(route)
        self.operands = FrozenOperands(route.session)  # empty until parameters are attached

    def takes(self, param: Parameter) -> bool:
        return stored_weight(param) is not None

    def attach(self, params: Sequence[Parameter]) -> None:
        self.operands.attach(params)

    def changed(self, params: Sequence[Parameter] | None) -> None:
        self.operands.changed(params)

    def formats_changed(self) -> None:
        self.operands.clear()

    def check_usable(self, params: Iterable[Parameter]) -> None:
        for param in params:
            check_usable(param)
            check_untouched(param)

    def check_untouched(self, params: Iterable[Parameter]) -> None:
        for param in params:
            check_untouched(param)

    def note(self, params: Iterable[Parameter]) -> None:
        for param in params:
            note_version(param)

    def fragment(self, name: str, param: Parameter, stock: Callable[[], Tensor]) -> QuantizedFragment:
        return fragment_of(name, param)

    def gather_exactly(self, params: Sequence[Parameter]) -> None:
        self.check_untouched(params)
        rows = gather_rows(self.route, [sharded.shard(param).to(self.route.device) for param in params])
        for param, payloads in zip(params, rows):
            decode_rows_into(param, payloads)

    def take_back(
        self, params: Sequence[Parameter], has_been_updated: bool, free_data: bool, written: list[Parameter]
    ) -> None:
        for param in params:
            sharded.drop_operand(param)
        written += partition_stored(params, has_been_updated, free_data)

    def report_rows(self, params: Sequence[Parameter]) -> list[tuple]:
        """Rows about weights that are stored, and sent, as codes."""
        by_format: dict[str, list[Parameter]] = defaultdict(list)
        for param in params:
            by_format[repr(stored_weight(param).wire_format)].append(param)
        rows = []
        for name, members in by_format.items():
            numel = sum(sharded.numel(p) for p in members)
            stored = sum(sharded.shard(p).numel() for p in members) * self.route.world_size / numel
            remarks = [f"{len(members)} tensors, stored in {stored:.3f} bytes per parameter on all ranks together"]
            operands = sum(p in self.operands for p in members)
            if operands:
                remarks.append(f"{operands} are stored as GEMM operands")
            if operands < len(members) and not self._has_kernel(stored_weight(members[0]).wire_format):
                remarks.append("no kernel for blocks this long: torch code, slower")
            rows.append(("frozen store", name, numel, "; ".join(remarks)))
        if not rows:
            rows.append(
                ("frozen store", "empty", 0, "no linear weight is frozen, or all are named in frozen.skip_modules")
            )
        return rows

    def _has_kernel(self, wire_format: WireFormat) -> bool:
        """Whether a format is decoded as fast as can be here: on a GPU, by a kernel."""
        if self.route.device.type != "cuda":
            return True
        from zeropp_fp8 import kernels

        return kernels.decodes(wire_format)
