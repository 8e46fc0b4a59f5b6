"""Put the collectives on a model of fully_shard, or refuse: the functions that a script calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from zeropp_fp8.config import SECTION, ConfigError, PluginConfig, resolve
from zeropp_fp8.fsdp2.collectives import CountedReduceScatter, QuantizedAllGather, QuantizedReduceScatter
from zeropp_fp8.fsdp2.host import Host, Replicas
from zeropp_fp8.fsdp2.replicas import MeanOverReplicas
from zeropp_fp8.fsdp2.unit import dtype_of
from zeropp_fp8.zero.session import Session

_HOST = "_zeropp_fp8_fsdp2"  # attribute of the root module
_HERE = {"enabled", "recipe", "topology", "weights", "secondary", "gradients", "report"}  # parts of the section
RECIPES = ("lossless", "zeropp", "zeropp-4bit", "zeropp-exact")


def _groups_of(model: nn.Module) -> Iterator[tuple[FSDPModule, Any]]:
    """(module, torch's parameter group) of all modules that fully_shard was called on."""
    known: set[int] = set()  # modules that were sharded as a list share a group
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13; before, there was at most one
        groups = [each for each in ([state._fsdp_param_group] if groups is None else groups) if each is not None]
        if len(groups) > 1:
            raise ConfigError(
                f"zeropp_fp8.fsdp2: {name or 'the model'} has {len(groups)} groups of parameters over several meshes; "
                "give them modules of their own"
            )
        if any(type(group._all_gather_comm) is not DefaultAllGather for group in groups):
            raise ConfigError(
                f"zeropp_fp8.fsdp2: {name or 'the model'} has other collectives already: leave out "
                "set_symm_mem_for_comm, set_allocate_memory_from_process_group_for_comm and set_custom_all_gather"
            )
        for param in (each.sharded_param for group in groups for each in group.fsdp_params):
            if hasattr(param._local_tensor, "fsdp_pre_all_gather"):
                raise ConfigError(
                    f"zeropp_fp8.fsdp2: {name or 'the model'} has parameters that bring a gather of their own (as "
                    "torchao's float8 with enable_fsdp_float8_all_gather); switch that off"
                )
        if groups and id(groups[0]) not in known:
            known.add(id(groups[0]))
            yield module, groups[0]


def _shared(groups: Sequence[tuple[FSDPModule, Any]]) -> tuple[dist.ProcessGroup, torch.device]:
    """The process group and the device of all modules."""
    if not groups:
        raise ConfigError(
            "zeropp_fp8.fsdp2: call torch's fully_shard on the model first, and apply() after it; parameters that are "
            "sharded otherwise (SimpleFSDP, DDP, tensor parallelism alone) have no collectives that can be replaced"
        )
    replicated = [g for _, g in groups if getattr(g.mesh_info, "replicate_mesh_size", 1) > 1]
    if replicated:
        raise ConfigError(
            "zeropp_fp8.fsdp2: the mesh has a dimension that replicates (HSDP), whose all-reduce between nodes torch "
            "does itself; give fully_shard a mesh of one dimension over all ranks, as weights stay in the node anyway, "
            'or mesh["shard"] alone, and apply() replicate=mesh["replicate"]'
        )
    shards = {id(group.mesh_info.shard_process_group): group.mesh_info.shard_process_group for _, group in groups}
    if len(shards) > 1:
        raise ConfigError("zeropp_fp8.fsdp2: modules are sharded over different meshes; give fully_shard one mesh")
    return next(iter(shards.values())), groups[0][1].device


def _replicas(mesh: DeviceMesh, shards: dist.ProcessGroup, device: torch.device) -> Replicas:
    shared = {} if mesh.ndim != 1 else set(mesh.mesh.tolist()) & set(dist.get_process_group_ranks(shards))
    if shared != {dist.get_rank()}:
        raise ConfigError(
            "zeropp_fp8.fsdp2: replicate must be a mesh of one dimension over ranks of different copies: "
            'mesh["replicate"] where fully_shard got mesh["shard"] of the same mesh'
        )
    return Replicas(mesh, device)


def apply(
    model: nn.Module,
    recipe: str = "zeropp",
    ranks_per_node: int | str = "detect",
    replicate: DeviceMesh | None = None,
    **section: Any,
) -> nn.Module:
    """Let a model of fully_shard gather its weights and reduce its gradients as a recipe says. Collective.

    Call it once, after `fully_shard` and before the first forward, on every rank.

    Args:
        model: fully_shard was called on it, and on its blocks.
        recipe: `lossless`, `zeropp`, `zeropp-4bit` or `zeropp-exact`.
        ranks_per_node: ranks that share a node; "detect": those on one host.
        replicate: a mesh of one dimension, the ranks with the same part of other copies of the model (HSDP); their
            gradients are averaged too. None: there is one copy.
        section: more fields, as in the ds_config's section: `weights={"block_size": 128}`.

    Returns:
        the model, as it was with `enabled=False`.

    Raises:
        ConfigError: the recipe or a field does not go with FSDP2, or the model with this; the same on every rank.
    """
    if getattr(model, _HOST, None) is not None:
        raise ConfigError("zeropp_fp8.fsdp2: apply() was called on this model before")
    if section.get("enabled") is False:
        return model
    groups = list(_groups_of(model))
    dtypes = {dtype_of(g, member) for _, g in groups for member in g.fsdp_params}
    section = {"recipe": recipe, "topology": {"ranks_per_node": ranks_per_node}, **section}
    config = _resolved(section, dtypes)
    if config.gradients.error_feedback and torch.float16 in dtypes:
        raise ConfigError(
            f'"{SECTION}.gradients.error_feedback": residuals of fp16 gradients are of the loss scale that was; set it '
            "to false, or compute in bfloat16"
        )
    group, device = _shared(groups)
    replicas = None if replicate is None else _replicas(replicate, group, device)
    host = Host(model, [of_module for _, of_module in groups], Session(config, group, device=device), replicas)
    for (module, _), unit in zip(groups, host.units):
        module.set_custom_all_gather(QuantizedAllGather(host, unit))
        if config.quantizes_gradients:
            reduction = QuantizedReduceScatter(host, unit, module)
            host.before_step[unit].append(reduction.earlier.check_finished)
            module.set_custom_reduce_scatter(reduction)
        else:
            module.set_custom_reduce_scatter(CountedReduceScatter(host))
        if replicas is not None:
            hook = MeanOverReplicas(host, replicas, unit, module)
            host.before_step[unit].append(hook.earlier.check_finished)
            module.set_all_reduce_hook(hook)
    object.__setattr__(model, _HOST, host)
    return model


def _resolved(section: dict[str, Any], dtypes: set[torch.dtype]) -> PluginConfig:
    """The settings of a section for a model that is gathered in these dtypes."""
    unknown = dtypes - {torch.float32, torch.bfloat16, torch.float16}
    if unknown:
        raise ConfigError(
            f"zeropp_fp8.fsdp2: parameters in {', '.join(sorted(map(str, unknown)))} would be gathered, not numbers of "
            "16 or 32 bits: give fully_shard an mp_policy whose param_dtype is of these, or, where they are no such "
            "numbers, ignored_params"
        )
    in_16_bits = any(dtype.itemsize == 2 for dtype in dtypes)
    recipe = section["recipe"]
    if recipe not in RECIPES:
        raise ConfigError(
            f"zeropp_fp8.fsdp2: recipe {recipe!r} is of ZeRO-3, or misspelt: recipes here are {', '.join(RECIPES)}"
        )
    ds_config = {"zero_optimization": {"stage": 3}, SECTION: section}
    try:
        config = resolve({**ds_config, "bf16": {"enabled": in_16_bits}})
    except ConfigError:
        resolve({**ds_config, "bf16": {"enabled": True}})  # another fault is told as it is
        raise ConfigError(
            f"zeropp_fp8.fsdp2: {recipe} as asked for sends weights in 16 bits, and these are in 32: give fully_shard "
            "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), or take zeropp"
        ) from None
    plain, gradients = PluginConfig(), config.gradients
    others = [name for name in type(config).model_fields if name not in _HERE]
    found = [name for name in others if getattr(config, name) != getattr(plain, name)]
    here = {"scales": "block", "store_format": "none", "accumulate_in": plain.gradients.accumulate_in}
    found += [f"gradients.{field}" for field, only in here.items() if getattr(gradients, field) != only]
    if found:
        raise ConfigError(
            f'"{SECTION}.{found[0]}" is of ZeRO-3, and not of FSDP2, where weights and gradients are sent in few bits; '
            f"recipes here are {', '.join(RECIPES)}"
        )
    return config


def host_of(model: nn.Module) -> Host:
    """The collectives of a model.

    Raises:
        ConfigError: apply() was not called on it.
    """
    host = getattr(model, _HOST, None)
    if host is None:
        raise ConfigError("zeropp_fp8.fsdp2: call apply() on this model first")
    return host


def wire_report(model: nn.Module, total: bool = False) -> dict:
    """Bytes on the wire per step, as `zeropp_fp8.wire_report` of an engine tells them."""
    host = host_of(model)
    host.end_step()
    return host.session.ledger.report(total)


def weights_changed(model: nn.Module) -> None:
    """Say on every rank that weights were written through `param.data`, which nothing tells.

    Steps of optimizers, writes to parameters and into a state dict, and the change to evaluation are seen without it.
    """
    host_of(model).weights_changed()
