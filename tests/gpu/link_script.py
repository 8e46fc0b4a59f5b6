"""GB/s that a rank sends in an all-gather over NCCL, by CUDA's clock and with torch alone; rank 0 prints it."""

import os

import torch
import torch.distributed as dist

BYTES, REPEATS = 1 << 28, 20

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
payload = torch.zeros(BYTES, dtype=torch.uint8, device="cuda")
gathered = torch.empty(BYTES * dist.get_world_size(), dtype=torch.uint8, device="cuda")
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
for repeat in range(REPEATS + 1):
    if repeat == 1:
        start.record()
    dist.all_gather_into_tensor(gathered, payload)
end.record()
end.synchronize()
if dist.get_rank() == 0:
    print("RATE", (dist.get_world_size() - 1) * BYTES * REPEATS / start.elapsed_time(end) / 1e6)
dist.destroy_process_group()
