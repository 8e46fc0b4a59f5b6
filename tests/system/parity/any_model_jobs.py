"""Random cases on ranks: the plugin beside stock ZeRO-3, and beside one process that has the exact weights."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import itertools
import os
import tempfile

import deepspeed
import torch
import torch.distributed as dist
from models import compiled_by, full_weights
from random_cases import ROUNDED, Case, parsed, tolerance, weight_error
from random_models import VOCABULARY, RandomModel
from running import Spec, Trace, changed, differing, evaluated, forward_backward, switch, trained

from zeropp_fp8.handover import Changes, WeightSource
from zeropp_fp8.zero.gather.blocks import find_blocks

SEQUENCES, LENGTH = 2, 6


class Mismatch(AssertionError):
    """The plugin's run is not what it has to be."""


@dataclasses.dataclass
class Outcome(Trace):
    """A case's trace; `start`: its weights then, where a recipe rounds them; `figures`: see beside_one_process."""

    start: dict[str, torch.Tensor] | None = None
    figures: dict[str, float] = dataclasses.field(default_factory=dict)


def marker(case: Case, phase: str) -> str:
    """Return what a rank prints before it runs a case, and what its errors begin with."""
    return f"CASE {phase} {case.text()}"


def run_cases(texts: list[str], phases=("plugin", "stock")) -> list[dict[str, float]]:
    """Run cases one after the other; what was measured of each. An error names the case."""
    importlib.import_module("torch._dynamo")  # zero.Init needs it imported before, see plugin.enable
    return [run_case(parsed(text), phases) for text in texts]


def run_case(case: Case, phases=("plugin", "stock")) -> dict[str, float]:
    """See run_cases; both runs and the comparisons."""
    gc.freeze()  # DeepSpeed collects garbage for each engine, and would visit what is left of earlier ones each time
    results, figures = {}, {}
    for phase in phases:
        print(marker(case, phase), flush=True)
        start = results["plugin"].start if "plugin" in results else None
        try:
            results[phase] = train(case, plugin=phase == "plugin", start=start)
        except Exception as error:
            raise RuntimeError(marker(case, phase)) from error
        print(marker(case, "compare"), flush=True)
        try:
            if phase == "plugin":
                figures = check_figures(case, results[phase].figures)
                check_neutral(case, results[phase])
            elif "plugin" in results:
                figures |= compare(case, results["plugin"], results["stock"])
        except Exception as error:
            raise Mismatch(marker(case, "compare")) from error
    return figures


# -- training ----------------------------------------------------------------------------------------------------------


def train(case: Case, plugin: bool, start=None) -> Outcome:
    """One run of a case.

    `start`: weights to begin with, of a run whose recipe rounds them before the first step.
    """
    switch(plugin)
    torch._dynamo.reset()
    with compiled_by("aot_eager"):
        run = Run(case, plugin, start)
        for step in range(case.steps):
            run.step(step)
        result = run.result()
    run.destroy()  # not after an error, which other ranks may not have met: it can be collective
    return result


def make_model(case: Case, seed: int | None = None) -> RandomModel:
    model = RandomModel(case.stages, case.width, case.spans, case.tied, case.seed if seed is None else seed)
    for number in case.frozen:
        model.stage(int(number)).requires_grad_(False)
    return model.to(torch.bfloat16) if case.dtype == "bf16" else model


class Run:
    """A case being trained."""

    def __init__(self, case: Case, plugin: bool, start) -> None:
        self.case, self.plugin, self.start, self.trace = case, plugin, start, Outcome()
        self.rank = dist.get_rank()
        spec = Spec(
            case.section if plugin else None,
            case.dtype,
            case.config,
            functools.partial(make_model, case),
            self.optimizer,
            zero_init=case.zero_init,
            adapted=self.adapted,
            plugin=plugin,
        )
        self.engine, self.reference = spec.engine(), None
        self.model = self.engine.module
        if case.reference:
            self.reference = dataclasses.replace(
                spec,
                section=spec.section if case.reference == "same" else None,
                model=functools.partial(make_model, case, case.seed + 1),
                optimizer=None,
                adapted=lambda model: model.requires_grad_(False),
            ).engine()
            self.reference.eval()
        self.changes, self.held = None, {}  # of do_hand
        self.trace.start = None if case.is_lossless or not plugin else full_weights(self.model)
        self.tokens = torch.Generator().manual_seed(1000 * case.seed + self.rank)
        self.tokens_seen = torch.Generator().manual_seed(1000 * case.seed + 500 + self.rank)  # by events only
        torch.manual_seed(case.seed + self.rank)  # of dropout

    def adapted(self, model: RandomModel) -> RandomModel:
        if self.start is not None:
            _set_weights(model, self.start)
        if not self.plugin and self.case.is_lossless and self.case.granularity == "block":
            for block in find_blocks(model):
                deepspeed.utils.set_z3_leaf_module(block, True)
        return model

    def optimizer(self, trained: list) -> torch.optim.Optimizer:
        self.trained = trained
        matrices = [p for p in trained if _dimensions(p) > 1]
        others = [p for p in trained if _dimensions(p) <= 1]
        groups = [{"params": trained}]
        if self.case.groups == 2 and matrices and others:
            groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        options = {
            "sgd": (torch.optim.SGD, {"lr": 0.3}),
            "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
            "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
        }
        kind, arguments = options[self.case.optimizer]
        return kind(groups, **arguments)

    def batch(self, generator: torch.Generator | None = None) -> torch.Tensor:
        generator = generator or self.tokens
        start = torch.randint(0, VOCABULARY, (SEQUENCES, 1), generator=generator)
        stride = torch.randint(1, 4, (SEQUENCES, 1), generator=generator)
        return (start + stride * torch.arange(LENGTH)) % VOCABULARY

    def step(self, step: int) -> None:
        case, engine = self.case, self.engine
        left_out = tuple(int(text.partition(":")[2]) for text in case.skips if text.startswith(f"{step}:"))
        extra: float | None = 1.0
        if case.ranks_differ and (self.rank + step) % 2:
            extra = None if self.plugin else 0.0
        # In stock a gradient that does not come stays what it was in the step before.
        named = {"skipped": left_out} if self.plugin else {"zeroed": left_out}
        for micro in range(case.accumulation):
            self.events(step, micro)
            losses = [engine(self.batch(), extra=extra, **named) for _ in range(case.forwards)]
            loss = torch.stack(losses).mean()
            engine.backward(loss)
            if micro == case.accumulation - 1:
                self.events(step, case.accumulation)
            engine.step()
            self.trace.losses.append(loss.item())

    # -- events ----------------------------------------------------------------------------------------------------

    def events(self, step: int, place: int) -> None:
        for text in self.case.events:
            if text.startswith(f"{step}:{place}:"):
                what, _, stage = text.split(":", 2)[2].partition(":")
                getattr(self, f"do_{what}")(*([stage] if stage else []))

    def params_of(self, stage: str) -> list[torch.nn.Parameter]:
        stages = self.model.stages if stage == "all" else self.model.stage(int(stage))
        return list(stages.parameters())

    def do_evaluate(self) -> None:
        self.engine.eval()
        self.trace.seen.append(evaluated(self.engine, (self.batch(self.tokens_seen),)))
        self.engine.train()

    def do_look(self, stage: str) -> None:
        params = self.params_of(stage)
        with deepspeed.zero.GatheredParameters(params):
            self.trace.seen += [float(p.detach().float().norm()) for p in params]

    def do_write(self, stage: str) -> None:
        params = [p for p in self.params_of(stage) if any(p is t for t in self.trained)]
        if not params:
            return
        with deepspeed.zero.GatheredParameters(params, modifier_rank=0), torch.no_grad():
            if self.rank == 0:
                for p in params:
                    p.mul_(-1.5)

    def do_save(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.engine.save_16bit_model(folder)
            if self.rank == 0:
                saved = torch.load(os.path.join(folder, "pytorch_model.bin"), weights_only=True)
                self.trace.seen += [float(saved[name].float().norm()) for name in sorted(saved)]

    def do_freeze(self, stage: str) -> None:
        """In stock too: where the weight needs no gradient, torch may multiply in another way, with other last bits.

        Its matmul makes one product of a batch only if the weight needs one, and else takes a batch of products.
        """
        for p in self.params_of(stage):
            if any(p is t for t in self.trained):
                p.requires_grad_(False)

    def do_unfreeze(self, stage: str) -> None:
        for p in self.params_of(stage):
            if any(p is t for t in self.trained):
                p.requires_grad_(True)

    def do_allreduce(self) -> None:
        self.engine.allreduce_gradients()

    def do_fall(self) -> None:
        if self.plugin:
            from zeropp_fp8.zero.fall_back import fall_back

            fall_back(self.engine.optimizer)

    def do_hand(self) -> None:
        """Hand changed weights over: the receiver holds every bit, and gets nothing twice of what nobody writes to."""
        if not self.plugin:
            return
        first, came = self.changes is None, set()
        self.changes = self.changes or Changes(WeightSource(self.engine))
        for name, shape, indices, values in itertools.chain.from_iterable(self.changes):
            held = self.held.setdefault(name, torch.zeros(shape, dtype=values.dtype))
            held.view(-1)[indices.long()] = values
            came.add(name)
        exact = full_weights(self.model)
        if dist.get_rank():
            return
        if others := changed({name: tensor for name, tensor in self.held.items() if name in exact}, exact):
            raise Mismatch(f"handed over otherwise: {others}")
        if not (first or self.case.falls_back):  # with which all is due
            ids = {id(p) for p in self.trained}
            still = [key for key, stage in self.model.stages.items() if ids.isdisjoint(map(id, stage.parameters()))]
            twice = [name for name in exact if name in came and name.startswith(tuple(f"stages.{s}." for s in still))]
            if twice:
                raise Mismatch(f"handed over again, though nobody writes to it: {twice}")

    def do_sync(self) -> None:
        """Do what TRL's sync_ref_model does."""
        pairs = list(zip(self.model.parameters(), self.reference.module.parameters()))
        flat = [p for pair in pairs for p in pair]
        with deepspeed.zero.GatheredParameters(flat, modifier_rank=0), torch.no_grad():
            if self.rank == 0:
                for own, other in pairs:
                    other.mul_(0.4).add_(own, alpha=0.6)
        self.trace.seen.append(evaluated(self.reference, (self.batch(self.tokens_seen),)))

    # -- the end ---------------------------------------------------------------------------------------------------

    def result(self) -> Outcome:
        if self.plugin and not self.case.is_lossless:
            self.trace.figures = self.beside_one_process()
        self.trace.weights, self.trace.masters = full_weights(self.model), self.fp32_weights()
        return self.trace

    def fp32_weights(self) -> dict[str, torch.Tensor]:
        """The optimizer's, frozen by now or not."""
        from deepspeed.utils import safe_get_full_fp32_param

        ids = {id(p) for p in self.trained}
        for p in self.trained:  # DeepSpeed shows no others
            p.requires_grad_(True)
        return {name: safe_get_full_fp32_param(p) for name, p in self.model.named_parameters() if id(p) in ids}

    def beside_one_process(self) -> dict[str, float]:
        """How far the engine's loss and reduced gradient are from those of its exact weights, without any ZeRO."""
        from deepspeed.utils import safe_get_full_grad

        case, engine = self.case, self.engine
        batches = [self.batch() for _ in range(case.accumulation)]
        engine.eval()
        losses = [evaluated(engine, (batches[0],))]
        engine.train()
        torch.manual_seed(7 + self.rank)
        *before, last = ((tokens,) for tokens in batches)
        losses += [*trained(engine, before), forward_backward(engine, last)]
        named = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
        gradient = torch.cat([safe_get_full_grad(p).float().flatten() for p in named.values()])
        weights = full_weights(engine.module)
        engine.step()
        plain = make_model(dataclasses.replace(case, spans=()))
        for name, p in plain.named_parameters():
            p.requires_grad_(name in named)
        exact = self.in_one_process(plain, weights, batches)
        figures = _apart((losses, gradient), exact)
        size = 0.0 if case.falls_back else weight_error(case)
        noise = torch.Generator().manual_seed(case.seed)  # all ranks draw the same
        rounded = [
            _apart(self.in_one_process(plain, _with_noise(weights, size, noise), batches), exact)
            for _ in range(ROUNDED if size else 0)
        ]
        for name in ("loss", "gradient"):
            figures[f"rounded_{name}"] = (sum(one[name] ** 2 for one in rounded) / ROUNDED) ** 0.5
        return figures

    def in_one_process(self, plain, weights, batches) -> tuple[list[float], torch.Tensor]:
        """Losses (the first one in evaluation) and the mean gradient over ranks of a model without any ZeRO."""
        with torch.no_grad():
            for name, p in plain.named_parameters():
                p.copy_(weights[name])
        plain.eval()
        with torch.no_grad():
            losses = [float(plain(batches[0]))]
        plain.train()
        plain.zero_grad()
        torch.manual_seed(7 + self.rank)
        for tokens in batches:
            loss = plain(tokens)
            (loss / self.case.accumulation).backward()
            losses.append(loss.item())
        trained = [p for p in plain.parameters() if p.requires_grad]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        gradient = torch.cat([grad.float().flatten() for grad in grads])
        dist.all_reduce(gradient)
        return losses, gradient / dist.get_world_size()

    def destroy(self) -> None:
        for engine in (self.engine, self.reference):
            if engine is not None:
                engine.destroy()


def _with_noise(weights, size: float, generator) -> dict[str, torch.Tensor]:
    """The weights, with normal noise on matrices of `size` times their root mean square."""
    noisy = dict(weights)
    for name, weight in weights.items():
        if weight.dim() > 1:
            noise = torch.randn(weight.shape, generator=generator)
            noisy[name] = weight + size * weight.float().square().mean().sqrt() * noise
    return noisy


def _apart(ours, exact) -> dict[str, float]:
    """How far losses and gradient are from the exact ones, relative to those."""
    (losses, gradient), (exact_losses, exact_gradient) = ours, exact
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, exact_losses)),
        "gradient": float((gradient - exact_gradient).norm() / exact_gradient.norm()),
    }


def _dimensions(p) -> int:
    return len(getattr(p, "ds_shape", p.shape))


def _set_weights(model, weights) -> None:
    import deepspeed

    partitioned = [p for p in model.parameters() if hasattr(p, "ds_id")]
    context = deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0) if partitioned else None
    with context or contextlib.nullcontext(), torch.no_grad():
        for name, p in model.named_parameters():
            if not partitioned or dist.get_rank() == 0:
                p.copy_(weights[name])


def _what(event: str) -> str:
    return event.split(":")[2]


# -- comparing ---------------------------------------------------------------------------------------------------------


def compare(case: Case, plugin: Trace, stock: Trace) -> dict[str, float]:
    """Figures of how the two runs differ.

    Raises:
        Mismatch: by more than the case's recipe allows; for `lossless` by one bit.
    """
    if not case.is_lossless:
        apart = max(abs(a - b) / abs(b) for a, b in zip(plugin.losses, stock.losses))
        return check_figures(case, {"losses": apart})
    must_be_same(plugin, stock)
    return {}


def check_figures(case: Case, figures: dict[str, float]) -> dict[str, float]:
    """The figures, which are within what the case's recipe allows.

    Raises:
        Mismatch: they are not.
    """
    rounded = {name: value for name, value in figures.items() if name.startswith("rounded_")}
    allowed = dataclasses.asdict(tolerance(case, **rounded))
    too_large = [f"{n}: {figures[n]} > {allowed[n]}" for n in allowed if n in figures and not figures[n] <= allowed[n]]
    if too_large:
        raise Mismatch("; ".join(too_large))
    return figures


def must_be_same(ours: Trace, theirs: Trace, but=()) -> None:
    """Every bit."""
    if found := differing(ours, theirs, but):
        raise Mismatch(found)


def check_neutral(case: Case, plugin: Trace) -> None:
    """Looking at weights, saving and evaluating change no bit of what comes afterwards.

    `lossless` is compared with stock, bit for bit, anyway.

    Raises:
        Mismatch: a run without them ends elsewhere.
    """
    if case.is_lossless or not any(_what(event) in case.neutral for event in case.events):
        return
    events = tuple(event for event in case.events if _what(event) not in case.neutral)
    must_be_same(plugin, train(dataclasses.replace(case, events=events), plugin=True), but=["seen"])
