"""Jobs about the norm of gradients that run on ranks."""

from __future__ import annotations

import torch.distributed as dist
from models import batches, ds_config, full_weights, llama, make_engine, section
from running import loss_of, switch


def norms(cases, factors, steps=3, dtype="fp32"):
    """{(case, factor): (norms of each step over the factor, overflows, distance of the weights from the start)}.

    cases: {name: (recipe, None for stock; fields)}. The loss is multiplied by the factor, clipped to a norm of 1.
    """
    result = {}
    for name, (recipe, fields) in cases.items():
        for factor in factors:
            switch(recipe is not None)
            the_section = None if recipe is None else section(recipe, **fields)
            engine = make_engine(llama(), ds_config(the_section, dtype, gradient_clipping=1.0))
            start, found, skipped = full_weights(engine.module), [], 0
            for tokens in batches(steps, dist.get_rank()):
                loss = loss_of(engine, tokens)
                engine.backward(loss * factor)
                engine.step()
                found.append(float(engine.get_global_grad_norm()) / factor)
                skipped += bool(engine.optimizer.overflow)
            end = full_weights(engine.module)
            distance = sum((end[n] - start[n]).double().square().sum() for n in start).sqrt().item()
            result[name, factor] = found, skipped, distance
            engine.destroy()
    return result
