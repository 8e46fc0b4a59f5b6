"""FP8 in DeepSpeed's sequence parallelism (Ulysses) and expert parallelism (AutoEP): exchanges of activations.

All of its all-to-alls call `dist.all_to_all_single` in deepspeed/sequence/layer.py. This module replaces the collective
itself, so layouts, uneven heads and overlapping stay DeepSpeed's code, and the functions on the paths to it, which know
whether a tensor is an activation or a gradient: DistributedAttention goes through _SeqAllToAll and single_all_to_all,
UlyssesSPAttentionHF through _dim_zero_all_to_all (until DeepSpeed 0.19.0 _DimZeroAllToAll), FPDT_Attention through
single_all_to_all. The all-gather of image patches in UlyssesSPViTAttention stays as it is.

Every exchange belongs to one engine. The process group does not tell which: the models of RLHF share it. So hooks on an
engine's modules set its exchange while their forward runs, also again for activation checkpointing (ActivationHooks);
where engines share modules, the one whose `forward` or `backward` was called has it (`exchanging`). The backward of an
exchange belongs to the engine of its forward. An exchange outside any module's forward is DeepSpeed's own. All ranks of
a group must run the same engine's forward, which a collective demands anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.utils import groups
from torch import nn

from zeropp_fp8 import sharded
from zeropp_fp8.comm import ActivationExchange, fp8_all_to_all
from zeropp_fp8.config import SECTION, ConfigError
from zeropp_fp8.zero.stage_part import StagePart

try:
    from deepspeed.module_inject import auto_ep_layer
except ImportError:  # DeepSpeed before 0.19.2 has no AutoEP, and it needs Triton
    auto_ep_layer = None


class _Now:
    """The exchange that is active now. All threads share it: while autograd's own thread works, the caller waits."""

    def __init__(self) -> None:
        self.exchange: ActivationExchange | None = None
        self.of_engine: tuple[ActivationExchange | None] | None = None  # of the one that was called; None: none was
        self.backward = False  # inside the backward of an exchange
        self.evaluating = False
        self.entered: list[tuple[nn.Module, ActivationExchange | None]] = []  # with the exchange before


_now = _Now()


class ActivationHooks(StagePart):
    """While a module of `model` runs its forward, exchanges of activations are those of `exchange`.

    The hooks are on modules that contain others or hold a group of their own: no other module calls an exchange.
    """

    gives_up = "activations of sequence parallelism (fp8)"

    def __init__(self, model: nn.Module, exchange: ActivationExchange) -> None:
        self.exchange = exchange
        self._handles = []
        for module in model.modules():
            if module is model or next(module.children(), None) is not None or hasattr(module, "spg"):
                self._handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
                self._handles.append(module.register_forward_hook(_leave, always_call=True))

    def formats_changed(self) -> None:
        self.exchange.off = True

    def remove(self) -> None:
        """Detach from the model: its exchanges are DeepSpeed's own again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, args) -> None:
        if not _now.entered:  # only for the outermost: reentrant checkpointing switches gradients off inside
            _now.evaluating = not torch.is_grad_enabled()
        _now.entered.append((module, _now.exchange))
        _now.exchange = self.exchange if _now.of_engine is None else _now.of_engine[0]


@contextmanager
def exchanging(exchange: ActivationExchange | None):
    """While an engine runs its model, which others may have hooks on, exchanges are its own; None: DeepSpeed's."""
    before, _now.of_engine = _now.of_engine, (exchange,)
    try:
        yield
    finally:
        _now.of_engine = before


def _leave(module: nn.Module, args, output) -> None:
    # A module whose own hooks raised before _enter has nothing to leave.
    while any(entered is module for entered, _ in _now.entered):
        entered, _now.exchange = _now.entered.pop()
        if entered is module:
            return


def _remembering_forward(stock: Callable) -> Callable:
    """Wrap the forward of a DeepSpeed autograd function so that it remembers its engine's exchange."""

    @functools.wraps(stock)
    def forward(ctx, *args, **kwargs):
        ctx.zeropp_fp8_exchange = _now.exchange, _now.evaluating
        return stock(ctx, *args, **kwargs)

    return forward


def _gradient_backward(stock: Callable) -> Callable:
    """Wrap its backward: exchanges inside are of gradients, and belong to the engine of the forward."""

    @functools.wraps(stock)
    def backward(ctx, *grad_outputs):
        before = _now.exchange, _now.evaluating, _now.backward
        _now.exchange, _now.evaluating = getattr(ctx, "zeropp_fp8_exchange", (None, False))
        _now.backward = True
        try:
            return stock(ctx, *grad_outputs)
        finally:
            _now.exchange, _now.evaluating, _now.backward = before

    return backward


def _dim_zero(stock: Callable) -> Callable:
    """A replacement for DeepSpeed's _dim_zero_all_to_all(group, input); both are operators with a derivative."""

    @functools.wraps(stock)
    def dim_zero_all_to_all(group, input):
        if _now.exchange is None:
            return stock(group, input)
        return fp8_all_to_all(input, _now.exchange, group, _now.evaluating)

    return dim_zero_all_to_all


class _SequenceComm:
    """Replaces the module deepspeed.comm inside deepspeed/sequence/layer.py; it changes one function only."""

    def __init__(self, stock: Any) -> None:
        self.stock = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)

    def all_to_all_single(
        self, output, tensor, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
    ):
        exchange = _now.exchange
        splits = input_split_sizes if input_split_sizes is not None else output_split_sizes
        if exchange is None or not exchange.accepts(tensor, self.stock.get_world_size(group), splits):
            if exchange is not None and exchange.off and tensor.is_floating_point() and splits is not None:
                exchange.count_whole(tensor, group, splits, _now.evaluating)
            return self.stock.all_to_all_single(
                output, tensor, output_split_sizes, input_split_sizes, group=group, async_op=async_op
            )
        pending = exchange.start(
            output, tensor, group, output_split_sizes, input_split_sizes, _now.backward, _now.evaluating
        )
        return pending if async_op else pending.wait()


def replace_exchanges(replace: Callable[[Any, str, Any], None]) -> None:
    """Replace DeepSpeed's functions by those above; they call DeepSpeed's while no FP8 engine's model runs.

    `replace(owner, name, value)` sets an attribute and remembers its old value.
    """
    from deepspeed.runtime.sequence_parallel import ulysses_sp
    from deepspeed.sequence import fpdt_layer, layer

    if isinstance(layer.dist, _SequenceComm):
        return
    functions = [layer._SeqAllToAll, fpdt_layer._FPDTGPUAttentionImpl_, fpdt_layer._FPDTGPUOffloadingAttentionImpl_]
    if hasattr(layer, "_dim_zero_all_to_all"):
        operator = _dim_zero(layer._dim_zero_all_to_all)
        replace(layer, "_dim_zero_all_to_all", operator)
        replace(ulysses_sp, "_dim_zero_all_to_all", operator)
    else:
        functions.append(layer._DimZeroAllToAll)
    if auto_ep_layer is not None:
        functions.append(auto_ep_layer._AllToAllV)
    for function in functions:
        replace(function, "forward", _remembering_forward(function.forward))
        replace(function, "backward", _gradient_backward(function.backward))
    replace(layer, "dist", _SequenceComm(layer.dist))
    if auto_ep_layer is not None:
        replace(auto_ep_layer, "dist", _SequenceComm(auto_ep_layer.dist))


def exchanging_groups(model: nn.Module) -> list:
    """The process groups of more than one rank that activations are exchanged over, as far as can be known.

    Of sequence parallelism these are DeepSpeed's own, made from an mpu or a mesh, and those given to
    DistributedAttention and FPDT_Attention; of expert parallelism (AutoEP) those of its layers.
    """
    own = [getattr(module, name, None) for module in model.modules() for name in ("spg", "ep_group")]
    found = [group for group in own if isinstance(group, torch.distributed.ProcessGroup)]
    if groups._get_sequence_parallel_world_size() > 1:
        found.append(groups._get_sequence_parallel_group())
    return [group for group in dict.fromkeys(found) if torch.distributed.get_world_size(group) > 1]


def exchange_in_fp8(model: nn.Module, session) -> Callable:
    """Let `model` exchange activations as configured in `session`; returns the context in which an engine runs it.

    Raises:
        ConfigError: "fp8" is set without sequence parallelism. ("detect" then means none.)
    """
    wire_format = session.config.activations.wire_format
    found = exchanging_groups(model)
    if not found:
        if wire_format != "fp8":
            return nullcontext
        raise ConfigError(
            f'"{SECTION}.activations.wire_format": "{wire_format}" needs DeepSpeed sequence parallelism (Ulysses) over '
            'more than one rank, and this job has none; give deepspeed.initialize the "mpu" of '
            'UlyssesSPAttentionHF.register_with_transformers, use DistributedAttention, set "expert_parallel", whose '
            "layers exchange tokens, or remove the key"
        )
    if wire_format == "none" and all(sharded.experts_group(param) is None for param in model.parameters()):
        return functools.partial(exchanging, None)
    exchange = ActivationExchange(session.place.node, session.ledger)
    exchange.off = wire_format == "none"  # then it counts what AutoEP sends
    for group in found:
        exchange.route(group)  # torch.compile must not be the first to ask
    hooks = ActivationHooks(model, exchange)
    session.parts.extend([] if exchange.off else [hooks])
    session.on_model.callback(hooks.remove)
    return functools.partial(exchanging, exchange)
