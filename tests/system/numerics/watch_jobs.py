"""Jobs about the watch, and what a run is like that has fallen back, that run on ranks."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from models import batches, compiled_by, ds_config, full_weights, llama, make_engine, section
from numerics_jobs import WATCHED, decibels, look, small_model, sums_of
from ranks import printed
from running import loss_of, switch

from zeropp_fp8.numerics import watch as watch_module

SPIKE_AT, STEPS = 10, 13


def watched(watch="fall_back", rank=2, factor=1000.0, recipe="zeropp", accumulation=1, direct=False, **fields):
    """One rank's loss jumps in one step.

    Returns:
        (after each step whether it has fallen back, and whether layers are plain; how it ended; of the last step the dB
        of reduced gradients and the loss, of engine and of a plain model with the same weights).
    """
    switch(True)
    model = llama(intermediate=128)
    numerics = {"watch": watch}
    engine = make_engine(
        model,
        ds_config(section(recipe, numerics=numerics, **fields), gradient_accumulation_steps=accumulation),
    )
    session, found = engine.zeropp_fp8_session, []
    plain = llama(intermediate=128)
    data = batches(STEPS * accumulation, dist.get_rank())
    try:
        for step in range(1, STEPS + 1):
            if step == STEPS:
                plain.load_state_dict(full_weights(engine.module))
            own_losses, plain_losses = [], []
            for _ in range(accumulation):
                tokens = next(data)
                loss = loss_of(engine, tokens)
                own_losses.append(loss.item())
                if step == SPIKE_AT and dist.get_rank() == rank:
                    loss = loss * factor
                if direct:
                    loss.backward()
                else:
                    engine.backward(loss)
                if step == STEPS:
                    of_plain = loss_of(plain, tokens)
                    (of_plain / accumulation).backward()
                    plain_losses.append(of_plain.item())
                    reduced = {name: safe_get_full_grad(param) for name, param in engine.module.named_parameters()}
                engine.step()
            formats = (session.formats.weights, session.formats.within, session.formats.between)
            layer = engine.module.get_submodule(WATCHED)
            found.append((formats == (None, None, None), type(layer) is torch.nn.Linear))
    except (FloatingPointError, RuntimeError) as error:
        return found, repr(error), None, None
    finally:
        engine.destroy()
    pairs = []
    for name, param in plain.named_parameters():
        exact = param.grad.double()
        dist.all_reduce(exact)
        pairs.append((exact / dist.get_world_size(), reduced[name]))
    return found, None, decibels(sums_of(pairs)), (own_losses, plain_losses)


def watch_all(cases):
    return [watched(**case) for case in cases]


SOON = 3  # the step that jumps where two losses are enough to compare with


def _engine(watch, recipe="zeropp", lora=False, ds=None, **fields):
    switch(True)
    watch_module.LEAST = SOON - 1
    config = ds_config(section(recipe, numerics={"watch": watch}, **fields), **(ds or {}))
    return make_engine(small_model(lora), config)


def _spiking_step(engine, tokens, step):
    for _ in range(engine.gradient_accumulation_steps()):
        loss = loss_of(engine, tokens)
        engine.backward(loss * (1000.0 if step == SOON else 1.0))
        engine.step()
    return loss.item()


def jumping(steps, high):
    """What is said of a watch in `steps` steps, of which those in `high` have losses that jump."""
    engine = _engine("fall_back")
    before = len(printed(dist.get_rank()))
    for step, tokens in enumerate(batches(steps, dist.get_rank()), start=1):
        _spiking_step(engine, tokens, SOON if step in high else 0)
    engine.destroy()
    return printed(dist.get_rank())[before:]


def sampled(path, recipe, accumulation):
    """Kinds in the samples of steps of which one falls back."""
    small = {"compute": {"format": "fp8", "min_features": 16, "skip_modules": ["lm_head"]}}
    numerics = {"watch": "fall_back", "every": 1, "parts": 1, "file": path}
    switch(True)
    watch_module.LEAST = SOON - 1
    options = {"gradient_accumulation_steps": accumulation}
    engine = make_engine(small_model(), ds_config(section(recipe, numerics=numerics, **small), **options))
    for step, tokens in enumerate(batches(SOON + 2, dist.get_rank()), start=1):
        _spiking_step(engine, tokens, step)
    engine.destroy()
    dist.barrier()
    return [{row["kind"] for row in json.loads(line)["rows"]} for line in Path(path).read_text().splitlines()]


def resumed(folder, cases):
    """A run that falls back, saves, and goes on; beside it runs that resume from what it has saved, in a fresh engine.

    Of each case: (losses after the checkpoint and those of the first run, the last weights of both, whether the engine
    has fallen back, the losses that the watch compares with, what was printed while it loaded).
    """
    return [_resumed(os.path.join(folder, str(index)), **case) for index, case in enumerate(cases)]


def _resumed(folder, watch="fall_back", **case):
    first = _engine("fall_back", **case)
    tokens = [*batches(SOON + 3, dist.get_rank())]
    for step, one in enumerate(tokens[: SOON + 1], start=1):
        _spiking_step(first, one, step)
    first.save_checkpoint(folder)
    losses = [_spiking_step(first, one, SOON + 2) for one in tokens[SOON + 1 :]]
    weights = full_weights(first.module)
    first.destroy()
    second = _engine(watch, **case)
    before = len(printed(dist.get_rank()))
    second.load_checkpoint(folder)
    said = printed(dist.get_rank())[before:]
    session = second.zeropp_fp8_session
    compared_with = [len(one.earlier) for one in session.parts if isinstance(one, watch_module.Watch)]
    fell_back = session.formats.fell_back, session.formats.weights is session.formats.between is None
    again = [_spiking_step(second, one, SOON + 2) for one in tokens[SOON + 1 :]]
    same = all(torch.equal(weight, weights[name]) for name, weight in full_weights(second.module).items())
    second.destroy()
    return again == losses, same, fell_back, compared_with, said


def fallen(cases):
    """Of each case what is said, and what the next step is like: `_next_step`."""
    found = []
    for case in cases:
        before = len(printed(dist.get_rank()))
        with compiled_by("aot_eager"):
            lora, engine = case.get("lora", False), _engine("fall_back", **case)
            for step, tokens in enumerate(batches(SOON, dist.get_rank()), start=1):
                _spiking_step(engine, tokens, step)
            found.append((printed(dist.get_rank())[before:], _next_step(engine, small_model(lora))))
        engine.destroy()
    return found


def without_memory():
    """What two ranks raise where one of them has no memory to fall back."""
    engine = _engine("fall_back", "fp8-lm-o1")
    if dist.get_rank() == 1:

        def formats_changed():
            raise torch.OutOfMemoryError("out of memory")

        engine.optimizer.gradients.store.formats_changed = formats_changed
    try:
        for step, tokens in enumerate(batches(SOON, dist.get_rank()), start=1):
            _spiking_step(engine, tokens, step)
    except RuntimeError as error:
        return str(error)


def _next_step(engine, plain):
    """Of one more step, against a plain model with the same weights and an update by the formulas.

    {"arrived otherwise": weights that had other bits than those at rest, of "seen", "losses": both, "gradients", and
    "weights" after the update: dB, "sent": bytes of all ranks, of weights in forward and of gradients, "numel": that
    are trained, "frozen": formats of weights that rest as codes}
    """
    (tokens,) = batches(1, dist.get_rank(), seed=7)
    at_rest = full_weights(engine.module)
    plain.load_state_dict(at_rest)
    trained = {name: param for name, param in engine.module.named_parameters() if param.requires_grad}
    states = {name: states_of(param) for name, param in trained.items()}
    arrived, handles = {}, []
    for prefix, module in engine.module.named_modules():
        own = {f"{prefix}.{name}": param for name, param in module.named_parameters(recurse=False)}
        sees = functools.partial(look, own, at_rest, arrived)
        handles += [module.register_forward_pre_hook(sees)] if own else []
    before = sent_of(engine)
    losses = []
    for _ in range(engine.gradient_accumulation_steps()):
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        reduced = {name: safe_get_full_grad(param).double() for name, param in trained.items()}
        engine.step()
    for handle in handles:
        handle.remove()
    of_plain = loss_of(plain, tokens)
    of_plain.backward()
    losses = loss.item(), of_plain.item()
    gradients, weights = [], []
    after = full_weights(engine.module)
    for name, param in plain.named_parameters():
        if name in trained:
            exact = param.grad.double()
            dist.all_reduce(exact)
            exact /= dist.get_world_size()
            gradients.append((exact, reduced[name].view_as(exact)))
            weights.append((updated(states[name], exact), after[name]))
    units = engine.optimizer.gatherer.units
    frozen = {unit.format_of(param).name for unit in units if unit.storage.sends_what_rests for param in unit.params}
    return {
        "arrived otherwise": sorted(name for name, same in arrived.items() if not same),
        "seen": len(arrived),
        "losses": losses,
        "gradients": decibels(sums_of(gradients)),
        "weights": decibels(sums_of(weights)),
        "sent": {kind: value - before[kind] for kind, value in sent_of(engine).items()},
        "numel": sum(param.ds_numel for param in trained.values()),
        "frozen": frozen,
    }


def states_of(param):
    """(master weight, both moments) in fp64."""
    moments = (safe_get_full_optimizer_state(param, key).double() for key in ("exp_avg", "exp_avg_sq"))
    return (safe_get_full_fp32_param(param).double(), *moments)


def updated(states, gradient, step=SOON + 1, lr=1e-3, betas=(0.9, 0.999), epsilon=1e-8, decay=0.01):
    """AdamW by its formulas, of one step more."""
    weight, first, second = states
    first = betas[0] * first + (1 - betas[0]) * gradient.view_as(first)
    second = betas[1] * second + (1 - betas[1]) * gradient.view_as(second).square()
    root = (second / (1 - betas[1] ** step)).sqrt() + epsilon
    return weight * (1 - lr * decay) - lr * first / (1 - betas[0] ** step) / root


def sent_of(engine):
    """Bytes that all ranks have sent so far, by kind."""
    report = engine.zeropp_fp8_session.ledger.report(total=True)
    return {kind: report["steps"] * sum(report["per_step"][kind].values()) for kind in ("weights_forward", "gradients")}
