"""The weights of a training engine as named tensors, a block of the model at a time, for an engine that generates.

Every rank iterates, because every rank takes part in the gathers; each gets all tensors, and one block is there at a
time. The interface is that of vLLM's `WeightSource` (docs.vllm.ai/en/latest/training/weight_transfer/base).
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm.lanes import on_one_stream
from zeropp_fp8.comm.ledger import OUTSIDE
from zeropp_fp8.comm.reduce_scatter import slice_numel
from zeropp_fp8.compute.convert import routers
from zeropp_fp8.zero.export.lockstep import Lockstep
from zeropp_fp8.zero.export.weights import Weight, base_model, gathered, groups
from zeropp_fp8.zero.frozen.store import value_dtype
from zeropp_fp8.zero.gather.attached import units_of
from zeropp_fp8.zero.gather.gatherer import Gatherer
from zeropp_fp8.zero.handover.contents import NAME, Contents, Group
from zeropp_fp8.zero.handover.float8 import Float8Weights
from zeropp_fp8.zero.holders import engine_of

WEIGHTS = ("merged", "base", "adapters")
FORMATS = ("none", "fp8")


class ParamMeta(NamedTuple):
    """The facts about a tensor before it is there; vLLM's fields."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class OwnPart(NamedTuple):
    """This rank's part of a tensor: its elements in `ranges` of the flat tensor, one after the other."""

    name: str
    shape: torch.Size
    ranges: list[tuple[int, int]]  # (first element, how many)
    values: Tensor


class Parts(NamedTuple):
    """This rank's parts of the tensors of one group: its `number`, of how many groups."""

    of_tensors: list[OwnPart]
    number: int
    count: int


class WeightSource:
    """Named tensors of a DeepSpeed engine with the plugin, anew at each iteration.

    Args:
        engine: a DeepSpeed engine with the plugin active, its module, or a Trainer that has begun to train.
        weights: "merged": the whole model under the names of its state dict, PEFT's active adapters merged in fp32 and
            rounded once. "base": the same without adapters. "adapters": these alone, named as PEFT saves them.
        format: "none": in the dtypes that they have in training, every bit. "fp8": weights of linear layers as codes
            with scales (float8.py), adapters and everything else as with "none". What training multiplies as FP8 codes
            that are sent or stored is handed over as these codes, rounded once; what was merged is rounded from fp32.

    Raises:
        ValueError: an engine without the plugin, another `weights` or `format`, or adapters that cannot be had so.
    """

    def __init__(self, engine, weights: str = "merged", format: str = "none") -> None:
        for name, value, known in (("weights", weights, WEIGHTS), ("format", format, FORMATS)):
            if value not in known:
                raise ValueError(f"{NAME}: {name} is one of {', '.join(known)}, not {value!r}")
        if weights == "adapters" and format != "none":
            raise ValueError(f'{NAME}: adapters are handed over as they are: leave format "none"')
        engine = engine_of(engine, NAME)
        offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
        self._gatherer: Gatherer = offload.gatherer
        self.session = self._gatherer.session
        model = engine.module if weights == "adapters" else base_model(engine.module, NAME)
        self._float8 = None
        if format == "fp8":
            parts = list(itertools.chain.from_iterable(groups(model)))
            conversion = None if self.session.formats.fell_back else self.session.conversion
            self._float8 = Float8Weights(parts, conversion, self.session.config.compute.skip_modules, routers(model))
        self._contents = Contents(engine.module, model, weights, self._float8)
        self._by_shards = Contents(engine.module, model, weights, self._float8, self._gatherer.ownership.has)
        self.gives_adapters = weights == "adapters"

    def quantization_config(self) -> dict:
        """The entry with which an engine's config.json loads this source's FP8 codes.

        Raises:
            ValueError: the source gives no codes.
        """
        if self._float8 is None:
            raise ValueError(f'{NAME}: only with format="fp8" there is a quantization_config')
        return self._float8.quantization_config()

    # -- vLLM's two channels -----------------------------------------------------------------------------------------

    def metadata(self) -> list[ParamMeta]:
        """The tensors that the next iteration yields, in its order. No communication."""
        found = []
        for group in self._groups(self._contents):
            values = {id(p): torch.empty(sharded.shape(p), dtype=value_dtype(p), device="meta") for p in group.params}
            named = [self._encoded(weight) for weight in group.read(values)]
            for name, param in group.operands:
                named.append(self._float8.encode(name, torch.empty(sharded.shape(param), device="meta")))
            found += [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in itertools.chain.from_iterable(named)]
        return found

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor on this rank's device). Collective: to be iterated to its end on every rank, between steps.

        If you stop early, closing the iterator finishes the gathers; then all ranks raise. The tensor belongs to
        training: do not write to it. All is made on the stream that is current here; another stream on which the next
        tensor is asked for, as vLLM does, waits for it.

        Raises:
            RuntimeError: a rank has failed, or stopped early; on every rank, after all is gathered.
        """
        tensors = self._iterate(wanted=True)
        device = self._gatherer.device
        return on_one_stream(tensors, torch.cuda.current_stream(device)) if device.type == "cuda" else tensors

    def take_part(self) -> Iterator[tuple[str, Tensor]]:
        """Gather for the iterations of other ranks, and yield nothing here."""
        return self._iterate(wanted=False)

    def _iterate(self, wanted: bool) -> Iterator[tuple[str, Tensor]]:
        self._check_idle()
        lockstep = Lockstep("the hand-over of weights", here=wanted)
        due = deque(self._groups(self._contents))
        try:
            while due:
                yield from self._handed_out(due.popleft(), lockstep)
        except GeneratorExit:
            lockstep.error = lockstep.error or RuntimeError("the iteration was ended before the last tensor")
            for group in due:
                for _ in self._handed_out(group, lockstep):
                    pass
            lockstep.failures()
            raise
        lockstep.raise_everywhere()

    # -- handed.py: each rank's own part of all tensors ---------------------------------------------------------------

    def own_parts(self, lockstep: Lockstep) -> Iterator[Parts]:
        """This rank's part of every tensor, a group at a time, gathered only if it is not sent as it lies.

        Collective. A rank that has failed, which `lockstep` notes, continues for the others, without all of its parts.
        """
        self._check_idle()
        groups, buffers = self._groups(self._by_shards), self._by_shards.buffers()
        for number, group in enumerate(groups):
            tensors = self._handed_out(group, lockstep)
            parts = [lockstep.call(self._own_slice, name, tensor, name in buffers) for name, tensor in tensors]
            parts += [lockstep.call(self._own_shard, name, param) for name, param in group.shards]
            yield Parts(parts, number, len(groups))

    def _own_slice(self, name: str, tensor: Tensor, is_buffer: bool) -> OwnPart:
        """This rank's elements; a buffer is the first rank's alone, as in checkpoints: ranks may have other numbers."""
        topology = self.session.topology
        size = tensor.numel() if is_buffer else slice_numel(tensor.numel(), topology.world_size)
        own = tensor.reshape(-1)[topology.rank * size :][:size].clone()
        return OwnPart(name, tensor.shape, [(topology.rank * size, len(own))], own)

    def _own_shard(self, name: str, param: Parameter) -> OwnPart:
        placement = self.session.placement
        own = sharded.unpadded(param, placement.own_numel(param)).to(self._gatherer.device)
        return OwnPart(name, sharded.shape(param), placement.ranges(param), own)

    # -- a group -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _handed_out(self, group: Group, lockstep: Lockstep) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a group; none after this rank has failed. Collective, before the first of them."""
        with self._as_computed([param for _, param in group.operands]), gathered(group.params) as values:
            weights = group.read(values)
            while (weight := lockstep.call(next, weights, None)) is not None:
                yield from lockstep.call(self._encoded, weight) or ()
            for name, param in group.operands:
                yield from lockstep.call(self._codes, name, param) or ()

    @contextlib.contextmanager
    def _as_computed(self, params: list[Parameter]) -> Iterator[None]:
        """Let parameters be as training computes with them. Collective."""
        gatherer = self._gatherer
        idle = [unit for unit in units_of(params) if unit.missing]
        with torch.inference_mode(False), gatherer.session.ledger.counting(OUTSIDE):
            gatherer.gather_now(params)
        try:
            yield
        finally:
            with torch.inference_mode(False):  # what is left serves training
                for unit in idle:
                    sharded.known(unit.params[0]).wire.owner.release(unit)  # a later engine may have the model

    def _encoded(self, weight: Weight) -> list[tuple[str, Tensor]]:
        if self._float8 is not None and weight.module in self._float8 and weight.tensor.dim() == 2:
            return self._float8.encode(weight.name, weight.tensor)
        return [(weight.name, weight.rounded())]

    def _codes(self, name: str, param: Parameter) -> list[tuple[str, Tensor]]:
        operand = sharded.known(param).operand
        if operand is None:  # one rank, to which nothing is sent, or stored in another format
            return self._float8.encode(name, param.data)
        return self._float8.of_operand(name, operand)

    def _check_idle(self) -> None:
        if any(unit.active_modules for unit in units_of(self._gatherer.ownership.params.values())):
            raise RuntimeError(f"{NAME}: a pass of the engine is under way, or has ended with an error")

    def _groups(self, contents: Contents) -> list[Group]:
        if not self._gatherer.ownership.params:
            raise RuntimeError(f"{NAME}: its engine was destroyed; make a source of the engine that has the model now")
        return list(contents)
