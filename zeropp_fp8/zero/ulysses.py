"""FP8 in DeepSpeed's sequence parallelism (Ulysses): which exchanges of activations travel in FP8, and in which format.

All of its all-to-alls are the `dist.all_to_all_single` of one file, deepspeed/sequence/layer.py (those of DeepCompile,
which the plugin refuses, apart; the all-gather of image patches in UlyssesSPViTAttention stays as it is). Three ways
lead there: DistributedAttention through _SeqAllToAll and single_all_to_all, UlyssesSPAttentionHF through
_dim_zero_all_to_all (until DeepSpeed 0.19.0 through _DimZeroAllToAll), FPDT_Attention through single_all_to_all. The
collective itself is replaced, so that layouts, uneven heads and overlapping stay DeepSpeed's own code; and the
functions on the way, which know whether it is an activation or a gradient.

Which engine an exchange belongs to. A process group does not tell: the models of RLHF share it. Instead every module of
an engine that exchanges in FP8 says so while its forward runs (ActivationHooks), which also covers activation
checkpointing, where autograd calls a block's forward again. The backward of an exchange belongs to the engine that its
forward belonged to. So engines with and without FP8 live side by side; an exchange outside of any module's forward is
DeepSpeed's own. All ranks of a group must run the same engine's forward, which a collective demands anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.utils import groups
from torch import nn

from zeropp_fp8.comm import ActivationExchange, fp8_all_to_all
from zeropp_fp8.config import SECTION, ConfigError
from zeropp_fp8.zero.stage_part import StagePart


class _Now:
    """What runs at the moment. One for all threads: while autograd's own thread works, the caller waits for it."""

    def __init__(self) -> None:
        self.exchange: ActivationExchange | None = None
        self.backward = False  # inside the backward of an exchange
        self.evaluating = False
        self.entered: list[tuple[nn.Module, ActivationExchange | None]] = []  # and what to go back to


_now = _Now()


class ActivationHooks(StagePart):
    """While a module of `model` runs its forward, exchanges of activations are those of `exchange`.

    On modules that contain others or hold a group of their own: no other calls an exchange.
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
        self.exchange.rests = True

    def remove(self) -> None:
        """Give the model back: its exchanges are DeepSpeed's own again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, args) -> None:
        if not _now.entered:  # reentrant checkpointing switches gradients off further down
            _now.evaluating = not torch.is_grad_enabled()
        _now.entered.append((module, _now.exchange))
        _now.exchange = self.exchange


def _leave(module: nn.Module, args, output) -> None:
    # A module whose own hooks raised before _enter has nothing to leave.
    while any(entered is module for entered, _ in _now.entered):
        entered, _now.exchange = _now.entered.pop()
        if entered is module:
            return


def _remembering_forward(stock: Callable) -> Callable:
    """The forward of an autograd function of DeepSpeed that remembers which engine's exchange it was."""

    @functools.wraps(stock)
    def forward(ctx, *args, **kwargs):
        ctx.zeropp_fp8_exchange = _now.exchange, _now.evaluating
        return stock(ctx, *args, **kwargs)

    return forward


def _gradient_backward(stock: Callable) -> Callable:
    """Its backward: exchanges inside are of gradients, and of the engine that the forward belonged to."""

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
    """DeepSpeed's _dim_zero_all_to_all(group, input), an operator with a derivative; so is what replaces it."""

    @functools.wraps(stock)
    def dim_zero_all_to_all(group, input):
        if _now.exchange is None:
            return stock(group, input)
        return fp8_all_to_all(input, _now.exchange, group, _now.evaluating)

    return dim_zero_all_to_all


class _SequenceComm:
    """Stands for the module deepspeed.comm inside deepspeed/sequence/layer.py: all but one function is its own."""

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
            return self.stock.all_to_all_single(
                output, tensor, output_split_sizes, input_split_sizes, group=group, async_op=async_op
            )
        pending = exchange.start(
            output, tensor, group, output_split_sizes, input_split_sizes, _now.backward, _now.evaluating
        )
        return pending if async_op else pending.wait()


def replace_exchanges(replace: Callable[[Any, str, Any], None]) -> None:
    """Put the functions above where DeepSpeed looks for its own; they do nothing while no FP8 engine's model runs.

    `replace(owner, name, value)` sets an attribute and remembers what was there.
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
    for function in functions:
        replace(function, "forward", _remembering_forward(function.forward))
        replace(function, "backward", _gradient_backward(function.backward))
    replace(layer, "dist", _SequenceComm(layer.dist))


def sequence_parallel_groups(model: nn.Module) -> list:
    """The process groups of more than one rank that sequence parallelism exchanges over, as far as they can be known.

    DeepSpeed's own, made from an mpu or a mesh, and those that DistributedAttention and FPDT_Attention were given.
    """
    own = (getattr(module, "spg", None) for module in model.modules())
    found = [group for group in own if isinstance(group, torch.distributed.ProcessGroup)]
    if groups._get_sequence_parallel_world_size() > 1:
        found.append(groups._get_sequence_parallel_group())
    return [group for group in dict.fromkeys(found) if torch.distributed.get_world_size(group) > 1]


def exchange_in_fp8(model: nn.Module, session) -> None:
    """Let `model` exchange activations as the configuration of `session` says.

    Raises:
        ConfigError: "fp8" without sequence parallelism. ("detect" then means none.)
    """
    wire_format = session.config.activations.wire_format
    if wire_format == "none":
        return
    found = sequence_parallel_groups(model)
    if not found:
        if wire_format == "detect":
            return
        raise ConfigError(
            f'"{SECTION}.activations.wire_format": "{wire_format}" needs DeepSpeed sequence parallelism (Ulysses) over '
            'more than one rank, and this job has none; give deepspeed.initialize the "mpu" of '
            "UlyssesSPAttentionHF.register_with_transformers, use DistributedAttention, or remove the key"
        )
    exchange = ActivationExchange(session.place.node, session.ledger)
    for group in found:
        exchange.route(group)  # torch.compile must not be the first to ask
    hooks = ActivationHooks(model, exchange)
    session.parts.append(hooks)
    session.on_model.callback(hooks.remove)
