"""The training script of DeepSpeed's own getting-started page, on a small network; it knows nothing of the plugin."""

import argparse

import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--steps", type=int, default=20)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
generator = torch.Generator().manual_seed(engine.global_rank)
for step in range(args.steps):
    x = torch.randn(16, 64, generator=generator).to(engine.device)
    y = x[:, :8].argmax(dim=1)
    loss = torch.nn.functional.cross_entropy(engine(x), y)
    engine.backward(loss)
    engine.step()
    print(f"rank {engine.global_rank} step {step} loss {loss.item():.4f}", flush=True)
torch.distributed.destroy_process_group()  # else a thread of gloo may outlive Python, and abort
