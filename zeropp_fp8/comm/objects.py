"""Small Python objects of all ranks: places, refusals, file lists. Never on the way of a step."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The value of each rank of a group (default: of all), by rank. Collective; a process without a group is alone."""
    if not dist.is_initialized():
        return [value]
    found = [value] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found
