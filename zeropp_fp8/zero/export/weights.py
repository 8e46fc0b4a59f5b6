"""The weights of a model as its state dict names them, adapters merged, in groups that are gathered together.

PEFT does the merging, on a twin of its layer with fp32 values: every kind of adapter that `merge_and_unload` knows is
merged as it would, and the model that trains stays as it is.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.zero.frozen.checkpoint import payload_to_save
from zeropp_fp8.zero.frozen.store import stored_weight

_UNLOAD = (
    "unload_and_optionally_merge_module"  # of PEFT's layers that leave something else behind than their base layer
)


class Part(NamedTuple):
    """A module's own tensors, or those of a PEFT layer with all that is in it.

    Attributes:
        prefix: of their names.
        params: (name, parameter) of those that no earlier part has; of a PEFT layer all of them.
    """

    prefix: str
    module: nn.Module
    params: list[tuple[str, Parameter]]

    @property
    def is_adapter(self) -> bool:
        """Whether the module is one of PEFT's around a module of the model."""
        return hasattr(type(self.module), _UNLOAD) or _wraps(self.module)

    @property
    def inner(self) -> nn.Module:
        """The model's own module: in a PEFT layer the one that it is around."""
        if not self.is_adapter:
            return self.module
        base_layer = getattr(type(self.module), "get_base_layer", None)  # an instance may have that of what is in it
        return self.module.original_module if base_layer is None else base_layer(self.module)


class Weight(NamedTuple):
    """A named tensor: of a parameter that was merged in fp32, which is to be rounded to `dtype`; `module` has it."""

    name: str
    tensor: Tensor
    dtype: torch.dtype
    module: nn.Module

    def rounded(self) -> Tensor:
        """The tensor in its own dtype."""
        return self.tensor.to(self.dtype)


def _wraps(module: nn.Module) -> bool:
    return "base_layer" in module._modules and hasattr(type(module), "merge")


def base_model(model: nn.Module, caller: str) -> nn.Module:
    """The model inside PEFT's wrapper.

    Raises:
        ValueError: what PEFT adds cannot be merged, or no rank has all experts; `caller` is the name in the message.
    """
    if any(sharded.experts_group(param) is not None for param in model.parameters()):
        raise ValueError(
            f'{caller}: "expert_parallel" (AutoEP) deals experts out, and each rank would give its own alone'
        )
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        return model
    if model.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"{caller}: {model.active_peft_config.peft_type} adds tokens, which cannot be merged into "
            "weights; save the adapter with save_pretrained"
        )
    check = getattr(model.base_model, "_check_merge_allowed", None)
    if check is not None:
        check()
    return model.get_base_model()


def groups(model: nn.Module, blocks: Sequence[nn.Module] = ()) -> list[list[Part]]:
    """All tensors of a model, each once: those of a block are a group, and each module outside of blocks is one."""
    found: list[list[Part]] = []
    together, seen, taken = {id(block) for block in blocks}, set(), set()

    def walk(name: str, module: nn.Module, group: list[Part] | None) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        if group is None and id(module) in together:
            found.append(group := [])
        part = Part(name and f"{name}.", module, [])
        if part.is_adapter:
            part.params.extend(module.named_parameters())
        else:  # a tied one is taken under its first name
            own = module.named_parameters(recurse=False)
            part.params.extend((key, p) for key, p in own if not (id(p) in taken or taken.add(id(p))))
        if part.params or module.__dict__["_parameters"] or any(True for _ in buffers(module)):
            found.append([part]) if group is None else group.append(part)
        if not part.is_adapter:
            for key, child in module.named_children():
                walk(f"{name}.{key}" if name else key, child, group)

    walk("", model, None)
    return found


@contextlib.contextmanager
def gathered(params: Sequence[Parameter]) -> Iterator[dict[int, Tensor]]:
    """Every bit of parameters, by id; of stored ones from before an adapter was merged. Collective."""
    with sharded.gathered(list(params)):
        yield {id(param): _without_adapter(param) for param in params}


def _without_adapter(param: Parameter) -> Tensor:
    """A gathered parameter's values; of a stored one those from before an adapter was merged. Collective for those."""
    stored = stored_weight(param)
    if stored is None or stored.before_merge is None:
        return param.data
    own = payload_to_save(param).to(param.device)
    rows = own.new_empty(dist.get_world_size(sharded.group(param)) * own.numel())
    dist.all_gather_into_tensor(rows, own, group=sharded.group(param))
    values = stored.wire_format.decode_rows(rows.view(-1, own.numel()), stored.part_numel, stored.dtype).view(-1)
    return values[: sharded.numel(param)].view(sharded.shape(param))


def tensors(part: Part, values: dict[int, Tensor]) -> Iterator[Weight]:
    """The tensors of a part, its adapter merged, with `values` of its parameters by id."""
    if part.is_adapter:
        yield from _merged(part, values)
        return
    for key, param in part.params:
        value = values[id(param)]
        yield Weight(part.prefix + key, value, value.dtype, part.module)
    for key, buffer in buffers(part.module):
        yield Weight(part.prefix + key, buffer, buffer.dtype, part.module)


def buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for key, buffer in module.named_buffers(recurse=False):
        if key not in module._non_persistent_buffers_set:
            yield key, buffer


def _merged(part: Part, values: dict[int, Tensor]) -> Iterator[Weight]:
    """Merge what an adapter adds, in fp32, and take what PEFT leaves in its place."""
    module, dtypes = part.module, {}
    leaves_another = hasattr(type(module), _UNLOAD)
    if not leaves_another and all(values[id(param)].is_meta for _, param in part.params):
        left = _twin(part.inner, values, dtypes, {})  # merging changes numbers, of which there are none
    else:
        twin = _twin(module, values, dtypes, {})
        for layer, its_twin in zip(module.modules(), twin.modules()):
            if getattr(layer, "merged_adapters", None):
                _merge_again(layer, its_twin, values)
        if leaves_another:
            left = getattr(twin, _UNLOAD)(merge=True, safe_merge=False, adapter_names=None)
        else:
            twin.merge(safe_merge=False)
            left = twin.get_base_layer()
    first = next(iter(dtypes.values()))
    for key, tensor in left.state_dict(keep_vars=True).items():
        dtype = dtypes.get(id(tensor), first) if isinstance(tensor, Parameter) else tensor.dtype  # else a buffer
        yield Weight(part.prefix + key, tensor.detach(), dtype, part.inner)


def _merge_again(layer: nn.Module, twin: nn.Module, values: dict[int, Tensor]) -> None:
    """Merge into a twin what is merged into its layer, where the twin has the values from before that."""
    pairs = list(zip(layer.get_base_layer().parameters(), twin.get_base_layer().parameters()))
    from_before = [stored_weight(p) is not None and stored_weight(p).before_merge is not None for p, _ in pairs]
    if not any(from_before):
        return
    adapters = list(twin.merged_adapters)
    twin.merged_adapters.clear()
    twin.merge(safe_merge=False, adapter_names=adapters)
    for (param, its_twin), is_from_before in zip(pairs, from_before):
        if not is_from_before:  # a bias, which has its part of the adapter already
            its_twin.data = values[id(param)].to(torch.float32, copy=True)


def _twin(
    module: nn.Module, values: dict[int, Tensor], dtypes: dict[int, torch.dtype], made: dict[int, nn.Module]
) -> nn.Module:
    """A module with the same state but fp32 values, and without hooks; what is done to it does not reach `module`.

    `dtypes` gets the dtypes that the values had, by the id of the twin's parameter. `made`: twins by id of the module.
    """
    if id(module) in made:
        return made[id(module)]
    twin = made[id(module)] = type(module).__new__(type(module))
    parameters: dict[str, Parameter | None] = {}
    for key, param in module._parameters.items():
        parameters[key] = None
        if param is not None:
            value = values[id(param)]
            parameters[key] = Parameter(value.to(torch.float32, copy=True), requires_grad=False)
            dtypes[id(parameters[key])] = value.dtype
    children = {key: child and _twin(child, values, dtypes, made) for key, child in module._modules.items()}
    for key, value in module.__dict__.items():
        if "hooks" in key:
            twin.__dict__[key] = OrderedDict()
        else:
            twin.__dict__[key] = copy.copy(value) if isinstance(value, (list, dict, set)) else value
    twin.__dict__.update(_parameters=parameters, _modules=children)
    return twin
