"""Jobs about checkpoints of another number of ranks that run on ranks."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from frozen_jobs import with_lora
from models import batches, full_weights, llama, section
from running import Spec, evaluated, same, trained, universal

LOADS = {
    "all": {},
    "module only": {"load_module_only": True},
    "no states": {"load_optimizer_states": False},
    "neither": {"load_optimizer_states": False, "load_module_only": True},
}


def engine_of(recipe, fields, seed):
    model = functools.partial(llama, seed=seed, hidden=128)
    adapted = with_lora if recipe == "qlora" else None
    return Spec(section(recipe, ranks_per_node=1, **fields), "bf16", model=model, adapted=adapted).engine()


def evaluation(engine):
    return evaluated(engine, next(batches(1, 77)))


def save(folder, recipe, fields):
    """Two steps and a checkpoint; a loss of what is in it."""
    engine = engine_of(recipe, fields, seed=0)
    trained(engine, batches(2, dist.get_rank()))
    engine.save_checkpoint(folder)
    return evaluation(engine)


def load(folder, recipe, fields):
    """{way to load: the error, or the loss afterwards}; into an engine that has loaded nothing, that then trains."""
    results, engine = {}, None
    for name, options in LOADS.items():
        engine = engine or engine_of(recipe, fields, seed=5)
        before, weights = evaluation(engine), full_weights(engine.module)
        try:
            engine.load_checkpoint(folder, **options)
            results[name], loaded = evaluation(engine), True
        except RuntimeError as error:
            results[name], loaded = str(error), False
            assert same(full_weights(engine.module), weights)
            assert evaluation(engine) == before
        trained(engine, batches(1, dist.get_rank()))
        if loaded:
            engine.destroy()
            engine = None
    return results


def by_dimensions(params):
    """AdamW with a group for matrices and one for norms, as Trainer makes it."""
    groups = [[p for p in params if (len(getattr(p, "ds_shape", p.shape)) > 1) is many] for many in (True, False)]
    decays = (0.1, 0.0)
    return torch.optim.AdamW([{"params": g, "weight_decay": d} for g, d in zip(groups, decays)], lr=1e-2)


def of_a_universal_checkpoint(folder, first, steps, sub_group_size, save_as=None):
    """Losses of steps from `first` on, all ranks on the same data, and weights; resumed unless it is the first step."""
    config = {"zero_optimization": {"stage": 3, "sub_group_size": sub_group_size}}
    config["checkpoint"] = {"load_universal": first > 0}
    engine = Spec(section("lossless", ranks_per_node=1), config=config, optimizer=by_dimensions).engine()
    if first:
        engine.load_checkpoint(folder, tag="universal")
    losses = trained(engine, list(batches(first + steps, 0))[first:])
    if save_as:
        engine.save_checkpoint(folder, tag=save_as)
        dist.barrier()
        if dist.get_rank() == 0:
            universal(folder, save_as)
    return losses, full_weights(engine.module)


def load_a_part(folder, recipe, fields):
    """Return what is said where a file cannot be read, and where one is missing, of a checkpoint without a manifest."""
    import os
    from pathlib import Path

    said = []
    if dist.get_rank() == 0:
        next(Path(folder).glob("*/zeropp_fp8_manifest.json")).unlink()
    for damage in (lambda path: path.write_bytes(b"no checkpoint"), lambda path: path.unlink()):
        if dist.get_rank() == 1:
            damage(next(Path(folder).glob("*/zero_pp_rank_1_*_model_states.pt")))
        dist.barrier()
        try:
            engine_of(recipe, fields, seed=5).load_checkpoint(folder)
        except RuntimeError as error:
            said.append(str(error).replace(os.fspath(folder), "FOLDER"))
    return said
