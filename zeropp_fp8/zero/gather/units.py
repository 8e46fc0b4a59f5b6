"""The units in which parameters are gathered, decoded and released together: one message a hop, one buffer, one call.

Stock ZeRO-3 pays Python for every parameter and every module; a 1.33B Llama then takes three times as long on NVLink as
the same model under FSDP2. A unit pays it once for a whole transformer block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from deepspeed.utils import z3_leaf_module
from torch import Tensor, nn
from torch.nn import Parameter

from zeropp_fp8.comm.lanes import BufferRing
from zeropp_fp8.comm.payload import PayloadLayout
from zeropp_fp8.formats.base import align_up
from zeropp_fp8.zero.frozen.store import stored_weight, value_dtype

_PARAMETER_ALIGNMENT = 16  # bytes; kernels then read and write 16 at once


@dataclass(eq=False)
class GatherUnit:
    """Parameters that are gathered together, and how far their gather is.

    idle -> (first hops started ahead of need) -> in flight: asked for -> live: the parameters hold their values.
    """

    params: list[Parameter]
    persistent: bool = False  # kept gathered between steps
    layout: PayloadLayout | None = None  # of `packed`; made on first use: parameters must be partitioned by then
    signature: tuple = ()  # what the layout was made for
    packed: list[Parameter] = field(default_factory=list)  # those that are decoded from one payload a rank
    operands: list[Parameter] = field(default_factory=list)  # those whose gathered bytes are a GEMM operand
    regions: list[tuple[int, int]] = field(
        default_factory=list
    )  # (start, size) in a rank's bytes, of the payload first
    encoded_numels: list[int] = field(default_factory=list)  # of each packed shard, without padding

    first_work: list[dist.Work] = field(default_factory=list)  # hops before the secondary shard, under way
    held: Tensor | None = None  # their result, flat uint8 [ranks reached * row bytes] ...
    held_is_current: bool = False  # ... of the weights as they are now
    # This rank's encoded shards, uint8 [row bytes]: kept without a secondary shard, and where parameters rest as codes.
    payload: Tensor | None = None

    asked_for: bool = False  # its gather has been started; on a CPU perhaps only the first hops
    gathered: Tensor | None = None  # the last hop's result, or the buffer it is being written to
    last_work: list[dist.Work] = field(default_factory=list)

    lent: list[tuple[BufferRing, Tensor]] = field(default_factory=list)  # buffers in which operands lie

    live: bool = False
    active_modules: set[int] = field(default_factory=set)  # modules that are using the parameters now

    numel: int = 0  # elements of all its parameters
    is_stored: bool = False  # they rest as codes; all do or none does
    _places: list[tuple[torch.dtype, int, int, torch.Size] | None] = field(default_factory=list)
    _buffer_numels: dict[torch.dtype, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.numel = sum(p.ds_numel for p in self.params)
        self.is_stored = any(stored_weight(p) is not None for p in self.params)

    @property
    def in_flight(self) -> bool:
        """Whether its gather is under way."""
        return self.asked_for or self.gathered is not None

    @property
    def rank_bytes(self) -> int:
        """Bytes that each rank sends of this unit."""
        start, size = self.regions[-1]
        return align_up(start + size)

    def region(self, buffer: Tensor, index: int, ranks: int) -> Tensor:
        """uint8 [ranks, size]: region `index` of every rank in flat uint8 `buffer` [ranks * rank_bytes].

        Regions lie one after the other, each with all its ranks, so that the codes of a weight are one matrix.
        """
        start, size = self.regions[index]
        return buffer[start * ranks : (start + size) * ranks].view(ranks, size)

    def lay_out(
        self,
        layout: PayloadLayout,
        packed: list[Parameter],
        operands: dict[Parameter, int],
        signature: tuple,
        not_decoded: Sequence[int] = (),
    ) -> None:
        """Take over a payload layout of `packed`, and place these in a buffer a dtype, each aligned to 16 bytes.

        `operands`: the other parameters, and the bytes of a rank's slice of each. `not_decoded`: which of `packed` need
        no place.
        """
        self.layout, self.signature = layout, signature
        self.packed, self.operands = packed, list(operands)
        self.regions = [(0, layout.row_bytes)]
        for size in operands.values():
            self.regions.append((self.rank_bytes, size))
        self._places, self._buffer_numels = [], {}
        for index, param in enumerate(packed):
            if index in not_decoded:
                self._places.append(None)
                continue
            dtype = value_dtype(param)
            start = self._buffer_numels.get(dtype, 0)
            step = _PARAMETER_ALIGNMENT // dtype.itemsize
            self._buffer_numels[dtype] = start + -(-param.ds_numel // step) * step
            self._places.append((dtype, start, start + param.ds_numel, param.ds_shape))

    def empty_parameters(self, device: torch.device) -> list[Tensor | None]:
        """An uninitialized tensor in its shape for each packed parameter, all of a dtype in one buffer.

        None for those that are not decoded.
        """
        buffers = {d: torch.empty(numel, dtype=d, device=device) for d, numel in self._buffer_numels.items()}
        return [place and buffers[place[0]][place[1] : place[2]].view(place[3]) for place in self._places]


def build_units(model: nn.Module, blocks: Sequence[nn.Module], granularity: str) -> list[GatherUnit]:
    """Cut all ZeRO-3 parameters of `model` into units.

    Frozen parameters never share a unit with trained ones: copies of them stay valid when an optimizer steps. What
    rests as codes has units of its own, whose payload is what rests. Parameters that stay gathered between steps
    form one unit. Of the others each block (and each z3 leaf module) is one; what lies outside blocks is cut by
    module, and everything is at granularity "module"; at "parameter" each is its own. A parameter that several
    modules share belongs to the first.
    """
    taken: set[int] = set()

    def untaken(params: Iterable[Parameter]) -> list[Parameter]:
        mine = []
        for param in params:
            if param.ds_id not in taken:
                taken.add(param.ds_id)
                mine.append(param)
        return mine

    persistent = untaken(p for p in model.parameters() if p.ds_persist)
    units = [GatherUnit(persistent, persistent=True)] if persistent else []

    def add(params: list[Parameter]) -> None:
        stored = [p for p in params if stored_weight(p) is not None]
        frozen = [p for p in params if not p.requires_grad and stored_weight(p) is None]
        trained = [p for p in params if p.requires_grad]
        for members in [[p] for p in params] if granularity == "parameter" else [stored, frozen, trained]:
            if members:
                units.append(GatherUnit(members))

    whole = {id(block) for block in blocks}

    def visit(module: nn.Module) -> None:
        if id(module) in whole or z3_leaf_module(module):
            add(untaken(module.parameters()))
            return
        add(untaken(module.parameters(recurse=False)))
        for child in module.children():
            visit(child)

    visit(model)
    return units
