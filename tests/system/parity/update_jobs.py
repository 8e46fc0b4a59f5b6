"""Jobs with an optimizer whose update the package does not know: one of whole matrices, put into its table."""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from models import batches, ds_config, full_weights, llama, section
from running import forward_backward, shared_folder, switch
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
    """What one row or column alone does not tell."""
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
        self.shapes.add(tuple(weight.shape))
        velocity = options["momentum"] * states[0] + grad
        return weight - options["lr"] * direction(velocity), [velocity]


def engine_of(update, lr=0.05, momentum=0.9, seed=0, **options):
    UPDATES["Normalized"] = update
    switch(True)
    config = ds_config(section("lossless", **{**fields(), "optimizer": FORMATS, **options}), "fp32")
    model = llama(layers=1, seed=seed)
    optimizer = Normalized(model.parameters(), lr, momentum)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _seen(look, engine, *args):
    return {name: look(param, *args).double() for name, param in engine.module.named_parameters()}


def beside_float64(steps=4):
    """(largest error of a weight over its change, of a velocity over its amax, shapes that were not whole, losses)."""
    update = NormalizedUpdate()
    engine = engine_of(update)
    shapes = {tuple(param.ds_shape) for param in engine.module.parameters()}
    weight_error, velocity_error, losses = 0.0, 0.0, []
    for tokens in batches(steps, dist.get_rank()):
        losses.append(forward_backward(engine, tokens))
        before, grads = _seen(safe_get_full_fp32_param, engine), _seen(safe_get_full_grad, engine)
        velocities = _seen(safe_get_full_optimizer_state, engine, "velocity")
        engine.step()
        after, written = (
            _seen(safe_get_full_fp32_param, engine),
            _seen(safe_get_full_optimizer_state, engine, "velocity"),
        )
        for name, weight in before.items():
            velocity = 0.9 * velocities[name] + grads[name]
            change = 0.05 * direction(velocity)
            weight_error = max(weight_error, ((after[name] - weight + change).abs().max() / change.abs().max()).item())
            amax = velocity.abs().max()
            velocity_error = max(velocity_error, ((written[name] - velocity).abs().max() / amax).item())
    return weight_error, velocity_error, update.shapes - shapes, losses


def resumed(steps=3):
    """Whether a run that loads a checkpoint, which holds equal slices, goes on bit for bit; the states it holds."""
    folder = shared_folder()
    data = list(batches(2 * steps, dist.get_rank()))

    def train(engine, some):
        for tokens in some:
            forward_backward(engine, tokens)
            engine.step()
        return full_weights(engine.module), _seen(safe_get_full_optimizer_state, engine, "velocity")

    engine = engine_of(NormalizedUpdate())
    train(engine, data[:steps])
    engine.save_checkpoint(folder, tag="half")
    saved = engine.optimizer.state_dict()["optimizer_state_dict"]["state"]
    expected = train(engine, data[steps:])
    engine.destroy()
    engine = engine_of(NormalizedUpdate(), seed=3)
    engine.load_checkpoint(folder, tag="half")
    found = train(engine, data[steps:])
    equal = all(torch.equal(a[name], b[name]) for a, b in zip(expected, found) for name in a)
    return equal, {tuple(state) for state in saved.values()}


def refusals():
    """What is said of matrices that are cut, and of options that the update refuses."""
    said = []
    for options in ({"partition_split": "balance"}, {"momentum": 1.0}):
        try:
            engine_of(NormalizedUpdate(), **options)
        except ValueError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
