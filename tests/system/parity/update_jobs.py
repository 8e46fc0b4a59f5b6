"""Jobs with an optimizer whose update the package does not know: one of whole matrices, put into its table."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from models import batches, llama, section
from ranks import attempt
from running import Spec, backward, changed, forward, loaded, run, saved, see, shared_folder, step, update
from whole_jobs import fields

from zeropp_fp8.optim import UPDATES, Update

FORMATS = {"master_format": "fp32", "exp_avg_format": "fp16", "exp_avg_sq_format": "fp32"}


class Normalized(torch.optim.Optimizer):
    """Momentum over its norm; of a matrix the momentum has first lost the mean of each of its rows and columns."""

    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def step(self, closure=None):
        raise NotImplementedError


def direction(momentum):
    """Return a direction that one row or column alone does not tell."""
    if momentum.dim() == 2:
        momentum = momentum - momentum.mean(dim=0, keepdim=True) - momentum.mean(dim=1, keepdim=True)
    return momentum / (momentum.norm() + 1e-12)


class NormalizedUpdate(Update):
    states = {"velocity": "exp_avg"}
    needs_whole = True

    def __init__(self):
        self.shapes = set()

    def refusals(self, options):
        if options["momentum"] >= 1:
            yield '"momentum" must be below 1'

    def options(self, optimizer, group):
        return {"lr": float(group["lr"]), "momentum": float(group["momentum"])}

    def compute(self, weight, grad, states, step, options):
        self.shapes.add(tuple(weight.shape[1:]))
        velocity = options["momentum"] * states[0] + grad
        return weight - options["lr"] * torch.stack(list(map(direction, velocity))), [velocity]


def spec_of(known, lr=0.05, momentum=0.9, seed=0, **options):
    """Of an engine that trains by the update `known`."""
    UPDATES["Normalized"] = known
    the_section = section("lossless", **{**fields(), "optimizer": FORMATS, **options})
    optimizer = functools.partial(Normalized, lr=lr, momentum=momentum)
    return Spec(the_section, model=functools.partial(llama, layers=1, seed=seed), optimizer=optimizer)


NUMBERS = (safe_get_full_fp32_param, functools.partial(safe_get_full_optimizer_state, optim_state_key="velocity"))


def numbers(engine, *looks):
    """{name: what is seen of a parameter} by each of the looks."""
    return [{name: look(param).double() for name, param in engine.module.named_parameters()} for look in looks]


def held(engine):
    """Shapes of whole parameters, and names of the optimizer's states as DeepSpeed saves them."""
    states = engine.optimizer.state_dict()["optimizer_state_dict"]["state"]
    return {tuple(param.ds_shape) for param in engine.module.parameters()}, {tuple(state) for state in states.values()}


def trained_and_resumed(split, steps=4):
    """(largest error of a weight over its change, of a velocity over its amax, shapes that were not whole, losses,
    states that a checkpoint holds, names of what differs in a run that has gone on from a checkpoint).

    Errors are those of steps written out in float64. The checkpoint holds equal slices.
    """
    known, folder, half = NormalizedUpdate(), shared_folder(), steps // 2
    data = list(batches(steps, dist.get_rank()))
    seen = [forward, backward, see(numbers, *NUMBERS, safe_get_full_grad), update, see(numbers, *NUMBERS)]
    trace = run(
        spec_of(known, partition_split=split), [*seen * half, saved(folder, "half"), *seen * half, see(held)], data=data
    )
    *looks, (whole, states) = trace.seen
    weight_error, velocity_error = 0.0, 0.0
    for (weights, velocities, grads), (after, written) in zip(looks[::2], looks[1::2]):
        for name, weight in weights.items():
            velocity = 0.9 * velocities[name] + grads[name]
            change = 0.05 * direction(velocity)
            weight_error = max(weight_error, ((after[name] - weight + change).abs().max() / change.abs().max()).item())
            amax = velocity.abs().max()
            velocity_error = max(velocity_error, ((written[name] - velocity).abs().max() / amax).item())
    events = [loaded(folder, "half"), *[step] * half, see(numbers, *NUMBERS)]
    resumed = run(spec_of(NormalizedUpdate(), seed=3, partition_split=split), events, data=data[half:])
    others = [name for pair in zip(looks[-1], resumed.seen[0]) for name in changed(*pair)]
    return weight_error, velocity_error, known.shapes - whole, trace.losses, states, others


def refusals():
    """Return what is said of slices, and of options that the update refuses."""
    slices = {"partition": "slice", "partition_split": "balance"}
    return [attempt(spec_of(NormalizedUpdate(), **options).engine) for options in (slices, {"momentum": 1.0})]
