"""Models with fewer tensors than there are ranks, so that ranks have nothing of some, or of all."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import torch.distributed as dist
from models import Mlp
from recipes import section_of
from running import Spec, changed, loaded, run, saved, step

HIDDEN = 64  # the least that computes in FP8


def tokens(seed):
    generator = torch.Generator().manual_seed(seed * 10 + dist.get_rank())
    return torch.randn(4, HIDDEN, generator=generator).bfloat16(), torch.randint(0, HIDDEN, (4,), generator=generator)


def gone_on(ways, folder):
    """{way: (losses, those of another engine that has loaded the checkpoint, weights that differ)}; two micro-batches
    a step; `way` None: stock DeepSpeed."""
    found, data = {}, [tokens(seed) for seed in range(8)]
    for number, way in enumerate(ways):
        config, model = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}, functools.partial(Mlp, HIDDEN, 1)
        spec, tag = Spec(way and section_of(way), "bf16", config, model), str(number)
        trace = run(spec, [*[step] * 4, saved(folder, tag), *[step] * 4], ("masters",), data)
        other = replace(spec, model=functools.partial(model, seed=5))
        other = run(other, [loaded(folder, tag), *[step] * 4], ("masters",), data[4:])
        found[way] = trace.losses[4:], other.losses, changed(trace.masters, other.masters)
    return found
