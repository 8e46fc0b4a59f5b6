"""Jobs about the pipeline of gathers and reductions inside an engine: limits, bytes, evaluations, writes, the end."""

from __future__ import annotations

import copy
import tempfile

import torch
import torch.distributed as dist
from models import batches, ds_config, full_weights, llama, make_engine, secondary_bytes, section
from torch import nn

import zeropp_fp8
from zeropp_fp8 import sharded
from zeropp_fp8.zero.gather.adopted import unit_of

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


def engine_of(recipe, limits="none", model=None, fields=None, optimizer="adamw", **overrides):
    """An engine over a small Llama (or `model`); `limits` also as (name, persistence threshold)."""
    zeropp_fp8.enable()
    limits = limits if isinstance(limits, tuple) else (limits,)
    config = ds_config(section(recipe, **(fields or {})), zero_optimization=with_limits(*limits), **overrides)
    return make_engine(small_llama() if model is None else model, config, optimizer)


def small_llama(seed=0):
    return llama(layers=3, hidden=32, vocab=64, seed=seed)


def some_batches(count, seed=1, same_on_all_ranks=False):
    rank = 0 if same_on_all_ranks else dist.get_rank()
    return list(batches(count, rank, length=8, vocab=64, seed=seed))


def loss_of(engine, tokens):
    return engine(input_ids=tokens, labels=tokens).loss


def train_step(engine, tokens):
    loss = loss_of(engine, tokens)
    engine.backward(loss)
    engine.step()
    return loss.item()


def evaluate(engine, tokens):
    with torch.no_grad():
        return loss_of(engine, tokens).item()


def pipeline_of(engine):
    return engine.optimizer.parameter_offload.param_coordinator, engine.optimizer.gatherer


def count_ahead(engine):
    """A list that grows by the unit's elements whenever a gather is started ahead."""
    _, gatherer = pipeline_of(engine)
    started, start = [], gatherer.hops.start

    def counted(unit, ahead=False):
        if ahead:
            started.append(unit.numel)
        return start(unit, ahead)

    gatherer.hops.start = counted
    return started


# -- limits


def train_with_limits(recipe, fields=None, steps=3, names=tuple(LIMITS), persistent_below=()):
    """{limits: (losses, gathers started ahead, bytes per step)}."""
    results = {}
    cases = [(name, 0) for name in names] + [("small", threshold) for threshold in persistent_below]
    for case in cases:
        engine = engine_of(recipe, case, fields=fields)
        ahead = count_ahead(engine)
        losses = [train_step(engine, tokens) for tokens in some_batches(steps)]
        results[case] = losses, len(ahead), zeropp_fp8.wire_report(engine)["per_step"]
        engine.destroy()
    return results


# -- bytes


def bytes_of_a_step(recipe, granularity, steps=2):
    """What the ledger says at the start, after each step and after each of two evaluations; what the formats say."""
    from zeropp_fp8.zero.report import predicted_bytes

    engine = engine_of(recipe, fields={"gather_granularity": granularity})
    _, gatherer = pipeline_of(engine)
    params = gatherer.ownership.params.values()
    payloads = sum(unit_of(p).format_of(p).payload_bytes(p.ds_tensor.ds_numel) for p in params)
    tokens, reports = some_batches(steps), [zeropp_fp8.wire_report(engine)]
    for batch in tokens:
        train_step(engine, batch)
        reports.append(zeropp_fp8.wire_report(engine))
    for _ in range(2):
        evaluate(engine, tokens[0])
        reports.append(zeropp_fp8.wire_report(engine))
    return {
        "reports": reports,
        "payloads": payloads,
        "predicted": predicted_bytes(engine.zeropp_fp8_session, gatherer),
        "quantized numel": sum(p.ds_numel for p in params if len(p.ds_shape) >= 2),
    }


# -- evaluations between the steps


def interleaved(recipe, limits, fields=None, steps=3):
    """Losses of training alone, and with evaluations and generation in between."""

    def losses(between):
        engine = engine_of(recipe, limits, fields=fields)
        found, evaluated = [], []
        for step, tokens in enumerate(some_batches(steps)):
            if between:
                evaluated += [evaluate(engine, t) for t in some_batches(2, seed=5)]
            loss = loss_of(engine, tokens)
            engine.backward(loss)
            if between:
                evaluated.append(evaluate(engine, tokens))  # its values are those of before the step
                assert evaluated[-1] == loss.item()
            engine.step()
            found.append(loss.item())
            if between and step % 2 == 0:
                engine.eval()
                with torch.no_grad():
                    generated = engine.module.generate(input_ids=tokens[:, :3], max_new_tokens=2, do_sample=False)
                assert generated.shape == (2, 5)
                engine.train()
        engine.destroy()
        return found, evaluated

    return losses(False)[0], losses(True)[0]


def evaluated_in_inference_mode(recipe, fields=None):
    """Losses of training alone, and with evaluations under torch.inference_mode() before each step."""

    def losses(between):
        engine, found = engine_of(recipe, "none", fields=fields), []
        for tokens in some_batches(2):
            if between:
                with torch.inference_mode():
                    loss_of(engine, tokens)
            found.append(train_step(engine, tokens))
        engine.destroy()
        return found

    return losses(False), losses(True)


def frozen_between_forwards():
    """Losses around the freezing of some matrices: of an engine that gathered them before, and of one that did not."""
    fields = {"weights": {"format": "int8", "block_size": 128}, "frozen": {"format": "int4", "modules": "frozen"}}
    tokens = some_batches(1)[0]

    def loss(gathered_before):
        engine = engine_of("lossless", "none", fields=fields)
        before = evaluate(engine, tokens) if gathered_before else None
        for name, param in engine.module.named_parameters():
            param.requires_grad_("up_proj" not in name)
        return before, evaluate(engine, tokens)

    return loss(True), loss(False)


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


def accumulated_gradients(fields=None):
    """Reduced gradients after three micro-batches, twice (the second step must not see the first)."""
    from deepspeed.utils import safe_get_full_grad

    engine = engine_of("zeropp", "none", Sometimes(), fields, "sgd", gradient_accumulation_steps=3)
    found = []
    for step in range(2):
        for micro in range(3):
            engine.backward(engine(micro_inputs(dist.get_rank() + 10 * step, micro)))
            if micro == 2:
                named = engine.module.named_parameters()
                found.append({name: safe_get_full_grad(p).double().clone() for name, p in named})
            engine.step()
    return found


# -- writes while units are on their way


def fresh_losses(recipe, weights, tokens):
    """The loss of an engine that never knew other weights than these, and of torch alone."""
    model = small_llama(seed=7)
    model.load_state_dict(weights)
    plain = evaluate(model, tokens)
    engine = engine_of(recipe, "none", model)
    loss = evaluate(engine, tokens)
    engine.destroy()
    return loss, plain


def shared_folder():
    """A temporary folder, the same on every rank."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, 0)
    return box[0]


def writes_are_seen(recipe, limits, fields=None):
    """{write: (loss before, after, of a fresh engine and of torch alone, units under way, units live)}, same tokens."""
    import deepspeed

    engine = engine_of(recipe, limits, fields=fields)
    module, (_, gatherer) = engine.module, pipeline_of(engine)
    tokens = some_batches(1, same_on_all_ranks=True)[0]
    results = {}

    def under_way():
        return sum(unit.pending is not None for unit in gatherer.units)

    def check(name, write):
        before = evaluate(engine, tokens)
        states = under_way(), sum(unit.live for unit in gatherer.units)
        write()
        after = [evaluate(engine, tokens) for _ in range(2)]
        assert after[0] == after[1]
        weights = full_weights(module)
        assert evaluate(engine, tokens) == after[0]
        results[name] = (before, after[0], *fresh_losses(recipe, weights, tokens), *states)

    def change(params, source):
        with deepspeed.zero.GatheredParameters(params, modifier_rank=source):
            if dist.get_rank() == source:
                for param in params:
                    param.data.mul_(-0.7)

    folder = shared_folder()
    engine.save_checkpoint(folder, tag="start")
    for batch in some_batches(2):
        train_step(engine, batch)

    def step_after_an_evaluation():
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        evaluate(engine, tokens)
        engine.step()

    layers = module.model.layers
    check("step", step_after_an_evaluation)
    check("one matrix", lambda: change([layers[1].mlp.up_proj.weight], 0))
    check("part of each block", lambda: change([layer.self_attn.q_proj.weight for layer in layers], 3))
    check("a vector", lambda: change([layers[2].input_layernorm.weight], 1))
    check("everything", lambda: change(list(module.parameters()), 0))
    check("load_checkpoint", lambda: engine.load_checkpoint(folder, tag="start"))
    return results


# -- the end of an engine


CLOSURES = ("all_gather", "all_gather_coalesced", "partition")


def owners(module):
    """The modules in which the functions that do a parameter's gathers were written."""
    return {getattr(p, name).__module__.split(".")[0] for p in module.parameters() for name in CLOSURES}


def two_engines_one_module(limits):
    """What parameters call during and after an engine; losses of a second engine, and of one over another module."""
    model, tokens = small_llama(), some_batches(3)
    first = engine_of("zeropp", limits, model)
    log = {"during": owners(model)}
    for batch in tokens[:2]:
        train_step(first, batch)
    evaluate(first, tokens[2])
    _, gatherer = pipeline_of(first)
    log["under way"] = sum(unit.in_flight for unit in gatherer.units)
    weights = copy.deepcopy(full_weights(model))
    first.destroy()
    log["after"] = owners(model)
    log["state"] = sum(hasattr(p, sharded.SLOT) for p in model.parameters())
    log["kept"] = all(torch.equal(w, weights[name]) for name, w in full_weights(model).items())
    log["bytes held"] = (
        secondary_bytes(gatherer) + gatherer.hops.gathered_ring.num_bytes() + gatherer.hops.held_ring.num_bytes()
    )

    second = engine_of("zeropp", limits, model)
    log["second"] = [train_step(second, batch) for batch in tokens]
    log["second owners"] = owners(model)
    other_model = small_llama(seed=7)
    other_model.load_state_dict(weights)
    other = engine_of("zeropp", limits, other_model)
    log["other"] = [train_step(other, batch) for batch in tokens]
    return log


# -- host synchronisation


def train_as_if_streams_had_to_be_waited_for():
    """(losses, losses where DeepSpeed believes it must stop the host for its reduction stream; there is none here)."""
    from unittest import mock

    from deepspeed.accelerator import get_accelerator

    results = []
    for data_dependency in (True, False):
        engine = engine_of("zeropp", ("none", 0))
        answer = mock.patch.object(get_accelerator(), "resolves_data_dependency", lambda: data_dependency)  # noqa: B023
        losses = []
        for tokens in some_batches(2):
            loss = loss_of(engine, tokens)
            with answer:
                engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        results.append(losses)
    return tuple(results)


# -- what is under way, and optimizer states on the CPU


def most_under_way(limits):
    """(most elements whose gather was under way after a fetch, elements of the largest unit), without a copy."""
    engine = engine_of("lossless", limits)
    coordinator, gatherer = pipeline_of(engine)
    fetch, seen = coordinator.fetch_sub_module, []

    def watched(module, forward):
        fetch(module, forward)
        seen.append(sum(unit.numel for unit in gatherer.units if unit.pending is not None))

    coordinator.fetch_sub_module = watched
    for tokens in some_batches(3):
        train_step(engine, tokens)
    largest = max(unit.numel for unit in gatherer.units)
    engine.destroy()
    return max(seen), largest


def offloaded(recipe):
    """Losses with optimizer states where they are, and with DeepSpeed's CPU offload, over two micro-batches a step."""
    results = []
    for offload in ({}, {"offload_optimizer": {"device": "cpu"}}):
        zero = {**with_limits("none"), **offload}
        config = ds_config(section(recipe), zero_optimization=zero, gradient_accumulation_steps=2)
        config["zero_force_ds_cpu_optimizer"] = False  # its own Adam is compiled; torch's does as well
        zeropp_fp8.enable()
        engine = make_engine(small_llama(), config, "adamw")
        results.append([train_step(engine, tokens) for tokens in some_batches(6)])
        engine.destroy()
    return tuple(results)
