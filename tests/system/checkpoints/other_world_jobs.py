"""Jobs about checkpoints of another number of ranks that run on ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from frozen_jobs import with_lora
from models import batches, ds_config, full_weights, llama, make_engine, section, train
from running import switch

LOADS = {
    "all": {},
    "module only": {"load_module_only": True},
    "no states": {"load_optimizer_states": False},
    "neither": {"load_optimizer_states": False, "load_module_only": True},
}


def engine_of(recipe, fields, seed):
    switch(True)
    model = llama(seed=seed, hidden=128)
    lora = recipe == "qlora"
    config = ds_config(section(recipe, ranks_per_node=1, **fields), "bf16")
    return make_engine(with_lora(model) if lora else model, config)


@torch.no_grad()
def evaluation(engine):
    return float(engine(input_ids=next(batches(1, 77)), labels=next(batches(1, 77))).loss)


def save(folder, recipe, fields):
    """Two steps and a checkpoint; a loss of what is in it."""
    engine = engine_of(recipe, fields, seed=0)
    train(engine, 2)
    engine.save_checkpoint(folder)
    return evaluation(engine)


def load(folder, recipe, fields):
    """{way to load: the error, or the loss afterwards; before}; each into an engine of its own, that then trains."""
    results = {}
    for name, options in LOADS.items():
        engine = engine_of(recipe, fields, seed=5)
        before, weights = evaluation(engine), full_weights(engine.module)
        try:
            engine.load_checkpoint(folder, **options)
            results[name] = evaluation(engine)
        except RuntimeError as error:
            results[name] = str(error)
            assert all(torch.equal(w, weights[n]) for n, w in full_weights(engine.module).items())
            assert evaluation(engine) == before
        train(engine, 1)
        engine.destroy()
    return results


def load_a_part(folder, recipe, fields):
    """What is said where a file cannot be read, and where one is missing, of a checkpoint without a manifest."""
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
