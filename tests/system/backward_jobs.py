"""Random programs of forwards and backwards on ranks, beside plain torch in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from models import full_weights, section
from running import Spec, allow_fp16_on_cpu
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, VOCABULARY, LENGTH = 32, 16, 6


class Block(nn.Module):
    """A repeated block, the first of whose layers is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(torch.tanh(self.frozen(x)))))


class TwoOutputs(nn.Module):
    """Two outputs over shared blocks: each has layers that the other does not use, and `gain` is read by name."""

    def __init__(self, checkpointing: str = "none") -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.left, self.right = nn.Linear(WIDTH, VOCABULARY), nn.Linear(WIDTH, VOCABULARY)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor, last_block: bool = True) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        for block in list(self.blocks)[: 3 if last_block else 2]:
            x = x if self.checkpointing != "none" and not x.requires_grad else x * self.gain
            if self.checkpointing == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.left(x), self.right(x.tanh())


@dataclass(frozen=True)
class Backward:
    """One backward.

    `of`: (number of the forward, output) whose losses are added; `again`: its graph is needed once more; `by`:
    "engine", or "tensor" for loss.backward().
    """

    of: tuple[tuple[int, int], ...]
    by: str
    again: bool


def takes_tensors() -> bool:
    """Whether this DeepSpeed knows loss.backward(): 0.18.0 knows engine.backward(loss) alone."""
    from deepspeed.runtime.base_optimizer import ZeROOptimizer

    return hasattr(ZeROOptimizer, "enter_backward")


def draw(seed: int, accumulation: int) -> list[list[list[object]]]:
    """A program: for each step, for each micro-batch, what happens; an int is a forward, with that number."""
    rng = random.Random(seed)
    return [_draw_step(rng, accumulation) for _ in range(2)]


def _draw_step(rng: random.Random, accumulation: int) -> list[list[object]]:
    micro_batches: list[list[object]] = []
    losses: list[tuple[int, int]] = []  # of forwards that have been, and not gone backward
    number = 0
    for micro in range(accumulation):
        mine: list[object] = []
        for _ in range(rng.choice([1, 1, 2])):
            mine.append(number)
            losses += [(number, 0), (number, 1)]
            number += 1
            if rng.random() < 0.5 and len(losses) > 2:
                mine.append(_draw_backward(rng, losses))
        least = 0 if micro == accumulation - 1 else rng.choice([0, 1, 2])
        while len(losses) > least:
            mine.append(_draw_backward(rng, losses))
        micro_batches.append(mine)
    return micro_batches


def _draw_backward(rng: random.Random, losses: list[tuple[int, int]]) -> Backward:
    of = tuple(rng.sample(losses, min(len(losses), rng.choice([1, 1, 1, 2]))))
    stays = rng.random() < 0.2
    if not stays:
        for one in of:
            losses.remove(one)
    numbers = {number for number, _ in of}
    return Backward(of, rng.choice(["engine", "tensor"]), any(number in numbers for number, _ in losses))


def batch(seed: int, rank: int, step: int, number: int, device="cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(((seed * 7 + step) * 31 + number) * 13 + rank)
    return torch.randint(0, VOCABULARY, (2, 2, LENGTH), generator=generator).to(device).unbind()


def uses_last_block(seed: int, step: int, number: int) -> bool:
    return (seed + step + number) % 3 > 0


def loss_of(outputs: tuple[Tensor, Tensor], which: int, labels: Tensor) -> Tensor:
    """The losses of the two outputs differ in size, so that none hides behind the other."""
    logits = outputs[which].float().flatten(0, 1)
    return (1.0 + which) * nn.functional.cross_entropy(logits, labels.flatten())


def run_step(call, program, seed, rank, step, backward) -> Iterator[None]:
    """Run a step's micro-batches with the model `call`, one after the other."""
    outputs, labels = {}, {}
    for mine in program:
        for what in mine:
            if isinstance(what, int):
                tokens, labels[what] = batch(seed, rank, step, what, next(call.parameters()).device)
                outputs[what] = call(tokens, last_block=uses_last_block(seed, step, what))
            else:
                loss = sum(loss_of(outputs[number], which, labels[number]) for number, which in what.of)
                backward(loss, what)
        yield


def exact_gradients(weights, checkpointing, program, seed, step, accumulation) -> dict[str, Tensor]:
    """Mean over ranks of what plain torch adds up."""
    model = TwoOutputs(checkpointing)
    model.load_state_dict(weights)  # on the CPU, wherever these are

    def backward(loss: Tensor, what: Backward) -> None:
        (loss / accumulation).backward(retain_graph=what.again)

    for _ in run_step(model, program, seed, dist.get_rank(), step, backward):
        pass
    return mean_gradients(model)


def mean_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Over ranks, of what is trained; zeros where a rank has none."""
    found = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            total = grad.to(get_accelerator().current_device_name())
            dist.all_reduce(total)
            found[name] = total.cpu() / dist.get_world_size()
    return found


def engine_of(recipe: str, fields: dict | None = None, make=TwoOutputs, dtype: str = "fp32", **options):
    """An engine over the same small model each time."""
    given = dict(fields or {})
    computes, stored = {"compute": {"min_features": 16}}, {"frozen": {"modules": "frozen"}}
    for more in [computes] * ("fp8" in recipe) + [stored] * (recipe == "qlora"):
        for key, values in more.items():
            given[key] = {**values, **given.get(key, {})}
    torch.manual_seed(0)
    optimizer = "adamw" if "fp8-lm" in recipe else "sgd"
    allow_fp16_on_cpu()
    return Spec(section(recipe, **given), dtype, options, make, optimizer, 1e-2).engine()


def run_programs(cases: list[dict]) -> list[list[float]]:
    """For each case, for each step, how far the engine's gradient is from plain torch's, as a part of its norm."""
    return [_run_program(**case) for case in cases]


def _run_program(
    recipe, seed, fields=None, dtype="fp32", checkpointing="none", accumulation=1, **options
) -> list[float]:
    print(f"CASE {recipe} {seed} {fields} {checkpointing} {accumulation} {options}", flush=True)
    options["gradient_accumulation_steps"] = accumulation
    engine = engine_of(recipe, fields, lambda: TwoOutputs(checkpointing), dtype, **options)

    def backward(loss: Tensor, what: Backward) -> None:
        if what.by == "engine" or not takes_tensors():
            engine.backward(loss, retain_graph=what.again)
        elif dtype == "fp16":
            engine.scale(loss).backward(retain_graph=what.again)
        else:
            loss.backward(retain_graph=what.again)

    errors = []
    for step, program in enumerate(draw(seed, accumulation)):
        weights = full_weights(engine.module)
        exact = exact_gradients(weights, checkpointing, program, seed, step, accumulation)
        for micro, _ in enumerate(run_step(engine, program, seed, dist.get_rank(), step, backward)):
            if micro == accumulation - 1:
                errors.append(_error(exact, engine))
            engine.step()
        if recipe == "lossless":  # with plain SGD
            stepped = full_weights(engine.module)
            moved = {name: (weights[name] - stepped[name]).cpu() / 1e-2 for name in exact}
            errors.append(_relative(exact, moved))
    engine.destroy()
    return errors


class Injected(RuntimeError):
    """Raised on purpose."""


class Tiled(torch.autograd.Function):
    """A loss whose gradients are computed in its forward, as DeepSpeed's TiledFusedLogitsLoss does."""

    @staticmethod
    def forward(ctx, x: Tensor, model: TwoOutputs, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            mine = x.detach().requires_grad_()
            loss = nn.functional.cross_entropy(model.left(mine).flatten(0, 1), labels.flatten())
            torch.autograd.backward(loss)
        ctx.save_for_backward(mine.grad)
        return loss.detach()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad * ctx.saved_tensors[0], None, None


class WithTiledLoss(TwoOutputs):
    """Its first output is a loss that has gone backward inside of the forward."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x * self.gain)
        return Tiled.apply(x, self, labels)


def _failing(grad: Tensor) -> None:
    raise Injected


class Odd:
    """Things that a script may do between two steps. Each returns the losses to be counted, by number of the batch."""

    def __init__(self, engine) -> None:
        self.engine = engine

    def losses(self, number: int, call=None) -> list[Tensor]:
        tokens, labels = batch(0, dist.get_rank(), 0, number, self.engine.device)
        outputs = (call or self.engine)(tokens, last_block=uses_last_block(0, 0, number))
        self.hidden = outputs
        return [loss_of(outputs, which, labels) for which in (0, 1)]

    def fail(self, loss: Tensor, retain: bool = False) -> None:
        """A backward that an exception ends when half of the blocks have their gradients."""
        handle = self.engine.module.blocks[0].up.weight.register_post_accumulate_grad_hook(_failing)
        with pytest.raises(Injected):
            loss.backward(retain_graph=retain)
        handle.remove()

    def module_alone(self):
        """The engine's forward is never called."""
        one, other = self.losses(0, self.engine.module)
        one.backward(retain_graph=True)
        other.backward()
        return [(0, 0), (0, 1)]

    def module_alone_by_engine(self):
        one, other = self.losses(0, self.engine.module)
        self.engine.backward(one, retain_graph=True)
        self.engine.backward(other)
        return [(0, 0), (0, 1)]

    def both_ways(self):
        """Half of it through the module, half through the engine."""
        one, other = self.losses(0, self.engine.module), self.losses(1)
        other[0].backward()
        one[1].backward()
        return [(1, 0), (0, 1)]

    def same_loss_twice(self):
        one, _ = self.losses(0)
        one.backward(retain_graph=True)
        one.backward(retain_graph=True)
        self.engine.backward(one)
        return [(0, 0), (0, 0), (0, 0)]

    def failure_then_the_other(self):
        """The exception ends the first backward of a step: what it has brought is dropped."""
        one, other = self.losses(0)
        self.fail(one, retain=True)
        other.backward()
        return [(0, 1)]

    def failure_after_one(self):
        """A failure whose earlier parts cannot be told from what it has brought."""
        one, other = self.losses(0)
        one.backward(retain_graph=True)
        self.fail(other, retain=True)
        with pytest.raises(RuntimeError, match="an exception has ended the last backward"):
            other.backward()
        self.engine.optimizer.zero_grad()
        one, other = self.losses(1)
        one.backward(retain_graph=True)
        other.backward()
        return [(1, 0), (1, 1)]

    def failure_then_step(self):
        """A step with half of the gradients is refused."""
        self.fail(self.losses(0)[0])
        with pytest.raises(RuntimeError, match="an exception has ended the last backward"):
            self.engine.step()
        self.engine.optimizer.zero_grad()
        self.losses(1)[1].backward()
        return [(1, 1)]

    def failed_forward_between(self, call=None):
        """A forward is ended by an exception, and then an earlier loss goes backward."""
        one, other = self.losses(0)
        one.backward(retain_graph=True)
        handle = self.engine.module.blocks[1].register_forward_pre_hook(lambda module, args: _failing(None))
        with pytest.raises(Injected):
            self.losses(1, call)
        handle.remove()
        if call is None:
            full_weights(self.engine.module)  # which stock refuses here
        other.backward()
        return [(0, 0), (0, 1)]

    def failed_forward_of_the_module(self):
        """The same of the module alone: what has come unnoticed is reduced when the step begins."""
        counted = self.failed_forward_between(self.engine.module)
        self.engine.optimizer.reduction.finish()
        return counted

    def gradient_of_an_output(self):
        """torch.autograd.grad reaches modules and gives no parameter a gradient."""
        one, other = self.losses(0)
        torch.autograd.grad(one, self.hidden[0], retain_graph=True)
        self.engine.backward(other)
        return [(0, 1)]

    def gradient_of_an_input(self):
        """It reaches all modules; a rank may ask for one by itself where all is gathered, so nothing may be sent."""
        import deepspeed

        seen = []
        handle = self.engine.module.embed.register_forward_hook(lambda module, args, output: seen.append(output))
        one, other = self.losses(0)
        grad_of = torch.autograd.grad(one, seen[0], retain_graph=True)[0]
        with deepspeed.zero.GatheredParameters(list(self.engine.module.parameters())):
            if dist.get_rank() == 0:
                alone, _ = self.losses(0, self.engine.module)
                assert torch.autograd.grad(alone, seen[1])[0].shape == grad_of.shape
        handle.remove()
        self.engine.backward(other)
        return [(0, 1)]

    def tensors_of_outputs(self):
        """No loss at all: outputs go backward with gradients of their own."""
        for which, loss in enumerate(self.losses(0)):
            (grad,) = torch.autograd.grad(loss, self.hidden[which], retain_graph=True)
            self.hidden[which].backward(grad, retain_graph=which == 0)
        return [(0, 0), (0, 1)]

    def looked_at_between(self):
        """Gradients are looked at after the first of two backwards."""
        from deepspeed.utils import safe_get_full_grad

        one, other = self.losses(0)
        self.engine.backward(one, retain_graph=True)
        for p in self.engine.module.parameters():
            safe_get_full_grad(p)
        self.engine.backward(other)
        return [(0, 0), (0, 1)]


ODD = [name for name in vars(Odd) if not name.startswith("_") and name not in ("losses", "fail")]


def _error(exact: dict[str, Tensor], engine) -> float:
    """The norm of how far the engine's reduced gradient is from the exact one, as a part of that one's."""
    from deepspeed.utils import safe_get_full_grad

    scale = float(engine.optimizer.loss_scale)
    found = {n: safe_get_full_grad(p) / scale for n, p in engine.module.named_parameters() if n in exact}
    return _relative(exact, found)


def _relative(exact: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    missed = sum(float((g - found[n].to(g.device)).double().square().sum()) for n, g in exact.items())
    return (missed / sum(float(g.double().square().sum()) for g in exact.values())) ** 0.5


def odd_ones(recipe: str, fields: dict | None = None, names=tuple(ODD)) -> dict[str, float]:
    """Do odd things: how far the gradient is from plain torch's, and then that of an ordinary step."""
    found = {}
    for name in names:
        print(f"ODD {name}", flush=True)
        engine = engine_of(recipe, fields)
        for then in (name, "same_loss_twice"):
            weights = full_weights(engine.module)
            program = [[0, 1, Backward(tuple(getattr(Odd(engine), then)()), "tensor", False)]]
            exact = exact_gradients(weights, "none", program, 0, 0, 1)
            found[name] = max(_error(exact, engine), found.get(name, 0.0))
            engine.step()
        engine.destroy()
    return found


def tiled(recipe: str, fields: dict | None = None) -> list[float]:
    """The same of two backwards in a step, each of a loss whose head has gone backward in the forward."""
    engine, errors = engine_of(recipe, fields, WithTiledLoss), []
    for step in range(2):
        plain = WithTiledLoss()
        plain.load_state_dict(full_weights(engine.module))
        for number in range(2):
            plain(*batch(0, dist.get_rank(), step, number)).backward()
            loss = engine(*batch(0, dist.get_rank(), step, number, engine.device))
            loss.backward() if step else engine.backward(loss)
        errors.append(_error(mean_gradients(plain), engine))
        engine.step()
    engine.destroy()
    return errors
