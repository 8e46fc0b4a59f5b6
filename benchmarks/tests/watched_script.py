"""A script that trains a few steps with an engine: what harness/watched.py watches in its test."""

import sys

import deepspeed
import torch

from benchmarks.harness.zero3 import ds_config

assert sys.argv[1:] == ["--local_rank=0", *sys.argv[2:]] and "--preset" in sys.argv
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
model = torch.nn.Linear(8, 8)
config = ds_config(None, 1, small=True, lean=False)
engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)[0]
for _ in range(3):
    engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16)).float().square().sum())
    engine.step()
torch.distributed.destroy_process_group()
