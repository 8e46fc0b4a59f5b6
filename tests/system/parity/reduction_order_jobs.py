"""Jobs about when gradients are reduced that run on ranks."""

from __future__ import annotations

import functools
from itertools import product

from models import llama, section
from running import Spec, on_engine, run, step
from torch.optim import AdamW


def held_at_the_end(recipes):
    """{(recipe, order of the optimizer): elements of gradients that wait when backward has come to the embedding}."""
    held = {}
    for recipe, (order, stride) in product(recipes, {"registered": 1, "last first": -1}.items()):

        def watch(engine, case=(recipe, order)):
            def count(_):
                held[case] = sum(p.grad.numel() for p in engine.module.parameters() if p.grad is not None)

            engine.module.model.embed_tokens.weight.register_hook(count)

        config = {"zero_optimization": {"reduce_bucket_size": 1000}}
        model, optimizer = functools.partial(llama, layers=4), lambda params, stride=stride: AdamW(params[::stride])
        run(Spec(section(recipe), "fp32", config, model, optimizer), [on_engine(watch), step, step])
    return held
