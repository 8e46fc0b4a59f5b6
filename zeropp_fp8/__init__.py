"""zeropp_fp8: a DeepSpeed plugin that trains with ZeRO-3 and quantized communication.

    import zeropp_fp8
    zeropp_fp8.enable()          # before deepspeed.initialize and deepspeed.zero.Init

Nothing else in a script changes; the `zeropp_fp8` section of the ds_config (or DeepSpeed's own ZeRO++ keys) says what
is done.
"""

from zeropp_fp8.config import ConfigError

__version__ = "0.1.0"
__all__ = ["ConfigError", "__version__", "disable", "enable", "generation", "save_merged_16bit", "wire_report"]


def enable() -> None:
    """Install the plugin into DeepSpeed. Idempotent. Call it before `zero.Init` and `deepspeed.initialize`.

    Raises:
        RuntimeError: this DeepSpeed lacks a name the plugin relies on; the message says which and the version.
    """
    from zeropp_fp8 import plugin

    plugin.enable()


def disable() -> None:
    """Take the plugin out again: every replaced name of DeepSpeed is restored. Engines made meanwhile keep working."""
    from zeropp_fp8 import plugin

    plugin.disable()


def wire_report(engine, total: bool = False) -> dict:
    """Bytes per step sent by this rank of a DeepSpeed engine (with `total`: by all ranks together).

    Args:
        engine: a DeepSpeed engine, its module (what a Trainer's callback gets), or a Trainer that has begun to train.

    Returns:
        {"steps": finished optimizer steps,
         "per_step": {"weights_forward" | "weights_backward" | "gradients" | "activations" | "other":
                      {"inter": bytes, "intra": bytes}},
         "stock_per_step": the same for stock ZeRO-3 on the same events, by the ring formula in 16 bits,
         "outside_steps": {"inter", "intra"}: bytes so far that no step uses, of GatheredParameters, evaluation,
             checkpoints,
         "gradient_scaling": where gradients travel with scales that ranks share: {"mu", "saturated", "vanished"}, the
             factor mu now, and of the last step the shares of FP8 numbers at the largest code and that became zero}
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
    rank holds the model: parameters are gathered one by one (of a PEFT layer together), and rank 0 keeps what goes into
    the next file. Adapters are merged in fp32 by PEFT itself: decoded weight plus the adapter's part, rounded once.
    Weights are those that the model computes with, not an optimizer's fp32 copies. The model stays as it is.

    Args:
        engine_or_model: a DeepSpeed engine, a Trainer, or a model, with or without PEFT.
        folder: made if it is not there. Weights that an earlier save has left in it are replaced.
        max_shard_size: of a file: bytes, or like "5GB". A larger tensor has a file of its own.

    Raises:
        ValueError: another `max_shard_size`, or an adapter that PEFT cannot merge.
        RuntimeError: rank 0 could not merge or write; on every rank, with its message.
    """
    from zeropp_fp8.zero.export.merged import save_merged_16bit as save

    save(engine_or_model, folder, max_shard_size)


def generation(engine, weights: str = "auto", merge_adapters: bool = True, graph: bool = False):
    """Context manager: generate with the model of an engine that trains. To be entered on every rank, between steps.

        with zeropp_fp8.generation(engine) as model:
            tokens = model.generate(input_ids=..., attention_mask=..., max_new_tokens=256, do_sample=True)

    A forward pass of ZeRO-3 gathers every layer; generation would do so for each token. Here weights stay on each rank
    until the context ends, which gives the memory back, and nothing is gathered in between: ranks may generate
    different numbers of tokens. The model evaluates (no dropout), with its KV cache on.

    Args:
        engine: a DeepSpeed engine with the plugin active, with an optimizer or without; its module; or a Trainer.
        weights: what stays on each rank. "values": all weights in their dtype, as fast as a model without DeepSpeed.
            "codes": those of linear layers as codes, as they are stored or travel: a half to a quarter of the memory;
            few rows are multiplied with the codes themselves on a GPU, else the weights of one block at a time are
            decoded. "sharded": nothing; every token gathers all weights (within the node, if there is a secondary
            shard), and ranks generate in step. "auto": the first of these that takes at most half of the memory that
            is free on the rank with the least.
        merge_adapters: where values stay, merge the active PEFT adapters into them (into them only), which saves two
            of three products of a LoRA layer. Sums are rounded to the weights' dtype, like those of a merged model.
            What is not merged is multiplied in one forward a layer; PEFT's variants of LoRA by PEFT.
        graph: record the forward pass of a token as a CUDA graph, at the second token of each call of `generate`, and
            replay it for the others: then Python costs a token next to nothing. Needs a GPU, weights that stay, and a
            decoder of transformers that attends to all tokens; `generate` uses its static cache, as long as the
            sequence may become. Hooks on modules are called while a pass is recorded, and not when it is replayed.

    Yields:
        `engine.module`. Its `generate` has use_cache=True, the right synced_gpus, and with `graph` the static cache
        unless told otherwise. torch.compile compiles nothing inside the context, and what it has compiled rests.

    Raises:
        ValueError: an engine without the plugin, another `weights`, or what a graph cannot be had for (beam search and
            caches of other kinds when they are used).
        RuntimeError: inside another generation, or in the middle of a pass; a forward pass inside the context with
            gradients; gathering parameters inside it; a step that cannot be recorded.
        MemoryError: no memory on some rank for what is to stay; on every rank.
    """
    from zeropp_fp8.zero.generation.context import generation as generate_with

    return generate_with(engine, weights, merge_adapters, graph)
