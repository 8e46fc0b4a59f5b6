"""Trainings of fully_shard with and without the project's collectives, over NCCL; writes what was found as JSON.

Started by test_gpu_fsdp2.py on two ranks as two nodes, which may share a GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path

os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

import torch
import torch.distributed as dist
from models import batches, llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from benchmarks.bit_parity import add_delays, slow_links
from benchmarks.harness.environment import forget_memory, join
from zeropp_fp8 import fsdp2

VOCABULARY = 1024


@dataclass
class Case:
    """One training; without a recipe it is torch's own.

    Attributes:
        ranks_per_node: of the two ranks, to the collectives.
        copies: each rank has the whole model, reduced over both (HSDP with one rank per node).
        delays: computing and collectives stop for random times on their streams.
        prefetches: each block's gather is issued one block earlier, forward and backward.
        evaluates: without gradients, after each step.
        micro_batches: per step; gradients cross between nodes with the last.
    """

    recipe: str | None = None
    ranks_per_node: int = 1
    copies: bool = False
    delays: bool = False
    compiled: bool = False
    offloaded: bool = False
    prefetches: bool = False
    evaluates: bool = False
    micro_batches: int = 1
    fields: dict = field(default_factory=dict)


WHOLE = {"weights": {"difference": "none"}}
_FAMILIES = {
    "": {},
    ", micro-batches": {"micro_batches": 3},
    ", compiled": {"compiled": True},
    ", offloaded": {"offloaded": True},
    ", copies": {"copies": True},
}
CASES = {
    f"{recipe or 'stock'}{name}": Case(recipe, **how)
    for recipe in (None, "lossless", "zeropp")
    for name, how in _FAMILIES.items()
}
CASES |= {
    "stock, again": Case(),
    "lossless, one node": Case("lossless", 2),
    "lossless, delays": Case("lossless", delays=True),
    "lossless, prefetches, delays": Case("lossless", delays=True, prefetches=True),
    "lossless, copies, delays": Case("lossless", copies=True, delays=True),
    "zeropp, again": Case("zeropp"),
    "zeropp, delays": Case("zeropp", delays=True),
    "zeropp, prefetches, delays": Case("zeropp", delays=True, prefetches=True),
    "zeropp, evaluates, delays": Case("zeropp", delays=True, evaluates=True),
    "zeropp, whole": Case("zeropp", fields=WHOLE),
    "zeropp, micro-batches, delays": Case("zeropp", delays=True, micro_batches=3),
    "zeropp, copies, delays": Case("zeropp", copies=True, delays=True),
    "zeropp, one node": Case("zeropp", 2),
    "zeropp, one node, delays": Case("zeropp", 2, delays=True),
    "zeropp-exact": Case("zeropp-exact"),
    "zeropp-exact, delays": Case("zeropp-exact", delays=True),
    "zeropp-exact, whole": Case("zeropp-exact", fields=WHOLE),
    "zeropp-4bit": Case("zeropp-4bit"),
}


def model_of(case: Case, device: torch.device) -> FSDPModule:
    model = llama(layers=6, hidden=256, intermediate=640, vocab=VOCABULARY, attn_implementation="eager").to(device)
    if case.delays:
        add_delays(model, device)
    shape, names = ((2, 1), ("replicate", "shard")) if case.copies else ((2,), ("shard",))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    ours = case.recipe is not None
    options = {
        "mesh": mesh["shard"] if ours else mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    if case.offloaded:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    layers = list(model.model.layers)
    for layer in layers:
        if case.compiled:
            layer.compile()
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if case.prefetches:
        for layer, following in itertools.pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([layer])
    if ours:
        replicate = mesh["replicate"] if case.copies else None
        fsdp2.apply(model, case.recipe, case.ranks_per_node, replicate, report={"every": 0}, **case.fields)
    if device.type == "cpu":  # gloo has no mean
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return model


def digest(model) -> str:
    """A hash of all parts of the weights, of both ranks."""
    found = hashlib.sha256()
    model.reshard()  # the root's stay gathered after an evaluation
    for param in model.parameters():
        found.update(param.to_local().detach().cpu().contiguous().view(torch.uint8).numpy())
    both = [None] * dist.get_world_size()
    dist.all_gather_object(both, found.hexdigest())
    return " ".join(both)


def trained(case: Case, device: torch.device, steps: int = 5) -> dict:
    """Losses, norms of gradients, a hash of weights and bytes per step; losses are read at the end."""
    forget_memory(device)
    model, count = model_of(case, device), case.micro_batches
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = batches(steps * count, dist.get_rank(), length=64, vocab=VOCABULARY)
    data = [tokens.to(device, non_blocking=True) for tokens in data]
    losses, evaluations, norms = [], [], []
    delays = slow_links(device.type == "cuda") if case.delays else contextlib.nullcontext()
    with delays:
        for step in range(steps):
            for index, tokens in enumerate(data[step * count : (step + 1) * count]):
                model.set_is_last_backward(index == count - 1)
                loss = model(input_ids=tokens, labels=tokens).loss
                (loss / count).backward()
                losses.append(loss.detach())
            if not case.offloaded:  # torch would reduce the norm on the CPU, which NCCL cannot
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor())
            optimizer.step()
            optimizer.zero_grad()
            if case.evaluates:
                with torch.no_grad():
                    evaluations.append(model(input_ids=data[0], labels=data[0]).loss)
    report = fsdp2.wire_report(model)["per_step"] if case.recipe else None
    return {
        "losses": [loss.item() for loss in losses],
        "evaluations": [loss.item() for loss in evaluations],
        "norms": [norm.item() for norm in norms],
        "weights": digest(model),
        "bytes": report,
    }


def attempt(case: Case, device: torch.device) -> dict:
    """Return what `trained` finds; an error that all ranks have is that of one case, and the others go on."""
    try:
        return trained(case, device)
    except Exception:
        return {"error": traceback.format_exc()}


def main() -> None:
    device = join(with_deepspeed=False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = {}
    for name, case in CASES.items():
        found[name] = attempt(case, device)
        if dist.get_rank() == 0:
            Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
