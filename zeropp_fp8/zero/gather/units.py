"""Units (parameter groups) are gathered, decoded and released together: one message per hop, one buffer, one call.

Stock ZeRO-3 runs Python for every parameter and module; a unit runs it once for a whole transformer block.

A unit knows how its parameters are sent; gatherer.py and hops.py never ask. Its storage says how the ranks keep them:
as slices of numbers (sliced.py), codes (frozen/unit.py), or whole tensors on owners (owners/unit.py). Its difference
(difference.py) decides whether the whole weights are sent, or only what has changed in them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm.lanes import after
from zeropp_fp8.comm.ledger import Bill
from zeropp_fp8.compute.operand import Float8Operand
from zeropp_fp8.formats import SharedScaleFormat, UnquantizedFormat, WireFormat
from zeropp_fp8.zero.gather.difference import Difference
from zeropp_fp8.zero.gather.gemm_weights import WIRE_FORMAT
from zeropp_fp8.zero.gather.storage import Storage
from zeropp_fp8.zero.gather.waiting import named


@dataclass(eq=False)
class PendingGather:
    """Buffers and work of one pending gather.

    Attributes:
        unit: the unit that is gathered.
        held, first_work: the first hops' result, flat uint8; the hops.
        brought: differences that these hops bring, flat uint8, until they are added to `held`.
        filled: the device event after which `held` is complete, if the hops do not fill it.
        gathered, last_work: the last hop's result, or the buffer that it is being written to; the hop.
        asked_for: values are wanted. Otherwise only the secondary shard is being filled.
        taken, taken_on: buffers for this gather alone, and the number of the stream whose memory they are of.
        bill: bytes that it has sent outside of steps, without those of the secondary shard.
    """

    unit: Unit
    held: Tensor | None = None
    first_work: list[dist.Work] = field(default_factory=list)
    brought: Tensor | None = None
    filled: torch.Event | None = None
    gathered: Tensor | None = None
    last_work: list[dist.Work] = field(default_factory=list)
    asked_for: bool = False
    taken: list[Tensor] = field(default_factory=list)
    taken_on: int = 0
    bill: Bill = field(default_factory=Bill)

    def wait_for_first_hops(self) -> None:
        """Let the current stream (on a CPU: the host) wait until `held` is filled, and for no more.

        The network's lane is far ahead: a forward starts the first hops of all units at once. A wait for the lane would
        make the first unit wait for the last one.
        """
        after(self.filled)
        self.unit.wait_for(self.first_work)

    def wait(self) -> None:
        """Let the current stream (on a CPU: the host) wait until all has arrived."""
        if self.last_work:
            self.unit.wait_for(self.last_work)
        else:
            self.wait_for_first_hops()


class Arrived(NamedTuple):
    """The result of a gather.

    Attributes:
        values: (parameter, its values, whether they are exact).
        operands: (parameter, the operand of its product), perhaps views of the gathered bytes.
    """

    values: list[tuple[Parameter, Tensor, bool]]
    operands: list[tuple[Parameter, Float8Operand]]


class Unit(ABC):
    """A group of parameters that are gathered together.

    idle -> (first hops started ahead of need) -> pending: asked for -> live: the parameters hold their values.

    Attributes:
        persistent: kept gathered between steps.
        route: the hops.
        numel: elements of all its parameters.
        pending: its pending gather.
        keeps_secondary: the first hops' result stays until the weights change (secondary.py decides).
        secondary, secondary_is_current: the secondary shard, flat uint8, and whether it has the current weights.
        difference: updates the secondary shard; `may_differ`: see HoldsRows.
        copy_bill, bill: bytes sent outside of steps for the secondary shard, and for the values (comm/ledger.py).
        layout: offsets in buffers; None until `lay_out`, and again after formats have changed.
        payload: this rank's encoded shards, if they are kept, until the weights change.
        live: the engine has gathered the values that modules use, and has not dropped them yet.
        looked_at: keys of parameters that a caller of `gather_exactly` (GatheredParameters) has not dropped yet; nor
            does the engine. A rank may run modules that use no others alone, without a gather.
        names: the names of the parameters in the model.
        active_modules: keys of the modules that are using the parameters now.
        writes: a process-wide number of the last write to its weights; it changes with each write.
        may_prefetch: whether it may be gathered before the module that uses it runs.
        brought: the packed experts that the last gather has brought; None: all.
    """

    may_differ = False
    may_prefetch = True
    brought: frozenset[int] | None = None

    def __init__(self, params: list[Parameter], storage: Storage, persistent: bool = False) -> None:
        self.params, self.storage, self.persistent = params, storage, persistent
        self.route = storage.route
        self.numel = sum(sharded.numel(p) for p in params)
        self.pending: PendingGather | None = None
        self.keeps_secondary = False
        self.secondary: Tensor | None = None
        self.secondary_is_current = False
        self.difference = Difference(self)
        self.copy_bill, self.bill = Bill(), Bill()
        self.layout = None
        self.payload: Tensor | None = None
        self.live = False
        self.looked_at: set[int] = set()
        self.names: list[str] = []
        self.active_modules: set[int] = set()

    @property
    def is_pending(self) -> bool:
        """Whether its values are on their way."""
        return self.pending is not None and self.pending.asked_for

    @property
    def missing(self) -> list[Parameter]:
        """Parameters that do not hold their values at present."""
        return sharded.missing(self.params)

    def pay(self) -> None:
        """Count bytes sent outside of steps for the step that now uses the unit, if there is one."""
        if self.copy_bill or self.bill:
            self.route.session.ledger.pay(self.copy_bill)
            self.route.session.ledger.pay(self.bill)

    def leave(self) -> None:
        """Mark the parameters as used by no module."""
        self.active_modules.clear()
        for param in self.params:
            sharded.users(param).clear()

    # -- its parameters on the wire ---------------------------------------------------------------------------------

    def format_of(self, param: Parameter) -> WireFormat:
        return self.route.format_of(param)

    def dtype_of(self, param: Parameter) -> torch.dtype:
        return sharded.shard_dtype(param)

    def is_exact(self, param: Parameter) -> bool:
        """Whether a parameter arrives with every bit."""
        return isinstance(self.format_of(param), UnquantizedFormat)

    def sent_as_operand(self, param: Parameter) -> bool:
        """Whether the gathered bytes of a parameter are a GEMM operand."""
        route = self.route
        format_agrees = self.format_of(param) is route.session.formats.weights
        return param in route.gemm_weights and format_agrees and not self.persistent

    @abstractmethod
    def bytes_in(self, wire_format: WireFormat, param: Parameter) -> float:
        """Bytes that a rank sends of a parameter in a format, on average."""

    def bytes_of(self, param: Parameter) -> float:
        """Bytes that a rank sends of a parameter, on average."""
        codes = SharedScaleFormat(WIRE_FORMAT)
        return self.bytes_in(codes if self.sent_as_operand(param) else self.format_of(param), param)

    # -- a gather, in the order of these -----------------------------------------------------------------------------

    @property
    def shards_are_values(self) -> bool:
        """Whether there is nothing to gather: one rank (so nothing is rounded), nothing offloaded."""
        return self.route.world_size == 1 and not any(sharded.shard(p).device != self.route.device for p in self.params)

    @abstractmethod
    def lay_out(self) -> None:
        """Make the layout; it is made again when parameters were cast."""

    def prepare(self) -> bool:
        """Do work on the stream of the weights before a gather; returns whether shards were written."""
        return False

    def stored_payload(self) -> Tensor | None:
        """The stored bytes, if they are already the first hops' result; None if the hops are needed."""
        return None

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes that the first hops bring."""

    @property
    @abstractmethod
    def gathered_bytes(self) -> int:
        """Bytes that the last hop brings."""

    @abstractmethod
    def first_hops(self, held: Tensor) -> list[dist.Work]:
        """Encode this rank's shards and start the hops up to the secondary shard; their result is `held`."""

    @abstractmethod
    def last_hop(self, held: Tensor, gathered: Tensor) -> list[dist.Work]:
        """Start the last hop."""

    @abstractmethod
    def decode(self, gathered: Tensor) -> Arrived:
        """Decode values and operands from the last hop's result."""

    def params_in_codes(self) -> list[Parameter]:
        """Parameters whose values are decoded from codes that can be kept (generation/codes.py)."""
        return []

    def wait_for(self, works: Iterable[dist.Work]) -> None:
        """Let the current stream (on a CPU: the host) wait for hops."""
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise named(error, self.names) from error

    def changed(self, by_step: bool = False) -> None:
        """The weights were written (`by_step`: by the optimizer), so drop all that was derived from them."""
        self.secondary_is_current = False
        self.copy_bill.clear()
        self.payload = None
        self.difference.changed(by_step)

    def put_aside(self) -> None:
        """Another engine attaches the parameters: drop all that a gather can bring again."""
        self.difference.forget()
        self.drop_copy()
        self.payload = None

    def drop_copy(self) -> None:
        """Free the secondary shard."""
        self.secondary, self.secondary_is_current = None, False
        self.copy_bill.clear()


UnitClassOf = Callable[[Storage, Sequence[Parameter]], type[Unit]]


def build_units(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    granularity: str,
    storages: Sequence[Storage],
    apart: Mapping[nn.Module, UnitClassOf] = MappingProxyType({}),
) -> list[Unit]:
    """Cut all ZeRO-3 parameters of `model` into units; each parameter is in the first of `storages` that takes it.

    Frozen parameters never share a unit with trained ones, because their copies stay valid when an optimizer steps.
    Neither do parameters of two storages. Otherwise parameters that stay gathered between steps form one unit, and the
    other parameters of each block (and z3 leaf module) form one. Outside blocks, and at granularity "module", each
    module is a unit; at "parameter" each parameter is. A parameter that modules share belongs to the first of them.

    `apart`: leaf modules whose parameters form units of their own, also inside of blocks; functions choose the classes.
    """
    taken: set[int] = set()

    def untaken(params: Iterable[Parameter]) -> list[Parameter]:
        mine = []
        for param in params:
            if sharded.key(param) not in taken:
                taken.add(sharded.key(param))
                mine.append(param)
        return mine

    def storage_of(param: Parameter) -> Storage:
        return next(storage for storage in storages if storage.takes(param))

    units: list[Unit] = []

    def add(params: list[Parameter], persistent: bool = False, class_of: UnitClassOf | None = None) -> None:
        alone, groups = granularity == "parameter" and not persistent, {}
        for param in params:
            key = (len(groups), 0) if alone else (storages.index(storage_of(param)), param.requires_grad)
            groups.setdefault(key, []).append(param)
        for _, members in sorted(groups.items(), key=lambda group: group[0]):
            storage = storage_of(members[0])
            unit_class = class_of(storage, members) if class_of else storage.unit_class
            units.append(unit_class(members, storage, persistent))

    whole = {id(block) for block in blocks}

    def visit(module: nn.Module) -> None:
        if id(module) in whole or sharded.is_leaf(module):
            theirs = [(untaken(each.parameters()), apart[each]) for each in module.modules() if each in apart]
            add(untaken(module.parameters()))
            for params, class_of in theirs:
                add(params, class_of=class_of)
            return
        add(untaken(module.parameters(recurse=False)))
        for child in module.children():
            visit(child)

    add(untaken(p for p in model.parameters() if sharded.stays(p)), persistent=True)
    visit(model)
    names = {id(param): name for name, param in model.named_parameters()}
    for unit in units:
        unit.names = [names[id(param)] for param in unit.params]
    return units
