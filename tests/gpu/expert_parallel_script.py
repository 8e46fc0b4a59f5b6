"""Trainings whose experts lie on two ranks by DeepSpeed's AutoEP, over NCCL; writes what was found as JSON.

Started by test_gpu_expert_parallel.py on four ranks as two nodes, which may share a GPU: two have the same experts.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

import torch
import torch.distributed as dist
from expert_parallel_jobs import FP8, norm, of
from models import batches
from running import run, see, step

from benchmarks.bit_parity import slow_links
from benchmarks.harness.environment import forget_memory, join

WHOLE = {"weights": {"difference": "none"}}
# Name: (recipe, its section, whether collectives begin late by random times).
CASES = {
    "stock": (None, {}, False),
    "stock, again": (None, {}, False),
    "lossless": ("lossless", {}, False),
    "lossless, delays": ("lossless", {}, True),
    "zeropp": ("zeropp", {}, False),
    "zeropp, delays": ("zeropp", {}, True),
    "zeropp, whole": ("zeropp", WHOLE, False),
    "zeropp, tokens in FP8": ("zeropp", FP8, False),
    "zeropp, tokens in FP8, delays": ("zeropp", FP8, True),
    "zeropp-exact": ("zeropp-exact", {}, False),
}


def trained(recipe, fields, delays, device) -> dict:
    """Losses, norms, a hash of this rank's weights after five steps, and bytes per step."""
    forget_memory(device)
    spec = of(recipe, fields=fields, attn_implementation="eager", hidden_size=128)
    data = [tokens.to(device) for tokens in batches(5, dist.get_rank())]
    with slow_links(delays and device.type == "cuda"):
        trace = run(spec, [step, see(norm)] * 5, ["weights", "bytes"] if recipe else ["weights"], data)
    digest = hashlib.sha256()
    for _, tensor in sorted(trace.weights.items()):
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy())
    return {"losses": trace.losses, "norms": trace.seen, "weights": digest.hexdigest(), "bytes": trace.bytes}


def main() -> None:
    device = join()
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = {name: trained(*case, device) for name, case in CASES.items()}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
