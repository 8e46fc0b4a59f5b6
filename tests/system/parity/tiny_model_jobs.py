"""Models with fewer tensors than there are ranks, so that ranks have nothing of some, or of all."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from models import Mlp, ds_config, full_fp32_weights, make_engine
from recipes import section_of
from running import switch

HIDDEN = 64  # the least that computes in FP8


def tokens(seed):
    generator = torch.Generator().manual_seed(seed * 10 + dist.get_rank())
    return torch.randn(4, HIDDEN, generator=generator).bfloat16(), torch.randint(0, HIDDEN, (4,), generator=generator)


def losses_of(engine, seeds):
    found = []
    for seed in seeds:
        loss = engine(*tokens(seed))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def gone_on(ways, folder):
    """{way: (losses, those of another engine that has loaded the checkpoint, weights that differ)}; two micro-batches
    a step; `way` None: stock DeepSpeed."""
    found = {}
    for number, way in enumerate(ways):
        switch(way is not None)
        section, place = None if way is None else section_of(way), os.path.join(folder, str(number))
        config = ds_config(section, "bf16", gradient_accumulation_steps=2, gradient_clipping=0.5)
        results = []
        for loads in (False, True):
            engine = make_engine(Mlp(hidden=HIDDEN, layers=1, seed=5 * loads), config)
            if loads:
                engine.load_checkpoint(place, tag="half")
            else:
                losses_of(engine, range(4))
                engine.save_checkpoint(place, tag="half")
            results.append((losses_of(engine, range(4, 8)), full_fp32_weights(engine.module)))
            engine.destroy()
        (losses, weights), (others, loaded) = results
        found[way] = losses, others, [name for name in weights if not torch.equal(weights[name], loaded[name])]
    return found
