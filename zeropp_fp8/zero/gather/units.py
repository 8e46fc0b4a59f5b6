"""The units in which parameters are gathered, decoded and released together: one message a hop, one buffer, one call.

Stock ZeRO-3 pays Python for every parameter and every module; a 1.33B Llama then takes three times as long on NVLink as
the same model under FSDP2. A unit pays it once for a whole transformer block.

A unit knows how its parameters travel; who gathers it (gatherer.py) never asks. How it rests on the ranks is its kind:
slices of numbers (sliced.py), codes (frozen/unit.py), whole tensors on owners (owners/unit.py).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import z3_leaf_module
from torch import Tensor, nn
from torch.nn import Parameter

from zeropp_fp8.comm.lanes import BufferRing
from zeropp_fp8.comm.ledger import Bill
from zeropp_fp8.compute.operand import Float8Operand
from zeropp_fp8.formats import UnquantizedFormat, WireFormat

if TYPE_CHECKING:
    from zeropp_fp8.kernels.linear.quantized_weight import QuantizedWeight  # needs Triton, which is loaded on first use
    from zeropp_fp8.zero.gather.kinds import Kind

_writes = itertools.count()


@dataclass(eq=False)
class Flight:
    """Buffers and work of one gather under way.

    Attributes:
        held, first_work: what the first hops bring, flat uint8; the hops.
        brought: differences that these hops bring, flat uint8, until they are added to `held`.
        filled: the device event after which `held` is there, where it is not the hops that fill it.
        gathered, last_work: the last hop's result, or the buffer that it is being written to; the hop.
        asked_for: values are wanted. Otherwise only the secondary shard is being filled.
        taken: buffers for this gather alone, and the rings that they are from (None: memory of their own).
        bill: what it has sent outside of steps, the secondary shard apart.
    """

    held: Tensor | None = None
    first_work: list[dist.Work] = field(default_factory=list)
    brought: Tensor | None = None
    filled: torch.Event | None = None
    gathered: Tensor | None = None
    last_work: list[dist.Work] = field(default_factory=list)
    asked_for: bool = False
    taken: list[tuple[BufferRing | None, Tensor]] = field(default_factory=list)
    bill: Bill = field(default_factory=Bill)


class Arrived(NamedTuple):
    """What a gather has brought.

    Attributes:
        values: (parameter, its values, whether these are all there is of it).
        operands: (parameter, the operand of its product).
        lent: whether operands lie in the gathered bytes themselves.
    """

    values: list[tuple[Parameter, Tensor, bool]]
    operands: list[tuple[Parameter, Float8Operand]]
    lent: bool


class Unit(ABC):
    """Parameters that are gathered together.

    idle -> (first hops started ahead of need) -> in flight: asked for -> live: the parameters hold their values.

    Attributes:
        persistent: kept gathered between steps.
        route: the hops.
        numel: elements of all its parameters.
        flight: its gather under way.
        keeps_secondary: what the first hops bring stays, until the weights change (secondary.py decides).
        secondary, secondary_is_current: the secondary shard, flat uint8, and whether it is of the weights as they are.
        aside: what was held, as `held_state` says it, when another engine took the parameters over; until it is again.
        copy_bill, bill: what the secondary shard has cost outside of steps, and what the values have (comm/ledger.py).
        payload: this rank's encoded shards, where they are kept, until the weights change.
        lent: buffers in which operands of live parameters lie.
        live: the engine has brought the values that modules use, and not dropped them yet.
        looked_at: ds_id of parameters that GatheredParameters (or another caller of `gather_exactly`) has gathered and
            not dropped yet. The engine does not drop them either, and modules that use no others need no gather: a
            rank may run these alone.
        names: those of the parameters in the model.
        active_modules: those that are using the parameters now.
        writes: which of all writes to weights in this process its last one was; another one after each.
    """

    def __init__(self, params: list[Parameter], kind: Kind, persistent: bool = False) -> None:
        self.params, self.kind, self.persistent = params, kind, persistent
        self.route = kind.route
        self.numel = sum(p.ds_numel for p in params)
        self.flight: Flight | None = None
        self.keeps_secondary = False
        self.secondary: Tensor | None = None
        self.secondary_is_current = False
        self.aside: dict = {}
        self.copy_bill, self.bill = Bill(), Bill()
        self.payload: Tensor | None = None
        self.lent: list[tuple[BufferRing, Tensor]] = []
        self.live = False
        self.looked_at: set[int] = set()
        self.names: list[str] = []
        self.active_modules: set[int] = set()
        self.writes = next(_writes)

    @property
    def in_flight(self) -> bool:
        """Whether its values are on their way."""
        return self.flight is not None and self.flight.asked_for

    @property
    def missing(self) -> list[Parameter]:
        """Parameters that do not hold their values, whoever brings these."""
        return [param for param in self.params if param.ds_status != ZeroParamStatus.AVAILABLE]

    @property
    def is_billed(self) -> bool:
        """Whether it has sent something outside of steps that none has used."""
        return bool(self.bill or self.copy_bill)

    def leave(self) -> None:
        """Let no module be using the parameters."""
        self.active_modules.clear()
        for param in self.params:
            param.ds_active_sub_modules.clear()

    def forget_users(self) -> None:
        """Nobody uses the parameters, or looks at them, any more."""
        self.leave()
        self.looked_at.clear()

    @property
    def is_frozen(self) -> bool:
        """Whether nothing of it is trained, so that copies survive optimizer steps."""
        return not any(p.requires_grad for p in self.params)

    # -- what its parameters are on the wire ------------------------------------------------------------------------

    def format_of(self, param: Parameter) -> WireFormat:
        """The wire format of a parameter."""
        return self.route.format_of(param)

    def dtype_of(self, param: Parameter) -> torch.dtype:
        """The dtype of a parameter's values."""
        return param.ds_tensor.dtype

    def is_exact(self, param: Parameter) -> bool:
        """Whether what arrives is all there is of a parameter."""
        return isinstance(self.format_of(param), UnquantizedFormat)

    def travels_as_operand(self, param: Parameter) -> bool:
        """Whether the gathered bytes of a parameter are a GEMM operand."""
        route = self.route
        format_agrees = self.format_of(param) is route.session.weight_format
        return param in route.gemm_weights and format_agrees and not self.persistent

    @abstractmethod
    def bytes_of(self, param: Parameter) -> float:
        """Bytes that a rank sends of a parameter, on average."""

    def first_bytes_of(self, param: Parameter) -> float:
        """The same on the hops up to the secondary shard, in a step that is not the first."""
        return self.bytes_of(param)

    # -- a gather, in the order of these -----------------------------------------------------------------------------

    @property
    def shards_are_values(self) -> bool:
        """Whether there is nothing to gather: one rank, nothing rounded, nothing offloaded."""
        return self.route.world_size == 1 and not any(p.ds_tensor.device != self.route.device for p in self.params)

    @abstractmethod
    def lay_out(self) -> None:
        """Know where everything lies; made again when parameters were cast."""

    def forget_layout(self) -> None:
        """Formats have changed: everything lies elsewhere from the next gather on."""

    def prepare(self) -> bool:
        """What is to be done on the stream of the weights before a gather; whether shards were written."""
        return False

    def at_rest(self) -> Tensor | None:
        """What rests and is what the first hops would bring; None where they have something to do."""
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
        """Encode this rank's shards and start the hops up to the secondary shard, whose result is `held`."""

    @abstractmethod
    def last_hop(self, held: Tensor, gathered: Tensor) -> list[dist.Work]:
        """Start the last hop."""

    @abstractmethod
    def decode(self, gathered: Tensor) -> Arrived:
        """Values and operands, out of what the last hop brought."""

    def wait_for(self, works: Iterable[dist.Work]) -> None:
        """The current stream (on a CPU: the host) waits for hops.

        Raises:
            RuntimeError: the backend's own, which names the parameters besides.
        """
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._named(error) from error

    def refresh_scales(self) -> None:
        """Find the scales of weights that travel as operands, if they are not known; raises what `wait_for` does."""
        try:
            self.route.gemm_weights.refresh_scales()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self._named(error) from error

    def _named(self, error: RuntimeError) -> RuntimeError:
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return type(error)(
            f"{error}\nzeropp_fp8: this rank was waiting for parameters, {self.names[0]}{more}. If no other rank has "
            "failed, some do not run the module that uses these: run it on all ranks, or, to run it on some only, "
            "gather all of its parameters on all ranks before, with deepspeed.zero.GatheredParameters"
        )

    def changed(self, by_step: bool = False) -> None:
        """The weights were written, `by_step` of the optimizer: what was derived from them is stale."""
        self.secondary_is_current = False
        self.copy_bill.clear()
        self.payload = None
        self.writes = next(_writes)

    def put_aside(self) -> None:
        """Another engine takes the parameters over: drop what can be made again as it was, and no more of it."""
        self.secondary, self.secondary_is_current = None, False
        self.copy_bill.clear()
        self.payload = None

    # -- differences to what is held (differing.py); a unit that has none brings all of itself -----------------------

    @property
    def brings_differences(self) -> bool:
        """Whether the first hops are about to bring differences to what is held; else all of it (`first_hops`).

        The same on all ranks that exchange them.
        """
        return False

    def held_state(self) -> dict:
        """What training depends on of what is held, while no gather is under way: empty, or `hold_again` needs it."""
        return {}

    def continue_from(self, state: dict) -> None:
        """Weights have been loaded; `state` is what `held_state` was then."""

    def hold_again(self, state: dict, held: Tensor) -> list[dist.Work]:
        """Fill `held` with what was held when `state` was taken. Collective among the ranks of the first hops."""
        raise NotImplementedError(f"{type(self).__name__} holds nothing")

    def can_hold(self, state: dict) -> bool:
        """Whether a state is of a unit like this one. The same on all ranks."""
        return False

    def expect_large_step(self) -> None:
        """The next step will change it by more than a step does. To be called on all ranks."""

    # -- parameters that somebody else may have written to -----------------------------------------------------------

    def check_usable(self, params: Iterable[Parameter]) -> None:
        """Raise RuntimeError where a parameter may not be computed with."""

    def check_untouched(self, params: Iterable[Parameter]) -> None:
        """Raise RuntimeError where a parameter was written, which would be lost."""

    def note(self, params: Iterable[Parameter]) -> None:
        """The values of parameters were put there, or dropped, by the plugin."""

    # -- codes, for who keeps them and multiplies with them (generation/) ---------------------------------------------

    def params_in_codes(self) -> list[Parameter]:
        """Parameters whose values all come out of codes that can be kept."""
        return []

    def codes_in(self, gathered: Tensor) -> Tensor:
        """uint8 [ranks, row bytes]: the payloads of all ranks."""
        raise NotImplementedError(f"{type(self).__name__} has no codes")

    def decode_codes(self, codes: Tensor) -> dict[int, Tensor]:
        """The values of its parameters, by id(parameter), out of `codes_in`."""
        raise NotImplementedError(f"{type(self).__name__} has no codes")

    def quantized_weight(self, param: Parameter, codes: Tensor) -> QuantizedWeight | None:
        """What `quantized_linear` multiplies with, of a parameter in `codes`; None where it cannot."""
        raise NotImplementedError(f"{type(self).__name__} has no codes")


def build_units(model: nn.Module, blocks: Sequence[nn.Module], granularity: str, kinds: Sequence[Kind]) -> list[Unit]:
    """Cut all ZeRO-3 parameters of `model` into units, each of the first of `kinds` that takes it.

    Frozen parameters never share a unit with trained ones: copies of them stay valid when an optimizer steps. Neither
    do parameters of two kinds. But for that, those that stay gathered between steps form one unit, and so do the others
    of each block (and each z3 leaf module); what lies outside blocks is cut by module, and everything is at granularity
    "module"; at "parameter" each is its own. A parameter that several modules share belongs to the first.
    """
    taken: set[int] = set()

    def untaken(params: Iterable[Parameter]) -> list[Parameter]:
        mine = []
        for param in params:
            if param.ds_id not in taken:
                taken.add(param.ds_id)
                mine.append(param)
        return mine

    def kind_of(param: Parameter) -> Kind:
        return next(kind for kind in kinds if kind.takes(param))

    units: list[Unit] = []

    def add(params: list[Parameter], persistent: bool = False) -> None:
        if granularity == "parameter" and not persistent:
            units.extend(kind_of(param).unit([param]) for param in params)
            return
        for kind in kinds:
            mine = [param for param in params if kind_of(param) is kind]
            for trained in (False, True):
                members = [param for param in mine if param.requires_grad is trained]
                if members:
                    units.append(kind.unit(members, persistent))

    whole = {id(block) for block in blocks}

    def visit(module: nn.Module) -> None:
        if id(module) in whole or z3_leaf_module(module):
            add(untaken(module.parameters()))
            return
        add(untaken(module.parameters(recurse=False)))
        for child in module.children():
            visit(child)

    add(untaken(p for p in model.parameters() if p.ds_persist), persistent=True)
    visit(model)
    names = {id(param): name for name, param in model.named_parameters()}
    for unit in units:
        unit.names = [names[id(param)] for param in unit.params]
    return units
