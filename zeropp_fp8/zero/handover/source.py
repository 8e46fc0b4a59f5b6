"""The weights of a training engine as named tensors, a block of the model at a time, for an engine that generates.

Every rank iterates, because every rank takes part in the gathers; each gets all tensors. While a block's tensors are
handed out, that block is there and no other. The interface is that of vLLM's `WeightSource`
(docs.vllm.ai/en/latest/training/weight_transfer/base): `metadata()` declares, without a gather, what iterating yields.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zeropp_fp8.comm.lanes import on_one_stream
from zeropp_fp8.comm.ledger import OUTSIDE
from zeropp_fp8.compute.products import GATHERED_OPERAND
from zeropp_fp8.zero.export.lockstep import Lockstep
from zeropp_fp8.zero.export.weights import Part, Weight, base_model, buffers, gathered, groups, tensors
from zeropp_fp8.zero.frozen.store import stored_weight, value_dtype
from zeropp_fp8.zero.gather.adopted import STATE
from zeropp_fp8.zero.gather.blocks import find_blocks
from zeropp_fp8.zero.gather.gatherer import Gatherer
from zeropp_fp8.zero.handover.float8 import Float8Weights
from zeropp_fp8.zero.holders import engine_of

_NAME = "WeightSource"
WEIGHTS = ("merged", "base", "adapters")
FORMATS = ("none", "fp8")


class ParamMeta(NamedTuple):
    """What is known of a tensor before it is there; vLLM's fields."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class _Group:
    """What is there at the same time.

    Attributes:
        params: gathered with every bit; `read` makes tensors of their values, by id.
        operands: (name, weight) of those that are gathered as training computes with them, to go as FP8 codes.
        also: what else its tensors are made of, equal for as long as that is the same.
    """

    params: list[Parameter]
    read: Callable[[dict[int, Tensor]], Iterator[Weight]]
    operands: list[tuple[str, Parameter]] = field(default_factory=list)
    also: tuple = ()


class WeightSource:
    """Named tensors of a DeepSpeed engine with the plugin, anew at each iteration.

    Args:
        engine: a DeepSpeed engine with the plugin active, its module, or a Trainer that has begun to train.
        weights: "merged": the whole model under the names of its checkpoint, PEFT's active adapters merged in fp32 and
            rounded once. "base": the same without adapters. "adapters": these alone, named as PEFT saves them.
        format: "none": in the dtypes that they have in training, every bit. "fp8": weights of linear layers as codes
            with scales (float8.py), everything else as with "none". What training multiplies as FP8 codes that travel
            or rest is handed over as these codes, rounded once; what was merged is rounded from fp32.
        only_changed: leave out blocks of which nothing was written since they were last handed over (all of a block
            goes if anything in it has changed: engines load joined layers as a whole). Blocks with buffers go always.

    Raises:
        ValueError: an engine without the plugin, another `weights` or `format`, or adapters that cannot be had so.
    """

    def __init__(self, engine, weights: str = "merged", format: str = "none", only_changed: bool = False) -> None:
        for name, value, known in (("weights", weights, WEIGHTS), ("format", format, FORMATS)):
            if value not in known:
                raise ValueError(f"{_NAME}: {name} is one of {', '.join(known)}, not {value!r}")
        if weights == "adapters" and format != "none":
            raise ValueError(f'{_NAME}: adapters are handed over as they are: leave format "none"')
        engine = engine_of(engine, _NAME)
        offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
        self._gatherer: Gatherer = offload.gatherer
        self._module, self._weights, self._only_changed = engine.module, weights, only_changed
        self._model = engine.module if weights == "adapters" else base_model(engine.module, _NAME)
        self._float8 = None
        if format == "fp8":
            session = self._gatherer.session
            parts = list(itertools.chain.from_iterable(groups(self._model)))
            self._float8 = Float8Weights(parts, session.conversion, session.config.compute.skip_modules)
        self._handed_over: dict[int, tuple] = {}  # by group: what it was made of, and when that had been written

    def quantization_config(self) -> dict:
        """What an engine's config.json needs to load this source's FP8 codes.

        Raises:
            ValueError: the source gives no codes.
        """
        if self._float8 is None:
            raise ValueError(f'{_NAME}: only with format="fp8" there is a quantization_config')
        return self._float8.quantization_config()

    def forget(self) -> None:
        """Take nothing for handed over: all is due again."""
        self._handed_over.clear()

    # -- vLLM's two channels -----------------------------------------------------------------------------------------

    def metadata(self) -> list[ParamMeta]:
        """What the next iteration yields, in its order. No communication."""
        found = []
        for _, group, _ in self._due():
            values = {id(p): torch.empty(p.ds_shape, dtype=value_dtype(p), device="meta") for p in group.params}
            named = [self._encoded(weight) for weight in group.read(values)]
            for name, param in group.operands:
                named.append(self._float8.encode(name, torch.empty(param.ds_shape, device="meta")))
            found += [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in itertools.chain.from_iterable(named)]
        return found

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor on this rank's device). Collective: to be iterated to its end on every rank, between steps.

        Who stops before the end goes on gathering for the others, when the iterator is closed, and they raise. The
        tensor belongs to training: it is not to be written to.

        Everything is made on the stream that is current here. Who asks for the next tensor on another one, as vLLM
        does, has it wait.

        Raises:
            RuntimeError: a rank has failed, or stopped early; on every rank, after all is gathered.
        """
        tensors = self._iterate(wanted=True)
        device = self._gatherer.device
        return on_one_stream(tensors, torch.cuda.current_stream(device)) if device.type == "cuda" else tensors

    def take_part(self) -> Iterator[tuple[str, Tensor]]:
        """What others' iterations need of this rank, where its tensors are not wanted: it gathers, and yields none."""
        return self._iterate(wanted=False)

    def _iterate(self, wanted: bool) -> Iterator[tuple[str, Tensor]]:
        if any(unit.active_modules for unit in self._gatherer.units_of(self._gatherer.adopted.values())):
            raise RuntimeError(f"{_NAME}: a pass of the engine is under way, or has ended with an error")
        lockstep, due, at_end = (
            Lockstep("the hand-over of weights", here=wanted),
            deque(self._due()),
            dict(self._handed_over),
        )
        try:
            while due:
                number, group, made_of = due.popleft()
                at_end[number] = made_of
                yield from self._handed_out(group, lockstep)
        except GeneratorExit:
            lockstep.error = lockstep.error or RuntimeError("the iteration was ended before the last tensor")
            for _, group, _ in due:
                for _ in self._handed_out(group, lockstep):
                    pass
            lockstep.failures()
            raise
        lockstep.raise_everywhere()
        self._handed_over = at_end

    # -- a group -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _handed_out(self, group: _Group, lockstep: Lockstep) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a group; none after this rank has failed. Collective, before the first of them."""
        with self._as_computed([param for _, param in group.operands]), gathered(group.params) as values:
            weights = group.read(values)
            while (weight := lockstep.call(next, weights, None)) is not None:
                yield from lockstep.call(self._encoded, weight) or ()
            for name, param in group.operands:
                yield from lockstep.call(self._codes, name, param) or ()

    @contextlib.contextmanager
    def _as_computed(self, params: list[Parameter]) -> Iterator[None]:
        """With parameters as training computes with them. Collective."""
        gatherer = self._gatherer
        idle = [unit for unit in gatherer.units_of(params) if not unit.live]
        with gatherer.session.ledger.counting(OUTSIDE):
            gatherer.gather_now(params)
        try:
            yield
        finally:
            for unit in idle:
                getattr(unit.params[0], STATE).owner.release(unit)  # a later engine may have the model

    def _encoded(self, weight: Weight) -> list[tuple[str, Tensor]]:
        if self._float8 is not None and weight.module in self._float8 and weight.tensor.dim() == 2:
            return self._float8.encode(weight.name, weight.tensor)
        return [(weight.name, weight.rounded())]

    def _codes(self, name: str, param: Parameter) -> list[tuple[str, Tensor]]:
        operand = param.__dict__.get(GATHERED_OPERAND)
        if operand is None:  # one rank, to which nothing travels, or stored in another format
            return self._float8.encode(name, param.data)
        return self._float8.of_operand(name, operand)

    # -- which there are ---------------------------------------------------------------------------------------------

    def _due(self) -> list[tuple[int, _Group, tuple]]:
        """(number, group, what it is made of, and when that was written) of what the next iteration hands out."""
        if not self._gatherer.adopted:
            raise RuntimeError(f"{_NAME}: its engine was destroyed; make a source of the engine that has the model now")
        of_adapters = self._weights == "adapters"
        found = []
        for number, group in enumerate(self._adapter_groups() if of_adapters else self._model_groups()):
            params = [*group.params, *(param for _, param in group.operands)]
            made_of = *((id(param), self._gatherer.unit_of(param).writes) for param in params), *group.also
            if not self._only_changed or self._handed_over.get(number) != made_of:
                found.append((number, group, made_of))
        return found

    def _model_groups(self) -> Iterator[_Group]:
        """Blocks, and modules outside of them."""
        if self._weights == "base" and any(getattr(m, "merged_adapters", None) for m in self._model.modules()):
            raise ValueError(f'{_NAME}: adapters are merged into the weights: unmerge them, or use weights="merged"')
        for parts in groups(self._model, find_blocks(self._model)):
            if self._weights == "base":
                parts = [self._without_adapter(part) for part in parts]
            exact, operands = [], []
            for part in parts:
                kept = [(key, param) for key, param in part.params if not self._goes_as_operand(part, param)]
                operands += [(part.prefix + key, p) for key, p in part.params if self._goes_as_operand(part, p)]
                exact.append(part._replace(params=kept))
            params = [param for part in exact for _, param in part.params]
            yield _Group(params, _reader(exact), operands, _also(parts))

    @staticmethod
    def _without_adapter(part: Part) -> Part:
        return Part(part.prefix, part.inner, list(part.inner.named_parameters())) if part.is_adapter else part

    def _goes_as_operand(self, part: Part, param: Parameter) -> bool:
        """Whether a weight goes as the codes that training multiplies, if it multiplies codes."""
        if self._float8 is None or part.is_adapter or part.module not in self._float8 or len(param.ds_shape) != 2:
            return False
        return stored_weight(param) is not None or self._gatherer.unit_of(param).travels_as_operand(param)

    def _adapter_groups(self) -> Iterator[_Group]:
        """The active adapter's parameters, of each block together."""
        peft_names = self._peft_names()
        for parts in groups(self._model, find_blocks(self._model)):
            mine = [(peft_names[id(p)], p) for part in parts for _, p in part.params if id(p) in peft_names]
            if mine:
                yield _Group([param for _, param in mine], _reader_of_named(mine))

    def _peft_names(self) -> dict[int, str]:
        """The names that PEFT saves parameters by, by id."""
        if not hasattr(self._module, "peft_config"):
            raise ValueError(f'{_NAME}: weights="adapters" needs a PEFT model, this is a {type(self._module).__name__}')
        from peft import get_peft_model_state_dict

        params = dict(self._module.named_parameters())
        stand_ins = {name: torch.empty(p.ds_shape, device="meta") for name, p in params.items()}
        owners = {id(stand_ins[name]): param for name, param in params.items()}
        active = self._module.active_adapter
        if not isinstance(active, str):
            raise ValueError(f"{_NAME}: {len(active)} adapters are active; one can be handed over alone")
        saved = get_peft_model_state_dict(self._module, stand_ins, active, save_embedding_layers=False)
        made = [name for name, stand_in in saved.items() if id(stand_in) not in owners]
        if made:
            raise ValueError(
                f"{_NAME}: PEFT saves {made[0]} as something that is no parameter of the model; such adapters can be "
                'handed over with weights="merged"'
            )
        return {id(owners[id(stand_in)]): name for name, stand_in in saved.items()}


def _also(parts: list[Part]) -> tuple:
    """Of PEFT's layers which adapters are merged, and how much of each. Buffers are written by whoever likes to."""
    modules = [m for part in parts for m in (part.module.modules() if part.is_adapter else [part.module])]
    adapters = [
        (tuple(module.active_adapters), tuple(getattr(module, "scaling", {}).items()))
        for module in modules
        if hasattr(module, "active_adapters")
    ]
    has_buffers = any(True for module in modules for _ in buffers(module))
    return (*adapters, *([object()] if has_buffers else []))


def _reader(parts: list[Part]) -> Callable[[dict[int, Tensor]], Iterator[Weight]]:
    return lambda values: (weight for part in parts for weight in tensors(part, values))


def _reader_of_named(named: list[tuple[str, Parameter]]) -> Callable[[dict[int, Tensor]], Iterator[Weight]]:
    return lambda values: (Weight(n, values[id(p)], values[id(p)].dtype, nn.Identity()) for n, p in named)
