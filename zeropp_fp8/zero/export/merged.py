"""Saving the whole model in its own dtype, adapters merged, in Hugging Face's format; no rank holds it whole.

Parameters are gathered one by one; those of a PEFT layer together, because merging needs them together. Rank 0 holds
what goes into the next file. PEFT does the merging, on a twin of its layer with fp32 values: every kind of adapter that
`merge_and_unload` knows is merged as it would, and the model that trains stays as it is.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import GatheredParameters
from torch import Tensor, nn
from torch.nn import Parameter

from zeropp_fp8.zero.export.shard_writer import ShardWriter, parse_size
from zeropp_fp8.zero.frozen.checkpoint import payload_to_save
from zeropp_fp8.zero.frozen.store import stored_weight
from zeropp_fp8.zero.holders import module_of

_UNLOAD = (
    "unload_and_optionally_merge_module"  # of PEFT's layers that leave something else behind than their base layer
)


@torch.no_grad()
def save_merged_16bit(engine_or_model, folder: str | Path, max_shard_size: int | str = "5GB") -> None:
    """See zeropp_fp8.save_merged_16bit."""
    max_bytes = parse_size(max_shard_size)
    held = module_of(engine_or_model, "save_merged_16bit")
    model = _base_model(held.module if isinstance(held, DeepSpeedEngine) else held)
    on_first = _OnFirstRank()
    writer = on_first.call(ShardWriter, folder, max_bytes)
    on_first.raise_everywhere()
    saved: set[int] = set()
    for name, module in _parts(model):
        prefix = name and f"{name}."
        if _is_adapter(module):
            params = list(module.parameters())
            with GatheredParameters(params, modifier_rank=None):
                values = {id(param): _without_adapter(param) for param in params}
                on_first.call(_add_merged, writer, prefix, module, values)
            continue
        for key, param in module.named_parameters(recurse=False):
            if id(param) not in saved:  # a tied one is saved under its first name
                saved.add(id(param))
                with GatheredParameters([param], modifier_rank=None):
                    on_first.call(ShardWriter.add, writer, prefix + key, param.data)
        on_first.call(_add_buffers, writer, prefix, module)
    on_first.call(ShardWriter.close, writer)
    on_first.call(_save_config, model, writer)
    on_first.raise_everywhere()


class _OnFirstRank:
    """Does things on rank 0 until one fails. The others must go on gathering with it, and then raise with it."""

    def __init__(self) -> None:
        self._is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._error: Exception | None = None

    def call(self, action: Callable, *arguments):
        """The action's result; None on other ranks, and after something has failed."""
        if not self._is_first or self._error is not None:
            return None
        try:
            return action(*arguments)
        except Exception as error:  # raised on every rank by raise_everywhere
            self._error = error
            return None

    def raise_everywhere(self) -> None:
        """Raise what failed. Collective."""
        box = [self._error and f"{type(self._error).__name__}: {self._error}"]
        if dist.is_initialized():
            dist.broadcast_object_list(box, 0)
        if box[0] is not None:
            raise RuntimeError(f"save_merged_16bit failed on rank 0: {box[0]}") from self._error


def _base_model(model: nn.Module) -> nn.Module:
    """The model inside PEFT's wrapper.

    Raises:
        ValueError: what PEFT adds cannot be merged.
    """
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        return model
    if model.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"save_merged_16bit: {model.active_peft_config.peft_type} adds tokens, which cannot be merged into "
            "weights; save the adapter with save_pretrained"
        )
    check = getattr(model.base_model, "_check_merge_allowed", None)
    if check is not None:
        check()
    return model.get_base_model()


def _is_adapter(module: nn.Module) -> bool:
    """Whether a module is one of PEFT's around a module of the model."""
    return hasattr(type(module), _UNLOAD) or ("base_layer" in module._modules and hasattr(type(module), "merge"))


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of every module, each once; nothing of what PEFT's modules contain."""
    seen: set[int] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        yield name, module
        if not _is_adapter(module):
            for key, child in module.named_children():
                yield from walk(f"{name}.{key}" if name else key, child)

    return walk("", model)


def _without_adapter(param: Parameter) -> Tensor:
    """A gathered parameter's values; of a stored one those from before an adapter was merged. Collective for those."""
    stored = stored_weight(param)
    if stored is None or stored.before_merge is None:
        return param.data
    own = payload_to_save(param).to(param.device)
    gathered = own.new_empty(dist.get_world_size(param.ds_process_group) * own.numel())
    dist.all_gather_into_tensor(gathered, own, group=param.ds_process_group)
    values = stored.wire_format.decode_rows(gathered.view(-1, own.numel()), stored.part_numel, stored.dtype).view(-1)
    return values[: param.ds_numel].view(param.ds_shape)


def _add_merged(writer: ShardWriter, prefix: str, module: nn.Module, values: dict[int, Tensor]) -> None:
    """Merge what an adapter adds, in fp32, and write what PEFT leaves in its place.

    Args:
        values: of the module's parameters by id.
    """
    dtypes: dict[int, torch.dtype] = {}
    twin = _twin(module, values, dtypes, {})
    for layer, its_twin in zip(module.modules(), twin.modules()):
        if getattr(layer, "merged_adapters", None):
            _merge_again(layer, its_twin)
    if hasattr(type(twin), _UNLOAD):
        left = getattr(twin, _UNLOAD)(merge=True, safe_merge=False, adapter_names=None)
    else:
        twin.merge(safe_merge=False)
        left = twin.get_base_layer()
    first = next(iter(dtypes.values()))
    for key, tensor in left.state_dict(keep_vars=True).items():
        is_value = isinstance(tensor, Parameter)  # else a buffer
        writer.add(prefix + key, tensor.to(dtypes.get(id(tensor), first)) if is_value else tensor)


def _merge_again(layer: nn.Module, twin: nn.Module) -> None:
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
            its_twin.data = param.data.to(torch.float32, copy=True)


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
            value = OrderedDict()
        twin.__dict__[key] = copy.copy(value) if isinstance(value, (list, dict, set)) else value
    twin.__dict__.update(_parameters=parameters, _modules=children)
    return twin


def _add_buffers(writer: ShardWriter, prefix: str, module: nn.Module) -> None:
    for key, buffer in module.named_buffers(recurse=False):
        if key not in module._non_persistent_buffers_set:
            writer.add(prefix + key, buffer)


def _save_config(model: nn.Module, writer: ShardWriter) -> None:
    """Write a transformers model's config.json and what it generates with; other models have none."""
    config = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", str(model.dtype).removeprefix("torch."))
    if _has_own_head(model, writer):
        config.tie_word_embeddings = False
    config.save_pretrained(writer.folder)
    if model.can_generate():
        model.generation_config.save_pretrained(writer.folder)


def _has_own_head(model: nn.Module, writer: ShardWriter) -> bool:
    """Whether embedding and head were saved as two matrices: PEFT may have trained one of a tied pair."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [next((n for n, m in model.named_modules() if m is end), None) for end in ends if end is not None]
    return len(names) == 2 and all(f"{name}.weight" in writer.file_of for name in names)
