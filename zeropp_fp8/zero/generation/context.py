"""Generation with the model of a ZeRO-3 engine, in the middle of training.

Inside the context weights stay on the ranks (resident.py), DeepSpeed's hooks around modules are off, LoRA adapters are
merged into the values that stay, and the model evaluates with its KV cache on. Compiled code is not used: each length
of the cache would be compiled anew. Shards and stored codes are never written, so afterwards all is as before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm.ledger import OUTSIDE
from zeropp_fp8.zero.generation.adapters import direct_forward
from zeropp_fp8.zero.generation.layers import expert_layers, layers_to_merge, linear_layers, lora_layers
from zeropp_fp8.zero.generation.replayed import STATIC, check_replayable, replayed
from zeropp_fp8.zero.generation.resident import ResidentCodes, ResidentValues
from zeropp_fp8.zero.holders import engine_of
from zeropp_fp8.zero.memory import free_bytes
from zeropp_fp8.zero.offload import ZeroppOffload

WEIGHTS = ("auto", "values", "codes", "sharded")
SHARE = 0.5  # of the free memory that "auto" gives to weights; the rest is for the KV cache and activations


@contextlib.contextmanager
def generation(engine, weights: str, merge_adapters: bool, graph: bool) -> Iterator[nn.Module]:
    """See zeropp_fp8.generation."""
    if weights not in WEIGHTS:
        raise ValueError(f"generation: weights is one of {', '.join(WEIGHTS)}, not {weights!r}")
    engine = engine_of(engine, "generation")
    offload: ZeroppOffload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    _check_idle(offload)
    gatherer, module = offload.gatherer, engine.module
    if graph:
        check_replayable(module, offload.session.device)
    layers = layers_to_merge(module) if merge_adapters else []
    written = [param for layer in layers for param in layer.get_base_layer().parameters(recurse=False)]
    values, codes = ResidentValues(gatherer, written), ResidentCodes(gatherer, module)
    chosen = {"values": values, "codes": codes, "sharded": None}[_choose(weights, offload, values, codes)]
    if graph and chosen is None:
        raise ValueError(
            'generation: graph=True needs weights that stay on each rank, and "sharded" gathers them for each token: '
            "leave it out, or make room for codes"
        )
    world = offload.session.topology.world_size
    with contextlib.ExitStack() as stack:
        stack.enter_context(_evaluating(module))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        defaults = {"use_cache": True, "synced_gpus": chosen is None and world > 1, **(STATIC if graph else {})}
        stack.enter_context(_generating(module, defaults))
        if defaults["synced_gpus"]:
            stack.enter_context(without_batches(module))
        offload.generating = True
        stack.callback(setattr, offload, "generating", False)
        if chosen is not None:
            gatherer.resident = True
            stack.callback(setattr, gatherer, "resident", False)
            stack.callback(torch.inference_mode(False)(chosen.release))  # what is left serves training
            with torch.inference_mode(False), torch.no_grad(), offload.session.ledger.counting(OUTSIDE):
                chosen.gather()
            stack.enter_context(_hooks_aside(offload))
            if chosen is values:
                stack.enter_context(_adapters_merged(layers))
            stack.enter_context(_direct_layers(module, chosen))
            if graph:
                stack.enter_context(replayed(module, chosen.forget))
            stack.callback(module.register_forward_pre_hook(_refuse_gradients).remove)
        yield module


def _check_idle(offload: ZeroppOffload) -> None:
    """No pass is under way, no other generation, no other engine has the weights, and each rank has all experts."""
    if any(sharded.experts_group(param) is not None for param in offload.module.parameters()):
        raise ValueError(
            'generation: with "expert_parallel" (AutoEP) every rank must run every forward: call the model\'s own '
            "generate with synced_gpus=True"
        )
    if offload.generating:
        raise RuntimeError("generation: the engine is inside zeropp_fp8.generation already")
    if offload.gatherer.ownership.elsewhere():
        raise RuntimeError(
            "generation: a later engine has the weights of this model; pass that one, or call its destroy() first"
        )
    if any(unit.active_modules for unit in offload.gatherer.units):
        raise RuntimeError(
            "generation: a forward or backward pass of the engine is under way, or has ended with an error; enter it "
            "between steps"
        )


# -- where weights stay ----------------------------------------------------------------------------------------------


def _choose(weights: str, offload: ZeroppOffload, values: ResidentValues, codes: ResidentCodes) -> str:
    """The choice that every rank has memory for. Collective."""
    if weights == "sharded":
        return weights
    needed = {"values": values.num_bytes(), "codes": codes.num_bytes()}
    session = offload.session
    free = torch.tensor([free_bytes(session.device, session.ranks_here)], dtype=torch.int64, device="cpu")
    free = free.to(session.device)
    dist.all_reduce(free, op=dist.ReduceOp.MIN, group=session.topology.group)
    least = int(free.item())
    if weights == "auto":
        weights = next((name for name, size in needed.items() if size <= SHARE * least), "sharded")
    elif needed[weights] > least:
        raise MemoryError(
            f'generation: weights="{weights}" takes {needed[weights] / 1e9:.2f} GB on each rank, and a rank has '
            f'{least / 1e9:.2f} GB; use "codes" or "sharded", or "auto"'
        )
    if session.topology.rank == 0 and offload.announced != weights:
        what = {
            "values": f"all weights stay on each rank while it generates, {needed['values'] / 1e9:.2f} GB",
            "codes": f"codes of weights stay on each rank while it generates, {needed['codes'] / 1e9:.2f} GB in all",
            "sharded": "no memory for the weights on each rank: they are gathered for every token",
        }
        print(f"zeropp_fp8: generation: {what[weights]}", flush=True)
    offload.announced = weights
    return weights


# -- what is different while it lasts ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """No dropout, no activation checkpointing, which would turn the KV cache off."""
    training = [m for m in module.modules() if m.training]
    module.eval()
    try:
        yield
    finally:
        for m in training:
            m.training = True


@contextlib.contextmanager
def _generating(module: nn.Module, defaults: dict[str, Any]) -> Iterator[None]:
    """`module.generate` with arguments that are these unless given."""
    generate = getattr(module, "generate", None)
    if generate is None:
        yield
        return

    @functools.wraps(generate)
    def with_defaults(*args, **kwargs):
        return generate(*args, **(defaults | kwargs))

    module.generate = with_defaults
    try:
        yield
    finally:
        del module.generate


@contextlib.contextmanager
def without_batches(module: nn.Module) -> Iterator[None]:
    """Refuse continuous batching while every token gathers weights: ranks would wait for one that has ended before."""

    def generate_batch(*_, **__):
        raise RuntimeError(
            "generate_batch ends on each rank with its own last token, while weights that are gathered for each token "
            'need all ranks to go on: let them stay, by weights="values" or "codes" (of TRL: "trl_generation", and '
            "ds3_gather_for_generation as it was), or call generate"
        )

    module.generate_batch = generate_batch
    try:
        yield
    finally:
        del module.generate_batch


@contextlib.contextmanager
def _hooks_aside(offload: ZeroppOffload) -> Iterator[None]:
    """Without DeepSpeed's hooks around modules. Others stay, those that are added meanwhile too."""
    for module in offload.module.modules():
        module._parameters._in_forward = False  # else reading a parameter that is not there would gather it
    before = {}
    for handle in (*offload.forward_hooks, *offload.backward_hooks):
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            before.setdefault(id(hooks), (hooks, dict(hooks)))
            del hooks[handle.id]
    remaining = {key: set(hooks) for key, (hooks, _) in before.items()}
    try:
        yield
    finally:
        for key, (hooks, held) in before.items():
            # What was taken off meanwhile stays off; what was added comes last, as it would have.
            gone = remaining[key] - hooks.keys()
            added = {number: hook for number, hook in hooks.items() if number not in held}
            hooks.clear()
            hooks.update((number, hook) for number, hook in held.items() if number not in gone)
            hooks.update(added)


def _refuse_gradients(*_) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "inside zeropp_fp8.generation the model has no gradients: put the pass under torch.no_grad(), or "
            "train after the context has ended"
        )


@contextlib.contextmanager
def _direct_layers(module: nn.Module, resident: ResidentValues | ResidentCodes) -> Iterator[None]:
    """Linear layers, LoRA around them and experts multiply with what is resident, not by DeepSpeed's function or in
    FP8."""
    forwards = {layer: resident.linear(layer) for layer in linear_layers(module)}
    forwards |= {layer: direct_forward(layer, resident.linear) for layer in lora_layers(module)}
    forwards |= {layer: resident.experts(layer) for layer in expert_layers(module)}
    forwards = {layer: forward for layer, forward in forwards.items() if forward is not None}
    try:
        for layer, forward in forwards.items():
            layer.forward = forward
        yield
    finally:
        for layer in forwards:
            layer.__dict__.pop("forward", None)


@contextlib.contextmanager
def _adapters_merged(layers: list[nn.Module]) -> Iterator[None]:
    """Active adapters merged by PEFT into the values that are resident, which are dropped afterwards.

    A layer without an adapter multiplies once where one with LoRA multiplies three times.
    """
    kept: list[tuple[Parameter, Tensor]] = []
    try:
        with torch.inference_mode(False), torch.no_grad():
            for layer in layers:
                for param in layer.get_base_layer().parameters(recurse=False):
                    _let_own_values(param, kept)
                layer.merge()
        yield
    finally:
        for layer in layers:
            layer.merged_adapters.clear()
        for param, values in kept:
            param.data = values


def _let_own_values(param: Parameter, kept: list[tuple[Parameter, Tensor]]) -> None:
    """A copy to merge into, where the values are the shard itself (one rank) or stay when generation ends.

    Biases do, and what somebody looks at.
    """
    is_shard = param.data.data_ptr() == sharded.shard(param).data_ptr()
    if is_shard or sharded.stays(param) or sharded.known(param).wire.unit.looked_at:
        kept.append((param, param.data))
        param.data = param.data.clone()
