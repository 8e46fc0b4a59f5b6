"""The account of a training step's memory: the peaks of its phases, and by owner at the highest."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

from benchmarks.harness import peers
from zeropp_fp8.zero.as_deepspeed import GRAD_PARTITIONS

SHARD, MASTER, MOMENTS, GRADIENTS = "16-bit shard", "fp32 weights", "moments", "reduced gradients"
GATHERS, WEIGHTS, REDUCTIONS = "buffers of gathers", "gathered weights", "buffers of reductions"
UPDATE, BEFORE, REST = "fp32 gradients of the update", "held before, other", "activations, whole gradients, rest"
OWNERS = SHARD, MASTER, MOMENTS, GRADIENTS, GATHERS, WEIGHTS, REDUCTIONS, UPDATE, BEFORE, REST
# (owner, parts of "file:function" of a frame): of an allocation's frames, innermost first, the first that fits.
FRAMES = (
    (GRADIENTS, ("zero/as_deepspeed.py:_make", "_fsdp_collectives.py:foreach_reduce", "states/gradient_store.py")),
    (UPDATE, ("zero/chunks.py", "_prepare_fp32_grad_for_sub_group")),
    (MOMENTS, ("torch/optim/",)),
    (WEIGHTS, ("gather/buffers.py", "_fsdp_param.py:init_all_gather_outputs", "_fsdp_param.py:alloc_all_gather")),
    (REDUCTIONS, ("comm/reduce_scatter.py", "zero/reduce/", "coalesced_collectives.py", "__avg_scatter_grads")),
    (GATHERS, ("zero/gather/", "_fsdp_collectives.py", "_fsdp_param_group.py:unshard")),
)


def owned(trainer) -> Iterator[tuple[str, Tensor]]:
    """(owner, tensor) of all that is there between steps in a trainer of harness/peers.py."""
    if isinstance(trainer, peers.FsdpRun):
        optimizer = trainer.optimizer
        yield from ((MASTER, _local(param)) for param in trainer.model.parameters())
    else:
        stage = trainer.engine.optimizer
        optimizer = stage.optimizer
        yield from ((SHARD, shard) for shard in stage.fp16_partitioned_groups_flat)
        yield from ((MASTER, flat) for flat in stage.fp32_partitioned_groups_flat)
        yield from ((GRADIENTS, partition) for partition in getattr(stage, GRAD_PARTITIONS).values())
    for state in optimizer.state.values():
        yield from ((MOMENTS, _local(value)) for value in state.values() if torch.is_tensor(value))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def resting(trainer) -> dict[int, tuple[str, int]]:
    """{address of a storage: (owner, bytes)} of `owned`."""
    storages = ((owner, tensor.untyped_storage()) for owner, tensor in owned(trainer))
    return {storage.data_ptr(): (owner, storage.nbytes()) for owner, storage in storages if storage.nbytes()}


def owner_of(frames: list[dict]) -> str:
    """The owner of an allocation in a step, by its stack."""
    for frame in frames:
        place = f"{frame['filename']}:{frame['name']}"
        for owner, parts in FRAMES:
            if any(part in place for part in parts):
                return owner
    return REST


def at_peak(before: dict[int, tuple[str, int]], events: list[dict]) -> dict[str, int]:
    """Bytes by owner when most were allocated.

    Args:
        before: {address: (owner, bytes)} of what is allocated when the events begin.
        events: of torch.cuda.memory's trace, in order.
    """
    live, held = dict(before), Counter()
    for owner, size in live.values():
        held[owner] += size
    total = most = held.total()
    found = Counter(held)
    for event in events:
        if event["action"] == "alloc":
            owner, size = live[event["addr"]] = owner_of(event["frames"]), event["size"]
        elif event["action"] == "free_requested" and event["addr"] in live:
            owner, size = live.pop(event["addr"])
            size = -size
        else:
            continue
        held[owner] += size
        total += size
        if total > most:
            most, found = total, Counter(held)
    return {owner: found[owner] for owner in OWNERS if found[owner]}


def memory_profile(trainer, step: Callable[[], object], device: torch.device, found: int) -> dict:
    """GiB of one step. On a GPU the peak of each phase, and by owner at the highest; else what is there between steps.

    Args:
        found: bytes that were allocated before the trainer was made, and do not count.
    """
    rest = resting(trainer)
    if device.type != "cuda":
        step()
        between = Counter()
        for owner, size in rest.values():
            between[owner] += size
        return {"between_steps_gib": _gib(between)}
    torch.cuda.synchronize()
    snapshot, before = torch.cuda.memory._snapshot(device)["segments"], {}
    for block in (block for segment in snapshot for block in segment["blocks"]):
        if block["state"] == "active_allocated":
            owner, _ = rest.get(block["address"], (BEFORE, 0))
            before[block["address"]] = owner, block["size"]
    phases: dict[str, int] = {}

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(device)
        yield
        phases[name] = torch.cuda.max_memory_allocated(device) - found

    torch.cuda.memory._record_memory_history(stacks="python", max_entries=10**6, device=device)
    with mock.patch.object(peers, "record_function", phase):
        step()
    torch.cuda.synchronize()
    events = torch.cuda.memory._snapshot(device)["device_traces"][device.index]
    torch.cuda.memory._record_memory_history(enabled=None)
    highest = at_peak(before, events)
    highest[BEFORE] = highest.get(BEFORE, 0) - found
    return {
        "peak_gib": max(phases.values()) / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        "phases_gib": _gib(phases),
        "at_peak_gib": _gib(highest),
        "allocations": sum(event["action"] == "alloc" for event in events),
    }


def _gib(sizes: dict[str, int]) -> dict[str, float]:
    return {name: size / 2**30 for name, size in sizes.items()}


def show(found: dict) -> None:
    """Print what `memory_profile` gave."""
    for title, sizes in found.items():
        if isinstance(sizes, dict):
            print(f"  {title}: " + ", ".join(f"{name} {gib:.3f}" for name, gib in sizes.items()))
        else:
            print(f"  {title}: {sizes:.3f}" if title.endswith("_gib") else f"  {title}: {sizes}")
