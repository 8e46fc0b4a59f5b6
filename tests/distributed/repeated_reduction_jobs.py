"""Jobs on ranks that call engine.allreduce_gradients() after engine.backward(), whoever sets the boundary."""

from __future__ import annotations

import contextlib

import torch.distributed as dist
from models import KEPT, batches, ds_config, full_fp32_weights, full_weights, llama, make_engine, section
from parity_jobs import switch

# How a script says where an optimizer step's micro-batches end, and how its engine is configured for that.
STYLES = {
    "managed": {},
    "set boundary": {},
    "unmanaged": {"managed_gradient_accumulation": False},
    "coalesced": {"gradient_accumulation_steps": 1},  # one reduction a step, however many backwards
}


def repeat(engine, when, last):
    """Reduce again, as scripts do that were written for engines which left it to them."""
    if when == "always" or (when == "boundary" and last):
        for _ in range(2):
            engine.allreduce_gradients()


def micro_batches_of_a_step(engine, style, when, tokens):
    """Forward, backward and the call in question for each; the loss of the last."""
    for index, t in enumerate(tokens):
        last = index == len(tokens) - 1
        if style == "set boundary":
            engine.set_gradient_accumulation_boundary(last)
        loss = engine(input_ids=t, labels=t).loss
        engine.backward(loss)
        if style != "coalesced":
            repeat(engine, when, last)
        if style == "managed" and not last:
            engine.step()
    return loss.item()


def train(plugin, when, style="managed", accumulation=2, steps=2, dtype="fp32", lora=False, **overrides):
    """Losses, weights and the optimizer's fp32 weights of a small Llama. `plugin`: the section, None for stock."""
    import deepspeed

    switch(plugin is not None)
    options = {"gradient_accumulation_steps": accumulation, "gradient_clipping": 0.5, **STYLES[style], **overrides}
    model = llama()
    if lora:
        from frozen_models import with_adapters

        model = with_adapters(model)
    if plugin is None:
        deepspeed.utils.set_z3_leaf_modules(model, ["LlamaDecoderLayer"])
    engine = make_engine(model, ds_config(plugin, dtype, **options))
    losses, tokens = [], list(batches(steps * accumulation, dist.get_rank()))
    for step in range(steps):
        mine = tokens[step * accumulation : (step + 1) * accumulation]
        around = engine.coalesce_grad_reduction() if style == "coalesced" else contextlib.nullcontext()
        with around:
            losses.append(micro_batches_of_a_step(engine, style, when, mine))
        if style == "coalesced":
            repeat(engine, when, last=True)
        engine.step()
    found = {
        "losses": losses,
        "weights": full_weights(engine.module),
        "fp32 weights": full_fp32_weights(engine.module),
        "steps": engine.global_steps,
    }
    engine.destroy()
    return found


def with_and_without(recipe, whens, fields=None, style="managed", **options):
    """{when the call is made: a run}."""
    return {when: train(section(recipe, **(fields or {})), when, style, **options) for when in ("never", *whens)}


def beside_stock(style, **options):
    """(stock with the call in every micro-batch, lossless with it)."""
    kept = {**options, "zero_optimization": {**KEPT, **options.get("zero_optimization", {})}}
    return train(None, "always", style, **kept), train(section("lossless"), "always", style, **options)


def known_styles():
    """Those that this DeepSpeed has."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    needs = {"unmanaged": "managed_gradient_accumulation", "coalesced": "coalesce_grad_reduction"}
    return [style for style in STYLES if hasattr(DeepSpeedEngine, needs.get(style, "step"))]
