"""Saving the whole model in its own dtype, adapters merged, in Hugging Face's format; no rank holds it whole.

Parameters are gathered module by module; those of a PEFT layer together, because merging needs them together. Rank 0
keeps what the next file gets.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from zeropp_fp8.zero.export.lockstep import Lockstep
from zeropp_fp8.zero.export.shard_writer import ShardWriter, parse_size
from zeropp_fp8.zero.export.weights import Part, base_model, gathered, groups, tensors
from zeropp_fp8.zero.holders import module_of

_NAME = "save_merged_16bit"


@torch.no_grad()
def save_merged_16bit(engine_or_model, folder: str | Path, max_shard_size: int | str = "5GB") -> None:
    max_bytes = parse_size(max_shard_size)
    held = module_of(engine_or_model, _NAME)
    model = base_model(held.module if isinstance(held, DeepSpeedEngine) else held, _NAME)
    on_first = Lockstep(_NAME, here=not dist.is_initialized() or dist.get_rank() == 0)
    writer = on_first.call(ShardWriter, folder, max_bytes)
    on_first.raise_everywhere()
    for (part,) in groups(model):
        with gathered([param for _, param in part.params]) as values:
            on_first.call(_add, writer, part, values)
    on_first.call(ShardWriter.close, writer)
    on_first.call(_save_config, model, writer)
    on_first.raise_everywhere()


def _add(writer: ShardWriter, part: Part, values: dict[int, Tensor]) -> None:
    for weight in tensors(part, values):
        writer.add(weight.name, weight.rounded())


def _save_config(model: nn.Module, writer: ShardWriter) -> None:
    """Write a transformers model's config.json and what it generates with; other models have none."""
    config = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", str(model.dtype).removeprefix("torch."))
    if _has_own_head(model, writer):
        config.tie_word_embeddings = False
    config.save_pretrained(writer.folder)
    if model.can_generate():
        model.generation_config.save_pretrained(writer.folder)


def _has_own_head(model: nn.Module, writer: ShardWriter) -> bool:
    """Whether embedding and head were saved as two matrices: PEFT may have trained one of a tied pair."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [next((n for n, m in model.named_modules() if m is end), None) for end in ends if end is not None]
    return len(names) == 2 and all(f"{name}.weight" in writer.file_of for name in names)
