"""Jobs on ranks whose gradients of several micro-batches add up inside the node."""

from __future__ import annotations

import torch.distributed as dist
from models import batches, ds_config, full_fp32_weights, llama, make_engine, section
from parity_jobs import switch

import zeropp_fp8


def train(recipe, micro_batches, accumulate_in=None, steps=3, dtype="fp32", style="managed", gradients=None, **options):
    """Losses, fp32 weights and bytes a step; recipe None: stock. `style`: who says when the step follows."""
    switch(recipe is not None)
    chosen = None
    if recipe is not None:
        given = {"accumulate_in": accumulate_in} if accumulate_in else {}
        chosen = section(recipe, gradients={**given, **(gradients or {})})
    if style == "managed":
        options["gradient_accumulation_steps"] = micro_batches
    if style == "unmanaged":
        options["managed_gradient_accumulation"] = False
    engine = make_engine(llama(), ds_config(chosen, dtype, gradient_clipping=0.5, **options))
    data, losses, norms = batches(steps * micro_batches, dist.get_rank()), [], []
    for _ in range(steps):
        for place in range(micro_batches):
            if style == "set boundary":
                engine.set_gradient_accumulation_boundary(place == micro_batches - 1)
            tokens = next(data)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss if style == "managed" else loss / micro_batches)
            losses.append(float(loss))
            if style == "managed":
                engine.step()
        if style != "managed":
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    report = zeropp_fp8.wire_report(engine)["per_step"]["gradients"] if recipe is not None else None
    found = {"losses": losses, "norms": norms, "weights": full_fp32_weights(engine.module), "bytes": report}
    engine.destroy()
    return found


def runs(cases):
    return [train(**case) for case in cases]
