"""Training on ranks: an engine by its spec, what happens to it as a list of events, and the trace that is left.

    run(Spec(section("zeropp")), [step, step, evaluate(tokens), forward, backward, look, update], ("weights",)).losses

An event is a function of the Running; any callable may stand between those that are here.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from models import batches, build, ds_config, full_fp32_weights, full_moments, full_weights, llama, make_engine
from torch import Tensor, nn

import zeropp_fp8


def switch(plugin):
    """Plugin on or off."""
    zeropp_fp8.enable() if plugin else zeropp_fp8.disable()


def allow_fp16_on_cpu():
    """DeepSpeed refuses fp16 on CPUs without an fp16 oneDNN; torch itself computes it, slowly and correctly."""
    from deepspeed.accelerator import get_accelerator

    accelerator = type(get_accelerator())
    accelerator.is_fp16_supported = lambda self: True
    accelerator.supported_dtypes = lambda self: [torch.float, torch.half, torch.bfloat16]


def freezing(*parts):
    """Make parameters not train whose names have one of these parts; of a Spec, `adapted`."""

    def frozen(model):
        for name, param in model.named_parameters():
            param.requires_grad_(not any(part in name for part in parts))
        return model

    return frozen


def shared_folder():
    """A temporary folder, the same on every rank."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, 0)
    return box[0]


# -- one engine, one batch ---------------------------------------------------------------------------------------------


def loss_of(engine, batch):
    """Of a forward, with its graph; a batch is tokens of a causal LM, or a tuple of what the model takes."""
    return engine(*batch) if isinstance(batch, tuple) else engine(input_ids=batch, labels=batch).loss


def forward_backward(engine, tokens):
    """The loss of a micro-batch whose gradients are added."""
    loss = loss_of(engine, tokens)
    engine.backward(loss)
    return loss.item()


def stepped(engine, tokens):
    """The loss of a micro-batch, after which the engine steps."""
    loss = forward_backward(engine, tokens)
    engine.step()
    return loss


def trained(engine, batches_of_tokens):
    """The loss of each micro-batch."""
    return [stepped(engine, tokens) for tokens in batches_of_tokens]


@torch.no_grad()
def evaluated(engine, tokens):
    """The loss without a graph."""
    return loss_of(engine, tokens).item()


# -- a run -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """All that an engine is made of.

    Attributes:
        section: the plugin's; None for stock DeepSpeed.
        config: further keys of the ds_config.
        model: makes the model, under zero.Init where `zero_init` says so.
        adapted: what becomes of it after that.
        optimizer: "adamw", "sgd", what makes one of a list of parameters, or None for an engine that does not train.
        leaves: classes of DeepSpeed's leaf modules, which make stock gather and reduce as the plugin does of blocks.
        plugin: whether it is on; None: where there is a section.
        given: further arguments of deepspeed.initialize.
    """

    section: dict | None = None
    dtype: str = "fp32"
    config: dict = field(default_factory=dict)
    model: Callable[[], nn.Module] = llama
    optimizer: str | Callable[[list], torch.optim.Optimizer] | None = "adamw"
    lr: float = 1e-3
    zero_init: bool = False
    adapted: Callable[[nn.Module], nn.Module] | None = None
    leaves: tuple = ()
    plugin: bool | None = None
    given: dict = field(default_factory=dict)

    def engine(self, model: nn.Module | None = None):
        """An engine over a new model, or over one that is there."""
        switch(self.section is not None if self.plugin is None else self.plugin)
        config = ds_config(self.section, self.dtype, **self.config)
        if model is None:
            model = build(self.model, config, self.zero_init)
            model = self.adapted(model) if self.adapted else model
        if self.leaves:
            deepspeed.utils.set_z3_leaf_modules(model, list(self.leaves))
        return make_engine(model, config, self.optimizer, self.lr, **self.given)


@dataclass
class Trace:
    """All that a run leaves.

    Attributes:
        losses: of each forward and each evaluation.
        seen: what events have added.
        weights, masters: full tensors at the end: of the model, and of the optimizer in fp32.
        bytes: that this rank sent per step, by kind and link.
        moments: full tensors of the optimizer at the end, as models.full_moments names them.
    """

    losses: list[float] = field(default_factory=list)
    seen: list = field(default_factory=list)
    weights: dict[str, Tensor] | None = None
    masters: dict[str, Tensor] | None = None
    bytes: dict[str, dict[str, float]] | None = None
    moments: dict[str, Tensor] | None = None


LEFT = {
    "weights": lambda engine: full_weights(engine.module),
    "masters": lambda engine: full_fp32_weights(engine.module),
    "moments": lambda engine: full_moments(engine.module),
    "bytes": lambda engine: zeropp_fp8.wire_report(engine)["per_step"],
}


class Running:
    """An engine between two events; `data` are the micro-batches to come, `loss` is the last forward's."""

    def __init__(self, engine, data: Iterator) -> None:
        self.engine, self.data, self.trace = engine, data, Trace()
        self.loss: Tensor | None = None


Event = Callable[[Running], object]


def run(
    spec: Spec,
    events: Iterable[Event],
    leaves: Iterable[str] = (),
    data: Iterable | None = None,
    model: nn.Module | None = None,
) -> Trace:
    """Let the events happen to a new engine, one after the other; it is destroyed then.

    Args:
        leaves: which of LEFT the trace keeps.
        data: micro-batches; without it those of models.batches, a different sequence on each rank.
        model: one that is there already.
    """
    if data is None:
        data = batches(10**6, dist.get_rank())
    running = Running(spec.engine(model), iter(data))
    for event in events:
        event(running)
    for name in leaves:
        setattr(running.trace, name, LEFT[name](running.engine))
    running.engine.destroy()  # not where an event has raised: it may wait for other ranks, and nobody would be told
    return running.trace


def forward(running: Running) -> None:
    running.loss = loss_of(running.engine, next(running.data))
    running.trace.losses.append(running.loss.item())


def backward(running: Running) -> None:
    running.engine.backward(running.loss)


def update(running: Running) -> None:
    running.engine.step()


def step(running: Running) -> None:
    """A whole micro-batch."""
    for event in (forward, backward, update):
        event(running)


def evaluate(batch) -> Event:
    """A loss without a graph."""
    return lambda running: running.trace.losses.append(evaluated(running.engine, batch))


def on_engine(function: Callable, *args, **kwargs) -> Event:
    """`function(engine, ...)` as an event."""
    return lambda running: function(running.engine, *args, **kwargs)


def see(function: Callable, *args, **kwargs) -> Event:
    """Keep what `function(engine, ...)` returns."""
    return lambda running: running.trace.seen.append(function(running.engine, *args, **kwargs))


def within(context: Callable, *events: Event) -> Event:
    """Events inside of `context(engine)`."""

    def event(running: Running) -> None:
        with context(running.engine):
            for each in events:
                each(running)

    return event


def accumulated(micro_batches: int, style: str = "managed") -> list[Event]:
    """A step of several micro-batches, whose end the engine's configuration says ("managed"), or the script.

    A script says so before each backward ("set boundary"), or by the step alone ("unmanaged"); it then takes the mean
    of the losses itself.
    """

    def mean(running: Running) -> None:
        running.loss = running.loss / micro_batches

    events: list[Event] = []
    for place in range(micro_batches):
        last = place == micro_batches - 1
        events += [boundary(last)] * (style == "set boundary") + [forward]
        events += [backward, *[update] * (not last)] if style == "managed" else [mean, backward]
    return [*events, update]


def scaled(factor: float) -> Event:
    """The last loss times a factor, of which the trace has the loss itself."""

    def event(running: Running) -> None:
        running.loss = running.loss * factor

    return event


def saved(folder: str, tag: str, **options) -> Event:
    """A checkpoint of the engine."""
    return on_engine(lambda engine: engine.save_checkpoint(folder, tag=tag, **options))


def loaded(folder: str, tag: str, **options) -> Event:
    """The engine goes on from a checkpoint."""

    def event(running: Running) -> None:
        path, _ = running.engine.load_checkpoint(folder, tag=tag, **options)
        assert path is not None

    return event


def resumed(
    spec: Spec,
    before: Iterable[Event],
    after: Iterable[Event],
    leaves: Iterable[str] = (),
    again: Spec | None = None,
    data: Iterable | None = None,
    folder: str | None = None,
    tag: str = "saved",
) -> tuple[Trace, Trace, Trace]:
    """Traces of what is before a checkpoint, of what is after it in the same run, and in a new engine that loads it.

    Args:
        again: the new engine's; else the same over a model with other weights.
        folder: for the checkpoint; else a temporary one.
    """
    folder, after, kept = folder or shared_folder(), list(after), []

    def fork(running: Running) -> None:
        running.data, to_come = itertools.tee(running.data)
        kept.extend((running.trace, to_come))
        running.trace = Trace()

    went_on = run(spec, [*before, saved(folder, tag), fork, *after], leaves, data)
    until, to_come = kept
    return until, went_on, run(again or other(spec), [loaded(folder, tag), *after], leaves, to_come)


def other(spec: Spec) -> Spec:
    """The same engine over a model with other weights."""
    return replace(spec, model=functools.partial(spec.model, seed=9))


def state_of(engine) -> dict:
    """All that a checkpoint brings back, as full tensors."""
    return {name: LEFT[name](engine) for name in ("weights", "masters", "moments")}


def exchanged(own: Spec, stock: Spec, steps: int, at_end: Iterable[Event] = (), back: Iterable[Event] = ()) -> dict:
    """Of a run that saves half way: how it differs from one that resumes, what stock makes of it, and what of stock's.

    Traces of "own", "stock" (which resumes as well, and saves) and "back" (which loads that) begin at the checkpoint
    with `state_of`; "zero_to_fp32" are the weights that DeepSpeed's script finds in the first one.
    """
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    folder, data, half = shared_folder(), list(batches(2 * steps, dist.get_rank())), [see(state_of), *[step] * steps]
    _, went_on, again = resumed(own, [step] * steps, [*half, *at_end], ("weights",), data=data, folder=folder)
    in_stock = run(
        other(stock), [loaded(folder, "saved"), *half, saved(folder, "stock")], ("weights", "masters"), data[steps:]
    )
    return {
        "differing": differing(went_on, again),
        "own": went_on,
        "stock": in_stock,
        "back": run(other(own), [loaded(folder, "stock"), see(state_of), *back]),
        "zero_to_fp32": get_fp32_state_dict_from_zero_checkpoint(folder, tag="saved"),
    }


def universal(folder: str, tag: str) -> None:
    """Let DeepSpeed's converter make a universal checkpoint of one that is there; its tag is "universal"."""
    from deepspeed.checkpoint.ds_to_universal import main, parse_arguments

    folders = ["x", "--input_folder", f"{folder}/{tag}", "--output_folder", f"{folder}/universal"]
    with mock.patch("sys.argv", [*folders, "--num_extract_workers", "1", "--num_merge_workers", "1"]):
        main(parse_arguments())


def boundary(last: bool) -> Event:
    """Whether the backward to come is the last one of a step."""
    return on_engine(lambda engine: engine.set_gradient_accumulation_boundary(last))


# -- comparing ---------------------------------------------------------------------------------------------------------


def equal(these, those) -> bool:
    """Whether all that is in them is, tensors bit for bit."""
    if not isinstance(those, type(these)):
        return False
    if isinstance(these, Tensor):
        return torch.equal(these, those)
    if isinstance(these, dict):
        return these.keys() == those.keys() and all(equal(value, those[key]) for key, value in these.items())
    if isinstance(these, (list, tuple)):
        return len(these) == len(those) and all(map(equal, these, those))
    return these == those


def same(these: dict[str, Tensor], those: dict[str, Tensor]) -> bool:
    """Whether tensors of the same names are equal bit for bit."""
    return not changed(these, those)


def changed(these: dict[str, Tensor], those: dict[str, Tensor]) -> list[str]:
    """Names of tensors that differ by a bit, or are on one side alone."""
    both = these.keys() & those.keys()
    return sorted((these.keys() ^ those.keys()) | {name for name in both if not torch.equal(these[name], those[name])})


def differing(first: Trace, second: Trace, but: Iterable[str] = ()) -> dict[str, object]:
    """{what: how two traces differ} of all that they have `but` some of it; empty where each bit is the same."""
    found: dict[str, object] = {}
    for name in (each.name for each in fields(Trace) if each.name not in but):
        these, those = getattr(first, name), getattr(second, name)
        if isinstance(these, dict) and isinstance(those, dict) and name != "bytes":
            if changed(these, those):
                found[name] = changed(these, those)
        elif not equal(these, those):
            found[name] = these, those
    return found
