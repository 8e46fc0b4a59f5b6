"""Train a small Llama with PyTorch's FSDP2 and this project's collectives, without DeepSpeed.

    torchrun --nproc-per-node 4 examples/pretrain/fsdp2.py --recipe zeropp --ranks-per-node 2

It saves and loads a checkpoint of torch.distributed.checkpoint on the way, and prints losses and bytes per step.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from zeropp_fp8 import fsdp2

sys.path.append(str(Path(__file__).resolve().parents[1]))  # examples/
from options import whole

SIZES = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2}


def model_of(device: torch.device) -> LlamaForCausalLM:
    """A Llama, sharded block by block."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, use_cache=False, **SIZES)).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="zeropp", help="lossless, zeropp, zeropp-4bit or zeropp-exact")
    parser.add_argument(
        "--ranks-per-node", type=whole(1), help="ranks that share a node; without it those of each host"
    )
    parser.add_argument("--steps", type=whole(1), default=6)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as --help shows")
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    model = model_of(device)
    fsdp2.apply(model, recipe=args.recipe, ranks_per_node=args.ranks_per_node or "detect")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1 + rank)
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)
    for step in range(args.steps):
        start = torch.randint(0, 256, (4, 1), generator=generator)
        tokens = ((start + torch.arange(64)) % 256).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach(), op=dist.ReduceOp.SUM)
        if rank == 0:
            print(f"step {step}: loss {loss.item() / dist.get_world_size():.4f}", flush=True)
        if step == args.steps // 2:
            weights, states = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": states, "zeropp_fp8": fsdp2.extra_state(model)}
            dcp.save(state, checkpoint_id=box[0])
            dcp.load(state, checkpoint_id=box[0])
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    report = fsdp2.wire_report(model)
    if rank == 0:
        for kind, links in report["per_step"].items():
            print(f"{kind}: {links['inter']:.0f} bytes between nodes, {links['intra']:.0f} within")
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.1)  # gloo's threads let go of their last tensors, for which they need Python


if __name__ == "__main__":
    main()
