"""Jobs on ranks that call engine.allreduce_gradients() after engine.backward(), whoever sets the boundary."""

from __future__ import annotations

from frozen_models import with_adapters
from models import KEPT, llama, section
from running import Spec, backward, boundary, forward, on_engine, run, see, update, within

# How a script says where an optimizer step's micro-batches end, and how its engine is configured for that.
STYLES = {
    "managed": {},
    "set boundary": {},
    "unmanaged": {"managed_gradient_accumulation": False},
    "coalesced": {"gradient_accumulation_steps": 1},  # one reduction a step, however many backwards
}


def events_of_step(style, when, micro_batches):
    """Of an optimizer step that reduces again, as scripts do that were written for engines which left it to them."""
    again, events = [on_engine(lambda engine: engine.allreduce_gradients())] * 2, []
    for place in range(micro_batches):
        last = place == micro_batches - 1
        events += [boundary(last)] * (style == "set boundary") + [forward, backward]
        if style != "coalesced" and (when == "always" or (when == "boundary" and last)):
            events += again
        events += [update] * (style == "managed" and not last)
    if style == "coalesced":
        events = [within(lambda engine: engine.coalesce_grad_reduction(), *events), *again * (when != "never")]
    return [*events, update]


def train(plugin, when, style="managed", accumulation=2, dtype="fp32", lora=False, **overrides):
    """Two steps of a small Llama, and how many the engine has counted. `plugin`: the section, None for stock."""
    config = {"gradient_accumulation_steps": accumulation, "gradient_clipping": 0.5, **STYLES[style], **overrides}
    leaves = () if plugin else ("LlamaDecoderLayer",)
    spec = Spec(plugin, dtype, config, (lambda: with_adapters(llama())) if lora else llama, leaves=leaves)
    counted = see(lambda engine: engine.global_steps)
    return run(spec, [*events_of_step(style, when, accumulation) * 2, counted], ("weights", "masters"))


def with_and_without(recipe, whens, fields=None, style="managed", **options):
    """{when the call is made: a trace}."""
    return {when: train(section(recipe, **(fields or {})), when, style, **options) for when in ("never", *whens)}


def beside_stock(style, **options):
    """(stock with the call in every micro-batch, lossless with it)."""
    kept = {**options, "zero_optimization": {**KEPT, **options.get("zero_optimization", {})}}
    return train(None, "always", style, **kept), train(section("lossless"), "always", style, **options)


def known_styles():
    """Return the styles that this DeepSpeed has."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    needs = {"unmanaged": "managed_gradient_accumulation", "coalesced": "coalesce_grad_reduction"}
    return [style for style in STYLES if hasattr(DeepSpeedEngine, needs.get(style, "step"))]
