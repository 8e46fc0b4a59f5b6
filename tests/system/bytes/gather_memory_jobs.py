"""Jobs about the memory of gathers that run on ranks: rings, buffers for one gather, secondary shards of one node."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
import weakref
from unittest import mock

import torch.distributed as dist
from frozen_jobs import with_lora
from hang_guard import HANG
from models import batches, llama, secondary_bytes, section
from pipeline_jobs import with_limits
from ranks import printed
from running import Spec, evaluate, freezing, on_engine, run, see, step, trained, within

from zeropp_fp8 import sharded
from zeropp_fp8.zero.gather import hops as hops_module
from zeropp_fp8.zero.gather.attached import units_of

BUFFERS_FOR = {
    "as chosen": contextlib.nullcontext,
    "none": lambda: mock.patch.object(hops_module, "outsized_units", lambda units, bytes_of: set()),
    "all": lambda: mock.patch.object(hops_module, "outsized_units", lambda units, bytes_of: set(units)),
}


def large_vocabulary(hidden=32, **kwargs):
    """A Llama of three blocks; embedding and head are ten times a block, or what `vocab` makes of them."""
    return llama(layers=3, hidden=hidden, **{"vocab": 4096, **kwargs})


def spec_of(recipe, fields, limits="none", lora=False, dtype="fp32", **model):
    """Of a Llama with a large vocabulary."""
    options = {"zero_optimization": with_limits(limits)}
    model = functools.partial(large_vocabulary, **model)
    return Spec(section(recipe, **fields), dtype, options, model, adapted=with_lora if lora else None)


def names_of(engine, units):
    names = {id(p): name for name, p in engine.module.named_parameters()}
    return sorted(names[id(p)] for unit in units for p in unit.params)


def runs(recipe, fields, buffers, steps=2, **options):
    """{whose buffers do not come from rings: losses, bytes of both rings, ...} of the same training."""
    data, spec = list(batches(steps, dist.get_rank(), vocab=64)), spec_of(recipe, fields, **options)

    def told(engine):
        gatherer = engine.optimizer.gatherer
        blocks = [unit for unit in gatherer.units if len(unit.params) > 2 and unit not in gatherer.hops.outsized]
        return {
            "outsized": names_of(engine, gatherer.hops.outsized),
            "gathered ring": gatherer.hops.gathered_ring.num_bytes(),
            "held ring": gatherer.hops.held_ring.num_bytes(),
            "block numel": max((unit.numel for unit in blocks), default=0),
            "not given back": gatherer.hops.gathered_ring._taken + gatherer.hops.held_ring._taken,
            "largest": max((storage.numel() for storage, _ in gatherer.hops.gathered_ring._free), default=0),
            "row": [line.split()[2:] for line in printed().splitlines() if line.startswith("  secondary shard ")][-1:],
            "held": sum(unit.secondary is not None for unit in gatherer.units),
        }

    found = {}
    for choice in buffers:
        with BUFFERS_FOR[choice]():
            trace = run(spec, [*[step] * steps, see(told)], data=data)
        found[choice] = {"losses": trace.losses, **trace.seen[0]}
    return found


def scopes(recipe, fields, names, node_size):
    """{scope: (losses, ranks of a copy, bytes of copies after an evaluation, bytes sent per step)}."""

    def copies(engine):
        return engine.zeropp_fp8_session.secondary_ranks, secondary_bytes(engine.optimizer.gatherer)

    found = {}
    for scope in names:
        given = section(recipe, ranks_per_node=node_size, secondary={"scope": scope}, **fields)
        spec = Spec(given, model=functools.partial(large_vocabulary, vocab=256))
        trace = run(spec, [step, step, evaluate(next(batches(1, dist.get_rank()))), see(copies)], ("bytes",))
        found[scope] = trace.losses, *trace.seen[0], trace.bytes
    return found


def values_of_all_gathers(fields, micro_batches=2):
    """{name: for each of two steps, the values that each gather gave}: forwards, backwards and evaluations."""
    seen, tokens = {}, list(batches(2 * micro_batches, dist.get_rank()))

    def watch(engine):
        gatherer, model = engine.optimizer.gatherer, engine.module.model
        watched = {f"layer {i}": layer.mlp.up_proj.weight for i, layer in enumerate(model.layers)}
        watched["embedding"] = model.embed_tokens.weight
        seen.update({name: [[], []] for name in watched})
        real = gatherer.release

        def look(unit):
            for name, param in watched.items():
                if any(param is member for member in unit.params) and param.data.numel():
                    seen[name][engine.global_steps].append(param.data.clone())
            real(unit)

        gatherer.release = look

    config, model = {"gradient_accumulation_steps": micro_batches}, functools.partial(large_vocabulary, vocab=256)
    spec = Spec(section("zeropp", **fields), config=config, model=model, adapted=freezing("layers.0"))
    passes = [event for batch in tokens for event in (evaluate(batch), step)]
    run(
        spec,
        [on_engine(watch), *passes, on_engine(lambda engine: engine.optimizer.gatherer.__dict__.pop("release"))],
        data=tokens,
    )
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
        engine = spec_of(recipe, fields, "far ahead").engine()
        gatherer = engine.optimizer.gatherer
        trained(engine, batches(2, dist.get_rank(), vocab=64))
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
    fields = {"compute": {"format": "fp8", "scaling": scaling}, "weights": {"format": "fp8_e4m3"}}
    fields["topology"] = {"ranks_per_node": 4}
    spec, found = spec_of("lossless", fields, dtype="bf16", hidden=128, intermediate=384, vocab=256), {}
    real = hops_module.buffer_for
    for choice in ("none", "all"):
        storages, inside = {}, []

        def watched(lane, num_bytes, device, storages=storages):
            buffer = real(lane, num_bytes, device)
            storages[buffer.untyped_storage().data_ptr()] = weakref.ref(buffer)
            return buffer

        def look(module, args, storages=storages, inside=inside):
            codes = sharded.known(module.weight).operand.codes
            inside.append(codes.untyped_storage().data_ptr() in storages)

        @contextlib.contextmanager
        def looking(engine, watched=watched, look=look):
            with mock.patch.object(hops_module, "buffer_for", watched):
                hook = engine.module.model.layers[1].mlp.up_proj.register_forward_pre_hook(look)
                yield
                hook.remove()

        def left(engine, storages=storages):
            lent = sum(len(unit.lent) for unit in engine.optimizer.gatherer.units)
            return alive(storages.values(), none_is_due=True), lent

        with BUFFERS_FOR[choice]():
            trace = run(spec, [within(looking, step, step), see(left)])
        found[choice] = trace.losses, inside, *trace.seen[0]
    return found
