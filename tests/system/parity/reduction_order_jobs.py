"""Jobs about when gradients are reduced that run on ranks."""

from __future__ import annotations

import torch.distributed as dist
from models import batches, ds_config, llama, make_engine, section
from running import forward_backward, switch


def held_at_the_end(recipe):
    """{order of the optimizer: elements of gradients that wait when backward has come to the embedding}."""
    held = {}
    for order in ("registered", "last first"):
        switch(True)
        model = llama(layers=4)
        params = list(model.parameters()) if order == "registered" else list(model.parameters())[::-1]
        config = ds_config(section(recipe), zero_optimization={"reduce_bucket_size": 1000})
        engine = make_engine(model, config, model_parameters=params)

        def count(_, order=order, params=params):
            held[order] = sum(p.grad.numel() for p in params if p.grad is not None)

        model.model.embed_tokens.weight.register_hook(count)
        for tokens in batches(2, dist.get_rank()):
            forward_backward(engine, tokens)
            engine.step()
        engine.destroy()
    return held
