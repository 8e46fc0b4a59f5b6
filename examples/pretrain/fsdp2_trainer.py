"""Hugging Face Trainer on a model that transformers shards as it loads it (FSDP2), with this project's collectives.

    torchrun --nproc-per-node 4 examples/pretrain/fsdp2_trainer.py --recipe zeropp --ranks-per-node 2

The model is a small Llama with random weights that the script saves first. transformers 5.23 or newer.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from zeropp_fp8 import fsdp2

sys.path.append(str(Path(__file__).resolve().parents[1]))  # examples/
from options import whole

SIZES = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2}


class Counting(Dataset):
    """Sequences that count up, modulo 256."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index + torch.arange(64)) % 256
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="zeropp", help="lossless, zeropp, zeropp-4bit or zeropp-exact")
    parser.add_argument(
        "--ranks-per-node", type=whole(1), help="ranks that share a node; without it those of each host"
    )
    parser.add_argument("--steps", type=whole(1), default=6)
    parser.add_argument("--folder", default="runs/fsdp2_trainer", help="of the model, and of what Trainer writes")
    args = parser.parse_args()
    settings = TrainingArguments(
        f"{args.folder}/trainer",
        use_cpu=not torch.cuda.is_available(),
        max_steps=args.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",  # Trainer does not save optimizer states of models that are sharded as they load
        report_to=[],
    )
    if not dist.is_initialized():  # Trainer's arguments do it on GPUs
        dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = LlamaConfig(num_attention_heads=4, use_cache=False, **SIZES)
        LlamaForCausalLM(config).save_pretrained(f"{args.folder}/model")
    dist.barrier()

    sharding = DistributedConfig(fsdp_size=dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(f"{args.folder}/model", distributed_config=sharding)
    fsdp2.apply(model, recipe=args.recipe, ranks_per_node=args.ranks_per_node or "detect")
    trainer = Trainer(model=model, args=settings, train_dataset=Counting())
    trainer.train()
    report = fsdp2.wire_report(model)
    if dist.get_rank() == 0:
        for kind, links in report["per_step"].items():
            print(f"{kind}: {links['inter']:.0f} bytes between nodes, {links['intra']:.0f} within")
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.1)  # gloo's threads let go of their last tensors, for which they need Python


if __name__ == "__main__":
    main()
