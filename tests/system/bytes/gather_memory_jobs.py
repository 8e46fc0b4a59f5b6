"""Jobs about the memory of gathers that run on ranks: rings, buffers for one gather, secondary shards of one node."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from unittest import mock

import torch
import torch.distributed as dist
from hang_guard import HANG
from models import batches, ds_config, llama, make_engine, secondary_bytes, section, train
from pipeline_jobs import with_limits
from ranks import printed
from running import evaluated, forward_backward, switch

from zeropp_fp8 import sharded
from zeropp_fp8.zero.gather import hops as hops_module
from zeropp_fp8.zero.gather.adopted import units_of

BUFFERS_FOR = {
    "as chosen": contextlib.nullcontext,
    "none": lambda: mock.patch.object(hops_module, "outsized_units", lambda units, bytes_of: set()),
    "all": lambda: mock.patch.object(hops_module, "outsized_units", lambda units, bytes_of: set(units)),
}


def large_vocabulary(hidden=32, **kwargs):
    """A Llama of three blocks; embedding and head are ten times a block, or what `vocab` makes of them."""
    return llama(layers=3, hidden=hidden, **{"vocab": 4096, **kwargs})


def engine_of(recipe, fields, limits="none", buffers="as chosen", lora=False, dtype="fp32", **model):
    """An engine; `buffers`: whose buffers do not come from rings."""
    switch(True)
    config = ds_config(section(recipe, **fields), dtype, zero_optimization=with_limits(limits))
    module = large_vocabulary(**model)
    if lora:
        from frozen_jobs import with_lora

        module = with_lora(module)
    with BUFFERS_FOR[buffers]():
        return make_engine(module, config)


def names_of(engine, units):
    names = {id(p): name for name, p in engine.module.named_parameters()}
    return sorted(names[id(p)] for unit in units for p in unit.params)


def runs(recipe, fields, buffers, steps=2, **options):
    """{whose buffers do not come from rings: losses, bytes of both rings, ...} of the same training."""
    found = {}
    for choice in buffers:
        engine = engine_of(recipe, fields, buffers=choice, **options)
        gatherer = engine.optimizer.gatherer
        losses = train(engine, steps, vocab=64)
        blocks = [unit for unit in gatherer.units if len(unit.params) > 2 and unit not in gatherer.hops.outsized]
        found[choice] = {
            "losses": losses,
            "outsized": names_of(engine, gatherer.hops.outsized),
            "gathered ring": gatherer.hops.gathered_ring.num_bytes(),
            "held ring": gatherer.hops.held_ring.num_bytes(),
            "block numel": max((unit.numel for unit in blocks), default=0),
            "not given back": gatherer.hops.gathered_ring._taken + gatherer.hops.held_ring._taken,
            "largest": max((storage.numel() for storage, _ in gatherer.hops.gathered_ring._free), default=0),
            "row": [line.split()[2:] for line in printed().splitlines() if line.startswith("  secondary shard ")][-1:],
            "held": sum(unit.secondary is not None for unit in gatherer.units),
        }
        engine.destroy()
    return found


def scopes(recipe, fields, names, node_size, steps=2, accumulation=1):
    """{scope: (losses, ranks of a copy, bytes of copies after an evaluation, bytes sent per step)}."""
    found = {}
    for scope in names:
        switch(True)
        given = section(recipe, ranks_per_node=node_size, secondary={"scope": scope}, **fields)
        config = ds_config(given, gradient_accumulation_steps=accumulation)
        engine = make_engine(large_vocabulary(vocab=256), config)
        gatherer, session = engine.optimizer.gatherer, engine.zeropp_fp8_session
        losses = train(engine, steps, accumulation)
        tokens = next(batches(1, dist.get_rank()))
        losses.append(evaluated(engine, tokens))
        sent = session.ledger.report()["per_step"]
        found[scope] = (losses, session.secondary_ranks, secondary_bytes(gatherer), sent)
        engine.destroy()
    return found


def values_of_all_gathers(fields, micro_batches=2):
    """{name: for each of two steps, the values that each gather gave}: forwards, backwards and evaluations."""
    switch(True)
    model = large_vocabulary(vocab=256)
    for param in model.model.layers[0].parameters():
        param.requires_grad_(False)
    engine = make_engine(model, ds_config(section("zeropp", **fields), gradient_accumulation_steps=micro_batches))
    watched = {f"layer {i}": layer.mlp.up_proj.weight for i, layer in enumerate(model.model.layers)}
    watched["embedding"] = model.model.embed_tokens.weight
    seen, step = {name: [[], []] for name in watched}, 0
    gatherer = engine.optimizer.gatherer
    real = gatherer.release

    def look(unit):
        for name, param in watched.items():
            if any(param is member for member in unit.params) and param.data.numel():
                seen[name][step].append(param.data.clone())
        real(unit)

    gatherer.release = look
    for step in range(2):
        for tokens in batches(micro_batches, dist.get_rank(), seed=step + 1):
            with torch.no_grad():
                engine(input_ids=tokens, labels=tokens)
            forward_backward(engine, tokens)
            engine.step()
    return seen


def alive(refs, none_is_due=False):
    """How many of weakly referenced buffers are alive.

    Where none is due: gloo's thread lets go of a finished collective's buffers some microseconds after it has told of
    the end, on a loaded machine some milliseconds or more. What is held for good never goes.
    """
    deadline = time.monotonic() + HANG / 10
    while True:
        gc.collect()
        count = sum(ref() is not None for ref in refs)
        if not count or not none_is_due or time.monotonic() > deadline:
            return count
        time.sleep(0.01)


def buffers_end(fields, recipe="zeropp"):
    """How many buffers for one gather are alive: after a forward, a step, a cancelled gather, and the engine's end."""
    made = []
    real = hops_module.buffer_for

    def watched(lane, num_bytes, device):
        buffer = real(lane, num_bytes, device)
        made.append(weakref.ref(buffer))
        return buffer

    with mock.patch.object(hops_module, "buffer_for", watched):
        engine = engine_of(recipe, fields, "far ahead")
        gatherer = engine.optimizer.gatherer
        train(engine, 2, vocab=64)
        log = {"made in two steps": len(made), "after a step": alive(made)}
        embedding, head = engine.module.model.embed_tokens.weight, engine.module.lm_head.weight
        embedding.all_gather_coalesced([embedding, head])
        log["under way"] = alive(made)
        gatherer.weights_changed()
        log["cancelled"] = alive(made, none_is_due=True)
        (unit,) = units_of([head])
        gatherer.hops.start_first(unit)
        log["first hops"] = alive(made)
        gatherer.hops.cancel(unit)
        log["first hops cancelled"] = alive(made, none_is_due=True)
        head.all_gather_coalesced([embedding, head])
        log["under way again"] = alive(made)
        engine.destroy()
        log["after the end"] = alive(made, none_is_due=True)
    return log


def operands_in_a_buffer(scaling):
    """Losses where FP8 operands lie in rings and in buffers for one gather, and what is left of these."""
    found = {}
    for choice in ("none", "all"):
        fields = {"compute": {"format": "fp8", "scaling": scaling}, "weights": {"format": "fp8_e4m3"}}
        fields["topology"] = {"ranks_per_node": 4}
        engine = engine_of("lossless", fields, buffers=choice, dtype="bf16", hidden=128, intermediate=384, vocab=256)
        gatherer, storages, inside = engine.optimizer.gatherer, {}, []
        real = hops_module.buffer_for

        def watched(lane, num_bytes, device, real=real, storages=storages):
            buffer = real(lane, num_bytes, device)
            storages[buffer.untyped_storage().data_ptr()] = weakref.ref(buffer)
            return buffer

        def look(module, args, storages=storages, inside=inside):
            codes = sharded.known(module.weight).operand.codes
            inside.append(codes.untyped_storage().data_ptr() in storages)

        layer = engine.module.model.layers[1].mlp.up_proj
        with mock.patch.object(hops_module, "buffer_for", watched):
            hook = layer.register_forward_pre_hook(look)
            losses = train(engine, 2)
            hook.remove()
        left = alive(storages.values(), none_is_due=True)
        found[choice] = (losses, inside, left, sum(len(unit.lent) for unit in gatherer.units))
        engine.destroy()
    return found
