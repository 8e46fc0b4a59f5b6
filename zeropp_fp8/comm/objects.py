"""Gather small Python objects of all ranks: places, refusals, file lists. Training steps never do this."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of a group (default: the world), by rank. Collective, unless no group exists."""
    if not dist.is_initialized():
        return [value]
    found = [value] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found
