"""torchtitan's own train.py on CPU ranks, for test_torchtitan.py.

    titan_script.py --module titan_runs --config zeropp

Everything is torchtitan's, of an installed wheel (0.3.0), but for what asks CUDA or a torch that is newer: the device
is "cpu" and has no memory statistics, time limits of groups are not changed, and FlexAttention's written-out products
are let run backward on a CPU (TORCHDYNAMO_DISABLE=1: it is not compiled).
"""

from __future__ import annotations

import types

import torch
import torch.distributed as dist
from torch.nn.attention import flex_attention


def install() -> None:
    """Put the stand-ins in place, before torchtitan is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    device = {
        "current_device": lambda: 0,
        "empty_cache": lambda: None,
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: types.SimpleNamespace(total_memory=2**34, name="cpu"),
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
    }
    for name, function in device.items():
        setattr(torch.cpu, name, function)
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda *given, **named: None
    flex_attention._validate_device = lambda *given: None


if __name__ == "__main__":
    install()
    from torchtitan.train import main

    main()
