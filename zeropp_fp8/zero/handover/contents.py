"""The contents of a model to hand over: groups of tensors that are gathered together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.formats.shapes import is_matrix
from zeropp_fp8.zero.export.weights import Part, Weight, groups, tensors
from zeropp_fp8.zero.frozen.store import stored_weight
from zeropp_fp8.zero.gather.attached import unit_of
from zeropp_fp8.zero.gather.blocks import find_blocks
from zeropp_fp8.zero.handover.float8 import Float8Weights

NAME = "WeightSource"
_MERGED = 'can be handed over with weights="merged"'


@dataclass
class Group:
    """Tensors that are there at the same time.

    Attributes:
        params: gathered with every bit; `read` makes tensors of their values, by id.
        operands: (name, weight) of those that are gathered as training computes with them, to be sent as FP8 codes.
        shards: (name, weight) of those that are sent as they lie on the ranks, if these are to be apart.
    """

    params: list[Parameter]
    read: Callable[[dict[int, Tensor]], Iterator[Weight]]
    operands: list[tuple[str, Parameter]] = field(default_factory=list)
    shards: list[tuple[str, Parameter]] = field(default_factory=list)


class Contents:
    """The groups of a model.

    Args:
        module: of the engine; model: the same without PEFT's wrapper.
        kind: "merged", "base" or "adapters", see WeightSource.
        float8: which weights are sent as FP8 codes.
        lies_here: whether a parameter lies on the ranks as its engine has placed it; those sent so are then apart.
    """

    def __init__(
        self,
        module: nn.Module,
        model: nn.Module,
        kind: str,
        float8: Float8Weights | None,
        lies_here: Callable[[Parameter], bool] = lambda param: False,
    ) -> None:
        self._module, self._model, self._kind = module, model, kind
        self._float8, self._lies_here = float8, lies_here
        self._blocks = find_blocks(model)  # PEFT's wrapper has the same

    def __iter__(self) -> Iterator[Group]:
        """All groups: of blocks, and of modules outside of them."""
        if self._kind == "adapters":
            yield from self._adapter()
            return
        base = self._kind == "base"
        if base and any(getattr(m, "merged_adapters", None) for m in self._model.modules()):
            raise ValueError(f'{NAME}: adapters are merged into the weights: unmerge them, or use weights="merged"')
        for parts in groups(self._model, self._blocks):
            yield self._group([_without_adapter(part) for part in parts] if base else parts)

    def buffers(self) -> set[str]:
        """The names of buffers, of which each rank has its own."""
        parts = (part for parts in groups(self._model, self._blocks) for part in parts)
        return {f"{p.prefix}{key}" for p in parts for key, _ in p.inner.named_buffers(recurse=p.is_adapter)}

    def _group(self, parts: list[Part]) -> Group:
        exact, operands, shards = [], [], []
        for part in parts:
            kept = []
            for key, param in part.params:
                named = part.prefix + key, param
                if self._sent_as_operand(part, param):
                    operands.append(named)
                elif self._sent_as_it_lies(part, param):
                    shards.append(named)
                else:
                    kept.append((key, param))
            exact.append(part._replace(params=kept))
        params = [param for part in exact for _, param in part.params]
        return Group(params, lambda values: (w for part in exact for w in tensors(part, values)), operands, shards)

    def _sent_as_operand(self, part: Part, param: Parameter) -> bool:
        """Whether a weight is sent as the codes that training multiplies, if it multiplies codes."""
        if not self._is_coded(part, param):
            return False
        return stored_weight(param) is not None or unit_of(param).sent_as_operand(param)

    def _sent_as_it_lies(self, part: Part, param: Parameter) -> bool:
        """Whether what a rank has of a weight is sent as it is there."""
        given = self._lies_here(param) and not sharded.stored_as_codes(param)
        return given and not part.is_adapter and not self._is_coded(part, param)

    def _is_coded(self, part: Part, param: Parameter) -> bool:
        """Whether a weight is sent as FP8 codes."""
        coded = self._float8 is not None and not part.is_adapter and part.module in self._float8
        return coded and is_matrix(sharded.shape(param))

    # -- the active adapter ------------------------------------------------------------------------------------------

    def _adapter(self) -> Iterator[Group]:
        """Its parameters, of each block together."""
        peft_names = self._peft_names()
        for parts in groups(self._module, self._blocks):
            params = [param for part in parts for _, param in part.params if id(param) in peft_names]
            if params:
                yield Group(params, partial(_named, [(peft_names[id(param)], param) for param in params]))

    def _peft_names(self) -> dict[int, str]:
        """The names that PEFT saves parameters by, by id."""
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
