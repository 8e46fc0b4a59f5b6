"""Jobs about activation checkpointing of functions over several modules, that run on ranks."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from models import KEPT, section
from running import Spec, backward, boundary, forward, on_engine, run, see, step, update
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import zeropp_fp8
from zeropp_fp8 import sharded

HIDDEN = 64


class Injected(RuntimeError):
    """Raised on purpose."""


class Block(nn.Module):
    """A repeated block whose matrices are an adapter on a frozen layer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.base, self.down, self.up = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)
        for frozen in (self.norm, self.base):
            frozen.requires_grad_(False)

    def forward(self, x):
        x = self.norm(x)
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class CallsItself(nn.Module):
    """A frozen layer that is run `depth` times, each but the first from within the one before."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 8), nn.Parameter(torch.randn(HIDDEN))
        self.requires_grad_(False)

    def forward(self, x, depth=3):
        x = torch.tanh(nn.functional.linear(x, self.weight))
        return (x if depth == 1 else self(x, depth - 1)) + self.bias


class Checkpointed(nn.Module):
    """Modules that are no blocks, and two blocks, called in checkpointed functions by `kind`.

    `failure`: "recomputation" or "backward": where the next backward raises.
    """

    def __init__(self, kind, checkpointing="non-reentrant"):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.checkpointing, self.failure = kind, checkpointing, None
        self.embed = nn.Embedding(32, HIDDEN)
        self.base, self.down, self.up = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)
        self.norm, self.wide = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.itself = CallsItself()
        self.gain = nn.Parameter(torch.full((HIDDEN,), 1.5))
        self.head = nn.Linear(HIDDEN, 32)
        for frozen in (self.embed, self.base, self.norm):
            frozen.requires_grad_(False)

    def adapter(self, x):
        y = self.base(x)
        if self.failure == "recomputation" and torch._C._current_graph_task_id() != -1:
            raise Injected
        return torch.tanh(y + self.up(self.down(x)))

    def frozen_norm(self, x):
        return torch.relu(self.wide(self.norm(x)))

    def several(self, x):
        return self.frozen_norm(self.adapter(x))

    def twice(self, x):
        return self.norm(self.adapter(self.norm(self.adapter(x))))

    def nested(self, x):
        return self.run(self.frozen_norm, self.norm(self.run(self.adapter, x)))

    def of_blocks(self, x):
        for block in self.blocks:
            x = self.norm(block(x))
        return x

    def embedded(self, tokens):
        return self.adapter(self.embed(tokens))

    def calls_itself(self, x):
        return self.itself(x)

    def discarded_tail(self, x):
        y = self.several(x)
        self.head(y.detach())
        return y

    def run(self, function, x):
        if self.checkpointing is None:
            return function(x)
        return checkpoint(function, x, use_reentrant=self.checkpointing == "reentrant")

    def fail_in_backward(self, grad):
        if self.failure == "backward":
            raise Injected

    def forward(self, tokens, labels):
        if self.kind == "embedded":
            x = self.run(self.embedded, tokens)
        elif self.kind == "each block":
            x = self.wide(self.embed(tokens))
            for block in self.blocks:
                x = self.run(block, x)
        else:
            x = self.run(getattr(self, self.kind), self.wide(self.embed(tokens)))
        x = x * self.gain
        x.register_hook(self.fail_in_backward)
        return nn.functional.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())


KINDS = (
    "adapter",
    "several",
    "twice",
    "nested",
    "of_blocks",
    "embedded",
    "calls_itself",
    "discarded_tail",
    "each block",
)


def data(steps, seed=1):
    generator = torch.Generator().manual_seed(seed * 100 + dist.get_rank())
    for _ in range(steps):
        tokens = torch.randint(0, 32, (2, 9), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def left_gathered(engine):
    """Names of parameters that are there, or in use, though no pass is under way."""
    return [
        name
        for name, p in engine.module.named_parameters()
        if p.ds_active_sub_modules or p.data.numel() or sharded.known(p).operand is not None
    ]


def exact_bytes(engine):
    """Bytes of exact gathers so far."""
    return (
        sum(zeropp_fp8.wire_report(engine)["outside_steps"].values())
        if getattr(engine, "zeropp_fp8_session", None)
        else 0
    )


def train(kind, the_section, checkpointing="non-reentrant", leaf=False, dtype="fp32", **overrides):
    """Two steps of two micro-batches; seen is what was left gathered, or running, and bytes of exact gathers.

    `the_section`: None for stock.
    """
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    before = []

    def begin(engine):
        before.extend((len(FWD_MODULE_STACK), exact_bytes(engine)))

    left = see(left_gathered)
    events = [forward, left, backward, left, update] * 4
    running = see(lambda engine: len(FWD_MODULE_STACK) - before[0])
    outside = see(lambda engine: exact_bytes(engine) - before[1])
    model = functools.partial(Checkpointed, kind, checkpointing)
    config = {"gradient_accumulation_steps": 2, **overrides}
    spec = Spec(the_section, dtype, config, model, lr=1e-2, leaves=(Block,) * leaf)
    return run(spec, [on_engine(begin), *events, running, outside], ("weights",), data(4))


def beside_plain(kinds, the_section, plain="itself", **options):
    """{kind: (without checkpointing, with it)}; `kinds`: (kind, whether recomputation stops early).

    `plain`: "stock" or "stock, leaves" where stock is to be run without checkpointing, which it cannot do in all cases.
    """
    reference = (the_section, options)
    if plain != "itself":
        reference = (None, {"leaf": plain == "stock, leaves", "zero_optimization": KEPT, **options})
    found = {}
    for kind, early_stop in kinds:
        if kind not in found:
            found[kind] = [train(kind, reference[0], None, **reference[1])]
        with set_checkpoint_early_stop(early_stop):
            found[kind].append(train(kind, the_section, **options))
    return found


def failing(failure):
    """A micro-batch whose backward fails on all ranks; its loss does not count."""

    def event(running):
        running.engine.module.failure = failure
        forward(running)
        with pytest.raises(Injected):
            backward(running)
        running.engine.module.failure = None
        running.trace.losses.pop()

    return event


def look_at_each_forward(running):
    """After DeepSpeed's hook that begins a forward, before any fetch."""
    model = running.engine.module
    hook = model.register_forward_pre_hook(lambda *_: running.trace.seen.append(left_gathered(running.engine)))
    model._forward_pre_hooks.move_to_end(hook.id, last=False)
    model._forward_pre_hooks.move_to_end(running.engine.optimizer.parameter_offload.fwd_pre_hook.id, last=False)


def backward_of_the_loss(running):
    """As users of plain torch do it."""
    running.loss.backward()


def after_failure(recipe, failures, fields=None):
    """{failure: a run whose second backward fails so}; None: one that never saw that batch."""
    found, several = {}, functools.partial(Checkpointed, "several")
    for failure in (None, *failures):
        spec = Spec(section(recipe, 1, **(fields or {})), model=several, lr=1e-2)
        fails, some = [failing(failure)] * (failure is not None), list(data(4))
        if not fails:
            del some[1]
        events = [step, *fails, step, forward, backward_of_the_loss, update]
        found[failure] = run(spec, [look_at_each_forward, *events], ("weights",), some)
    return found


def engine_after_failure(recipe, failures):
    """{failure: loss of a second engine, after the first was destroyed}; None: where no backward had begun."""
    losses = {}
    for failure in (None, *failures):
        model = Checkpointed("several")
        spec = Spec(section(recipe, 1), model=lambda model=model: model)
        run(spec, [forward if failure is None else failing(failure)], data=data(1))
        (losses[failure],) = run(spec, [forward], data=data(1)).losses
    return losses


def refused(running):
    """A forward; what it raises is seen."""
    with pytest.raises(RuntimeError) as said:
        forward(running)
    running.trace.seen.append(str(said.value))


def failure_while_accumulating():
    """(what the forward after it says, the losses of the step that is begun again, and those without any failure)."""
    some = list(data(3))
    model = functools.partial(Checkpointed, "several")
    spec = Spec(section("zeropp", 1), config={"gradient_accumulation_steps": 2}, model=model, lr=1e-2)
    begun_again = [on_engine(lambda engine: engine.optimizer.zero_grad()), boundary(False)]
    steps = [event for place in range(3) for event in (boundary(place == 1), step)]
    events = [step, failing("backward"), refused, *begun_again, *steps]
    failed = run(spec, events, data=[*some[:2], some[1], *some])
    return *failed.seen, failed.losses[1:], run(spec, steps, data=some).losses
