"""Trainings of a model that Accelerate shards by FSDP2, with and without the collectives; writes JSON of the results.

Started by test_gpu_fsdp2.py on two ranks as two nodes, which may share a GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from models import batches, llama
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.harness.environment import join
from zeropp_fp8 import fsdp2


def trained(accelerator: Accelerator, recipe: str | None) -> dict:
    """Losses, norms and bytes of five steps."""
    torch.manual_seed(0)
    model = llama(hidden=128, intermediate=256, vocab=1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    if recipe is not None:
        fsdp2.apply(model, recipe, ranks_per_node=1)
    losses, norms = [], []
    for tokens in batches(5, dist.get_rank(), vocab=1024):
        tokens = tokens.to(accelerator.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.free_memory()  # it finds the gradients to clip by the models that it knows, and knows one at a time
    found = {"losses": losses, "norms": norms, "sharded": type(model).__name__}
    return found if recipe is None else found | {"bytes": fsdp2.wire_report(model)["per_step"]}


def main() -> None:
    join()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    found = {str(recipe): trained(accelerator, recipe) for recipe in (None, "lossless", "zeropp")}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
