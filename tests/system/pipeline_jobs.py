"""Jobs about the pipeline of gathers and reductions inside an engine: limits, bytes, evaluations, writes, the end."""

from __future__ import annotations

import functools
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad
from models import batches, full_weights, llama, secondary_bytes, section
from running import (
    Spec,
    backward,
    evaluate,
    evaluated,
    forward,
    loaded,
    loss_of,
    on_engine,
    run,
    saved,
    see,
    shared_folder,
    step,
    update,
    within,
)
from torch import nn

import zeropp_fp8
from zeropp_fp8 import sharded
from zeropp_fp8.zero.gather.attached import unit_of
from zeropp_fp8.zero.report import predicted_bytes

LIMITS = {
    "none": (0, 0, 0),
    "tiny": (1, 1, 1),
    "small": (30_000, 70_000, 50_000),
    "far ahead": (10**9, 10**9, 1),
    "kept": (0, 10**9, 10**9),
    "default": (50_000_000, 1_000_000_000, 1_000_000_000),
}


def with_limits(limits, persistent_below=0):
    """zero_optimization with a name of LIMITS."""
    prefetch, live, reuse = LIMITS[limits]
    return {
        "stage3_prefetch_bucket_size": prefetch,
        "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": reuse,
        "stage3_param_persistence_threshold": persistent_below,
    }


small_llama = functools.partial(llama, layers=3, hidden=32, vocab=64)


def spec_of(recipe, limits="none", fields=None, model=small_llama, optimizer="adamw", **overrides):
    """Of an engine over a small model; `limits` also as (name, persistence threshold)."""
    limits = limits if isinstance(limits, tuple) else (limits,)
    config = {"zero_optimization": with_limits(*limits), **overrides}
    return Spec(section(recipe, **(fields or {})), config=config, model=model, optimizer=optimizer)


def some_batches(count, seed=1, same_on_all_ranks=False):
    rank = 0 if same_on_all_ranks else dist.get_rank()
    return list(batches(count, rank, length=8, vocab=64, seed=seed))


def units_of(engine):
    return engine.optimizer.gatherer.units


# -- limits


def count_ahead(engine, started):
    """Append the unit's elements whenever a gather is started ahead."""
    hops = engine.optimizer.gatherer.hops
    start = hops.start

    def counted(unit, ahead=False):
        if ahead:
            started.append(unit.numel)
        return start(unit, ahead)

    hops.start = counted


def train_with_limits(recipe, fields=None, steps=3, names=tuple(LIMITS), persistent_below=()):
    """{limits: (losses, gathers started ahead, bytes per step)}."""
    results = {}
    for case in [(name, 0) for name in names] + [("small", threshold) for threshold in persistent_below]:
        ahead = []
        events = [on_engine(count_ahead, ahead), *[step] * steps]
        trace = run(spec_of(recipe, case, fields), events, ("bytes",), some_batches(steps))
        results[case] = trace.losses, len(ahead), trace.bytes
    return results


# -- bytes


def sizes(engine):
    """Return what the formats say."""
    gatherer = engine.optimizer.gatherer
    params = gatherer.ownership.params.values()
    return {
        "payloads": sum(unit_of(p).format_of(p).payload_bytes(p.ds_tensor.ds_numel) for p in params),
        "predicted": predicted_bytes(engine.zeropp_fp8_session, gatherer),
        "quantized numel": sum(p.ds_numel for p in params if len(p.ds_shape) >= 2),
    }


def bytes_of_a_step(recipe, granularity, steps=2):
    """Return the ledger's bytes at the start, after each step and each of two evaluations; and those by the formats."""
    tokens, report = some_batches(steps), see(zeropp_fp8.wire_report)
    events = [report, *[step, report] * steps, *[evaluate(tokens[0]), report] * 2, see(sizes)]
    fields = {"gather_granularity": granularity, "weights": {"difference": "none"}}
    *reports, said = run(spec_of(recipe, fields=fields), events, data=tokens).seen
    return {"reports": reports, **said}


# -- evaluations between the steps


def generate(engine, tokens):
    engine.eval()
    with torch.no_grad():
        generated = engine.module.generate(input_ids=tokens[:, :3], max_new_tokens=2, do_sample=False)
    assert generated.shape == (2, 5)
    engine.train()


def infer(engine, tokens):
    with torch.inference_mode():
        loss_of(engine, tokens)


def interleaved(recipe, limits, fields=None, steps=3):
    """Losses of training alone; with evaluations and generation in between, and what those after a backward say of its
    batch; and with forwards under torch.inference_mode() before each step."""
    spec, data, events = spec_of(recipe, limits, fields), some_batches(steps), []
    for place, tokens in enumerate(data):
        events += [*map(evaluate, some_batches(2, seed=5)), forward, backward, evaluate(tokens), update]
        events += [on_engine(generate, tokens)] * (place % 2 == 0)
    between = run(spec, events, data=data).losses
    inference = run(spec, [event for tokens in data for event in (on_engine(infer, tokens), step)], data=data).losses
    return run(spec, [step] * steps, data=data).losses, between[2::4], between[3::4], inference


def frozen_between_forwards():
    """Losses around the freezing of some matrices: of an engine that gathered them before, and of one that did not."""
    fields = {"weights": {"format": "int8", "block_size": 128}, "frozen": {"format": "int4", "modules": "frozen"}}
    spec, evaluation = spec_of("lossless", fields=fields), evaluate(*some_batches(1))

    def freeze(engine):
        for name, param in engine.module.named_parameters():
            param.requires_grad_("up_proj" not in name)

    events = [evaluation, on_engine(freeze), evaluation]
    return run(spec, events).losses, run(spec, events[1:]).losses


# -- gradients that come in some micro-batches only


class Sometimes(nn.Module):
    """Matrices and a vector whose gradients are the inputs themselves; some are not used in each micro-batch."""

    def __init__(self):
        super().__init__()
        self.always = nn.Parameter(torch.zeros(24, 40))
        self.sometimes = nn.Parameter(torch.zeros(33, 20))
        self.vector = nn.Parameter(torch.zeros(50))

    def forward(self, inputs):
        parts = [(getattr(self, name) * inputs[name]).sum() for name in inputs]
        return torch.stack(parts).sum()


def micro_inputs(rank, micro):
    """Micro-batch 1 of 3 does not use `sometimes`."""
    generator = torch.Generator().manual_seed(100 * rank + micro)
    inputs = {name: torch.randn(p.shape, generator=generator) for name, p in Sometimes().named_parameters()}
    if micro == 1:
        del inputs["sometimes"]
    return inputs


def gradients(engine):
    return {name: safe_get_full_grad(p).double().clone() for name, p in engine.module.named_parameters()}


def accumulated_gradients(fields=None):
    """Reduced gradients after three micro-batches, twice (the second step must not see the first)."""
    spec = spec_of("zeropp", "none", fields, Sometimes, "sgd", gradient_accumulation_steps=3)
    data = [(micro_inputs(dist.get_rank() + 10 * number, micro),) for number in range(2) for micro in range(3)]
    return run(spec, [step, step, forward, backward, see(gradients), update] * 2, data=data).seen


# -- writes while units are on their way


def fresh_losses(recipe, weights, tokens):
    """The loss of an engine that never knew other weights than these, and of torch alone."""
    model = small_llama(seed=7)
    model.load_state_dict(weights)
    plain = evaluated(model, tokens)
    return *run(spec_of(recipe, model=lambda: model), [evaluate(tokens)]).losses, plain


def change(source, chosen):
    """A rank writes to those parameters of the model that are chosen."""

    def event(running):
        params = chosen(running.engine.module)
        with deepspeed.zero.GatheredParameters(params, modifier_rank=source):
            if dist.get_rank() == source:
                for param in params:
                    param.data.mul_(-0.7)

    return event


def writes_are_seen(recipe, limits, fields=None):
    """{write: (loss before, after, of a fresh engine and of torch alone, units under way, units live)}, same tokens."""
    folder, (tokens,), results = shared_folder(), some_batches(1, same_on_all_ranks=True), {}

    def check(name, *write):
        def event(running):
            engine = running.engine
            before, units = evaluated(engine, tokens), units_of(engine)
            states = sum(unit.pending is not None for unit in units), sum(unit.live for unit in units)
            for each in write:
                each(running)
            after = [evaluated(engine, tokens) for _ in range(2)]
            assert after[0] == after[1]
            weights = full_weights(engine.module)
            assert evaluated(engine, tokens) == after[0]
            results[name] = (before, after[0], *fresh_losses(recipe, weights, tokens), *states)

        return event

    events = [
        *(saved(folder, "start"), step, step),
        check("step", forward, backward, evaluate(tokens), update),
        check("one matrix", change(0, lambda model: [model.model.layers[1].mlp.up_proj.weight])),
        check("part of each block", change(3, lambda model: [b.self_attn.q_proj.weight for b in model.model.layers])),
        check("a vector", change(1, lambda model: [model.model.layers[2].input_layernorm.weight])),
        check("everything", change(0, lambda model: list(model.parameters()))),
        check("load_checkpoint", loaded(folder, "start")),
    ]
    run(spec_of(recipe, limits, fields), events, data=[*some_batches(2), tokens])
    return results


# -- the end of an engine


CLOSURES = ("all_gather", "all_gather_coalesced", "partition")


def owners(module):
    """The modules in which the functions that do a parameter's gathers were written."""
    return {getattr(p, name).__module__.split(".")[0] for p in module.parameters() for name in CLOSURES}


def two_engines_one_module(limits):
    """Return closures of parameters during and after an engine; losses of a second one, and over another module."""
    model, other_model, tokens, log = small_llama(), small_llama(seed=7), some_batches(3), {}
    spec, own = spec_of("zeropp", limits, model=lambda: model), see(lambda engine: owners(model))
    look = see(lambda engine: (engine.optimizer.gatherer, full_weights(model)))
    under_way = see(lambda engine: sum(unit.is_pending for unit in units_of(engine)))
    events = [own, step, step, evaluate(tokens[2]), under_way, look]
    log["during"], log["under way"], (gatherer, weights) = run(spec, events, data=tokens).seen
    log["after"] = owners(model)
    log["state"] = sum(hasattr(p, sharded.SLOT) for p in model.parameters())
    log["kept"] = all(torch.equal(w, weights[name]) for name, w in full_weights(model).items())
    log["bytes held"] = secondary_bytes(gatherer)
    second = run(spec, [*[step] * 3, own], data=tokens)
    log["second"], (log["second owners"],) = second.losses, second.seen
    other_model.load_state_dict(weights)
    log["other"] = run(spec_of("zeropp", limits, model=lambda: other_model), [step] * 3, data=tokens).losses
    return log


# -- host synchronisation


def train_as_if_streams_had_to_be_waited_for():
    """Losses, and those where DeepSpeed believes it must stop the host for its reduction stream; there is none here."""

    def losses(data_dependency):
        answer = mock.patch.object(get_accelerator(), "resolves_data_dependency", lambda: data_dependency)
        return run(
            spec_of("zeropp"), [forward, within(lambda engine: answer, backward), update] * 2, data=some_batches(2)
        ).losses

    return losses(True), losses(False)


# -- what is under way, and optimizer states on the CPU


def most_under_way(names):
    """{limits: (most elements whose gather was under way after a fetch, elements of the largest unit)}, no copies."""
    found = {}
    for limits in names:
        seen = []

        def watch(engine, seen=seen):
            coordinator = engine.optimizer.parameter_offload.param_coordinator
            fetch = coordinator.fetch_sub_module

            def watched(module, forward):
                fetch(module, forward)
                seen.append(sum(unit.numel for unit in units_of(engine) if unit.pending is not None))

            coordinator.fetch_sub_module = watched

        largest = see(lambda engine: max(unit.numel for unit in units_of(engine)))
        trace = run(spec_of("lossless", limits), [on_engine(watch), *[step] * 3, largest], data=some_batches(3))
        found[limits] = max(seen), *trace.seen
    return found


def offloaded(recipe):
    """Losses with optimizer states where they are, and with DeepSpeed's CPU offload, over two micro-batches a step."""

    def losses(**offload):
        config = {"zero_optimization": {**with_limits("none"), **offload}, "gradient_accumulation_steps": 2}
        return run(Spec(section(recipe), "fp32", config, small_llama), [step] * 6, data=some_batches(6)).losses

    return losses(), losses(offload_optimizer={"device": "cpu"})
