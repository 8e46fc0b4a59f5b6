"""Memory of the device that a rank computes on: that of its GPU, or its share of the host memory."""

from __future__ import annotations

import psutil
import torch


def device_bytes(device: torch.device, ranks_here: int) -> int:
    """The total memory. `ranks_here`: ranks that share the host."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total // ranks_here


def free_bytes(device: torch.device, ranks_here: int) -> int:
    """Memory that this rank can still allocate; on a GPU it includes the unused part of torch's cache."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return psutil.virtual_memory().available // ranks_here
