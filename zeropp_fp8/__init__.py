"""zeropp_fp8: a DeepSpeed plugin that trains with ZeRO-3 and quantized communication.

    import zeropp_fp8
    zeropp_fp8.enable()          # before deepspeed.initialize and deepspeed.zero.Init

Nothing else in a script changes; the `zeropp_fp8` section of the ds_config (or DeepSpeed's own ZeRO++ keys) says what
the plugin does.
"""

from zeropp_fp8.config import ConfigError

__version__ = "0.1.0"
__all__ = ["ConfigError", "__version__", "disable", "enable", "generation", "save_merged_16bit", "wire_report"]


def enable() -> None:
    """Install the plugin into DeepSpeed. Idempotent. Call it before `zero.Init` and `deepspeed.initialize`.

    Raises:
        RuntimeError: this DeepSpeed lacks a name that the plugin relies on; the message gives the name and the version.
    """
    from zeropp_fp8 import plugin

    plugin.enable()


def disable() -> None:
    """Take the plugin out again: restore every replaced name of DeepSpeed. Engines made meanwhile keep working."""
    from zeropp_fp8 import plugin

    plugin.disable()


def wire_report(engine, total: bool = False) -> dict:
    """Return the bytes per step that this rank of a DeepSpeed engine sends (with `total`: all ranks together).

    Args:
        engine: a DeepSpeed engine, its module (a Trainer's callback gets that), or a Trainer that has begun to train.

    Returns:
        {"steps": finished optimizer steps,
         "per_step": {"weights_forward" | "weights_backward" | "gradients" | "activations" | "other":
                      {"inter": bytes, "intra": bytes}},
         "stock_per_step": the same for stock ZeRO-3 on the same events, by the ring formula in 16 bits,
         "outside_steps": {"inter", "intra"}: bytes so far that no step uses, as of evaluation and checkpoints,
         "gradient_scaling": if ranks share scales of gradients: {"mu", "saturated", "vanished"}, the factor mu now, and
             the last step's shares of FP8 numbers that were at the largest code and that became zero}
        `inter` is between nodes, `intra` within a node. No communication: safe to call on one rank alone.

    Raises:
        ValueError: the engine was not made with the plugin active.
    """
    from zeropp_fp8.zero.holders import engine_of
    from zeropp_fp8.zero.telemetry import wire_report as report

    return report(engine_of(engine, "wire_report").zeropp_fp8_session, total)


def save_merged_16bit(engine_or_model, folder, max_shard_size="5GB") -> None:
    """Save the whole model in its own dtype with its adapters merged, for `from_pretrained`. Call it on every rank.

    `folder` gets safetensors files (with an index if there are several), config.json and generation_config.json. No
    rank holds the whole model: parameters are gathered one by one (a PEFT layer's together), and rank 0 keeps those of
    the next file. PEFT merges adapters in fp32, rounded once. The weights are those that the model computes with.

    Args:
        engine_or_model: a DeepSpeed engine, a Trainer, or a model, with or without PEFT.
        folder: made if it does not exist. The save replaces weights that an earlier save has left in it.
        max_shard_size: the largest size of a file: bytes, or like "5GB". A larger tensor has a file of its own.

    Raises:
        ValueError: `max_shard_size` has another form, or PEFT cannot merge an adapter.
        RuntimeError: rank 0 could not merge or write; every rank raises it with rank 0's message.
    """
    from zeropp_fp8.zero.export.merged import save_merged_16bit as save

    save(engine_or_model, folder, max_shard_size)


def generation(engine, weights: str = "auto", merge_adapters: bool = True, graph: bool = False):
    """Context manager: generate with the model of an engine that trains. Every rank enters it, between steps.

        with zeropp_fp8.generation(engine) as model:
            tokens = model.generate(input_ids=..., attention_mask=..., max_new_tokens=256, do_sample=True)

    Weights stay on each rank until the context ends, and nothing is gathered for a token: ranks may generate different
    numbers of them. The model is in evaluation mode (no dropout), with its KV cache on.

    Args:
        engine: a DeepSpeed engine with the plugin active, with an optimizer or without; its module; or a Trainer.
        weights: what stays on each rank. "values": all weights in their dtype, as fast as a model without DeepSpeed.
            "codes": linear layers' weights as codes, as they are stored or sent: a half to a quarter of the memory;
            on a GPU a product of few rows uses the codes themselves, otherwise one block at a time is decoded.
            "sharded": nothing; every token gathers all weights (within the node, if there is a secondary shard), and
            ranks generate in step. "auto": the first of these that takes at most half of the free memory of each rank.
        merge_adapters: if values stay, merge active LoRA and DoRA into them (into them only), which saves two of three
            products of a layer. Sums are rounded to the weights' dtype, like those of a merged model. Other adapters,
            and those on tied weights, are computed as in training.
        graph: record the forward pass of a token as a CUDA graph, at the second token of each call of `generate`, and
            replay it for the others. It needs a GPU, weights that stay, and a decoder of transformers that attends to
            all tokens; `generate` uses its static cache. Hooks on modules are called while a pass is recorded only.

    Yields:
        `engine.module`. Its `generate` has use_cache=True, the right synced_gpus, and with `graph` the static cache
        unless told otherwise. torch.compile compiles nothing inside the context, and compiled code is not used.

    Raises:
        ValueError: the engine is without the plugin, `weights` has another value, or a graph is impossible (with beam
            search and caches of other kinds: when they are used).
        RuntimeError: inside another generation, or in the middle of a pass; a forward pass inside the context with
            gradients; gathering parameters inside it; a step that cannot be recorded.
        MemoryError: some rank has too little memory for the weights that are to stay; every rank raises it.
    """
    from zeropp_fp8.zero.generation.context import generation as generate_with

    return generate_with(engine, weights, merge_adapters, graph)
