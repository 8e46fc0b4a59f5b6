"""The contents of a model to hand over: groups of tensors that are gathered together, and what these are made of.

A piece is what an engine is given whole or not at all. Engines join q, k and v (gate and up) in one matrix and load it
as a whole; no such matrix has parts in two children of a block (attention, MLP, each norm), so that these are pieces.
An adapter is one piece: who gets one knows that it takes the place of the one before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.formats.shapes import is_matrix
from zeropp_fp8.zero.export.weights import Part, Weight, buffers, groups, tensors
from zeropp_fp8.zero.frozen.store import stored_weight
from zeropp_fp8.zero.gather.attached import unit_of
from zeropp_fp8.zero.gather.blocks import find_blocks
from zeropp_fp8.zero.handover.float8 import Float8Weights

NAME = "WeightSource"
_ADAPTER = "the active adapter"  # the name of its piece; others are named by a prefix, which ends with a dot
_MERGED = 'can be handed over with weights="merged"'


@dataclass
class Group:
    """Tensors that are there at the same time.

    Attributes:
        params: gathered with every bit; `read` makes tensors of their values, by id.
        operands: (name, weight) of those that are gathered as training computes with them, to go as FP8 codes.
        made_of: of each piece in it what its tensors are made of, equal for as long as they are the same.
    """

    params: list[Parameter]
    read: Callable[[dict[int, Tensor]], Iterator[Weight]]
    operands: list[tuple[str, Parameter]] = field(default_factory=list)
    made_of: dict[str, tuple] = field(default_factory=dict)


class Contents:
    """The groups of a model.

    Args:
        module: of the engine; model: the same without PEFT's wrapper.
        kinds: of "merged", "base" and "adapters" those that are handed over.
        float8: which weights go as FP8 codes.
    """

    def __init__(
        self, module: nn.Module, model: nn.Module, kinds: tuple[str, ...], float8: Float8Weights | None
    ) -> None:
        self._module, self._model, self.kinds = module, model, kinds
        self._float8 = float8
        self._blocks = find_blocks(model)  # PEFT's wrapper has the same

    def but(self, known: Mapping[str, tuple]) -> Iterator[Group]:
        """All but the pieces that are made of what `known` says of them."""
        for kind in self.kinds:
            yield from self._adapter(known) if kind == "adapters" else self._of_model(kind == "base", known)

    def _made_of(self, parts: list[Part], params: list[Parameter]) -> tuple:
        """Parameters and when they were last written; which adapters are active, and how much of each. Buffers are
        written by whoever likes to."""
        modules = [m for part in parts for m in (part.module.modules() if part.is_adapter else [part.module])]
        adapters = [
            (tuple(module.active_adapters), tuple(getattr(module, "scaling", {}).items()))
            for module in modules
            if isinstance(getattr(type(module), "active_adapters", None), property)  # of transformers' it is a method
        ]
        has_buffers = any(True for module in modules for _ in buffers(module))
        written = [(id(param), unit_of(param).writes) for param in params]
        return (*written, *adapters, *([object()] if has_buffers else []))

    # -- the model ---------------------------------------------------------------------------------------------------

    def _of_model(self, base: bool, known: Mapping[str, tuple]) -> Iterator[Group]:
        """The groups of blocks, and of modules outside of them."""
        if base and any(getattr(m, "merged_adapters", None) for m in self._model.modules()):
            raise ValueError(f'{NAME}: adapters are merged into the weights: unmerge them, or use weights="merged"')
        child_of = {id(m): id(child) for block in self._blocks for child in block.children() for m in child.modules()}
        for parts in groups(self._model, self._blocks):
            pieces: dict[int, list[Part]] = {}
            for part in parts:
                pieces.setdefault(child_of.get(id(part.module), id(part.module)), []).append(part)
            due, made_of = [], {}
            for piece in pieces.values():
                piece = [_without_adapter(part) for part in piece] if base else piece
                now = self._made_of(piece, [param for part in piece for _, param in part.params])
                if known.get(piece[0].prefix) != now:
                    made_of[piece[0].prefix] = now
                    due += piece
            if due:
                yield self._group(due, made_of)

    def _group(self, parts: list[Part], made_of: dict[str, tuple]) -> Group:
        exact, operands = [], []
        for part in parts:
            kept = [(key, param) for key, param in part.params if not self._goes_as_operand(part, param)]
            operands += [(part.prefix + key, p) for key, p in part.params if self._goes_as_operand(part, p)]
            exact.append(part._replace(params=kept))
        params = [param for part in exact for _, param in part.params]
        return Group(params, lambda values: (w for part in exact for w in tensors(part, values)), operands, made_of)

    def _goes_as_operand(self, part: Part, param: Parameter) -> bool:
        """Whether a weight goes as the codes that training multiplies, if it multiplies codes."""
        if (
            self._float8 is None
            or part.is_adapter
            or part.module not in self._float8
            or not is_matrix(sharded.shape(param))
        ):
            return False
        return stored_weight(param) is not None or unit_of(param).travels_as_operand(param)

    # -- the active adapter ------------------------------------------------------------------------------------------

    def _adapter(self, known: Mapping[str, tuple]) -> Iterator[Group]:
        """Its parameters, of each block together: all, or none."""
        peft_names = self._peft_names()
        parts = groups(self._module, self._blocks)
        of_groups = [[p for part in group for _, p in part.params if id(p) in peft_names] for group in parts]
        layers = [part for part in chain.from_iterable(parts) if part.is_adapter]
        now = self._made_of(layers, list(chain.from_iterable(of_groups)))
        if known.get(_ADAPTER) == now:
            return
        for params in filter(None, of_groups):
            read = partial(_named, [(peft_names[id(param)], param) for param in params])
            yield Group(params, read, made_of={_ADAPTER: now})

    def _peft_names(self) -> dict[int, str]:
        """The names that PEFT saves parameters by, by id.

        Raises:
            ValueError: there is not one active adapter, or it is more than what PEFT would save of it.
        """
        if not hasattr(self._module, "peft_config"):
            raise ValueError(f'{NAME}: weights="adapters" needs a PEFT model, this is a {type(self._module).__name__}')
        from peft import get_peft_model_state_dict

        params = dict(self._module.named_parameters())
        stand_ins = {name: torch.empty(sharded.shape(p), device="meta") for name, p in params.items()}
        owners = {id(stand_ins[name]): param for name, param in params.items()}
        active_adapters = self._module.active_adapters  # `active_adapter` does not follow base_model.set_adapter
        if len(active_adapters) != 1:
            raise ValueError(
                f"{NAME}: {len(active_adapters)} adapters are active, one can be handed over alone; several {_MERGED}"
            )
        (active,) = active_adapters
        if self._module.peft_config[active].peft_type == "LORA":
            layers = [(n, m) for n, m in self._module.named_modules() if active in getattr(m, "lora_alpha", ())]
            for name, layer in layers:
                if not math.isclose(layer.scaling[active], _scale_of(layer, active)):
                    raise ValueError(
                        f"{NAME}: {name} has another scale for {active} than its configuration, which PEFT does not "
                        f"save; such an adapter {_MERGED}"
                    )
        saved = get_peft_model_state_dict(self._module, stand_ins, active, save_embedding_layers=False)
        made = [name for name, stand_in in saved.items() if id(stand_in) not in owners]
        if made:
            raise ValueError(
                f"{NAME}: PEFT saves {made[0]} as something that is no parameter of the model; such an adapter "
                f"{_MERGED}"
            )
        return {id(owners[id(stand_in)]): name for name, stand_in in saved.items()}


def _without_adapter(part: Part) -> Part:
    return Part(part.prefix, part.inner, list(part.inner.named_parameters())) if part.is_adapter else part


def _scale_of(layer: nn.Module, adapter: str) -> float:
    """The scale that a LoRA layer's configuration gives an adapter."""
    rank = layer.r[adapter]
    return layer.lora_alpha[adapter] / (math.sqrt(rank) if layer.use_rslora.get(adapter) else rank)


def _named(named: list[tuple[str, Parameter]], values: dict[int, Tensor]) -> Iterator[Weight]:
    return (Weight(name, values[id(p)], values[id(p)].dtype, nn.Identity()) for name, p in named)
