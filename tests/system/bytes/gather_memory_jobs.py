"""Jobs about the memory of gathers that run on ranks: buffers, secondary shards of one node."""

from __future__ import annotations

import functools
import gc
import time
from unittest import mock

import torch.distributed as dist
from frozen_jobs import with_lora
from hang_guard import HANG
from models import batches, llama, secondary_bytes, section
from pipeline_jobs import with_limits
from ranks import printed
from running import Spec, evaluate, freezing, on_engine, run, see, step, trained
from torch.multiprocessing.reductions import StorageWeakRef

from zeropp_fp8.zero.gather import hops as hops_module
from zeropp_fp8.zero.gather.attached import units_of


def large_vocabulary(hidden=32, **kwargs):
    """A Llama of three blocks; embedding and head are ten times a block, or what `vocab` makes of them."""
    return llama(layers=3, hidden=hidden, **{"vocab": 4096, **kwargs})


def spec_of(recipe, fields, limits="none", lora=False, dtype="fp32", **model):
    """Of a Llama with a large vocabulary."""
    options = {"zero_optimization": with_limits(limits)}
    model = functools.partial(large_vocabulary, **model)
    return Spec(section(recipe, **fields), dtype, options, model, adapted=with_lora if lora else None)


def watching(made):
    """A patch that keeps a weak reference to the storage of each buffer of a gather in `made`."""
    real = hops_module.buffer_for

    def watched(lane, num_bytes, device):
        buffer = real(lane, num_bytes, device)
        made.append(StorageWeakRef(buffer.untyped_storage()))
        return buffer

    return mock.patch.object(hops_module, "buffer_for", watched)


def buffers_after_steps(recipe, fields, **options):
    """How many buffers two steps made, and left alive; how many units have copies; on rank 0 the row about copies."""
    made, data = [], list(batches(2, dist.get_rank(), vocab=64))

    def told(engine):
        lines = [line.split()[2:] for line in printed().splitlines() if line.startswith("  secondary shard ")]
        copies = sum(unit.secondary is not None for unit in engine.optimizer.gatherer.units)
        return len(made), alive(made, none_is_due=True), copies, " ".join(lines[-1] if lines else [])

    with watching(made):
        return run(spec_of(recipe, fields, **options), [step, step, see(told)], data=data).seen[0]


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
    """How many of weakly referenced storages are alive.

    Where none is due: gloo's thread lets go of a finished collective's buffers some microseconds after it has told of
    the end, on a loaded machine some milliseconds or more. What is held for good never goes.
    """
    deadline = time.monotonic() + HANG / 10
    while True:
        gc.collect()
        count = sum(not ref.expired() for ref in refs)
        if not count or not none_is_due or time.monotonic() > deadline:
            return count
        time.sleep(0.01)


def buffers_end(fields, recipe="zeropp"):
    """How many buffers for one gather are alive: after a forward, a step, a cancelled gather, and the engine's end."""
    made = []
    with watching(made):
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
