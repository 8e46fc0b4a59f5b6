"""Numbers that lie as parameters do: from owners' parts to DeepSpeed's equal slices, and back. All is collective."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm.reduce_scatter import slice_of_rank
from zeropp_fp8.zero.session import Session


def gather_parts(session: Session, param: Parameter, own: Tensor) -> Tensor:
    """Flat full tensor, on the session's device, of what each rank has for its part of a parameter."""
    parts, world = session.placement.parts(param), session.topology.world_size
    sizes = [sum(part.numel for part in parts if part.owner == rank) for rank in range(world)]
    own = own.to(session.device).contiguous().view(-1)
    gathered = own.new_empty(sum(sizes))
    dist.all_to_all_single(gathered, own.repeat(world), sizes, [own.numel()] * world, group=session.topology.group)
    full = torch.empty_like(gathered)
    taken = [sum(sizes[:rank]) for rank in range(world)]
    for part in parts:
        full[part.start : part.start + part.numel] = gathered[taken[part.owner] :][: part.numel]
        taken[part.owner] += part.numel
    return full


def slice_of_parts(session: Session, param: Parameter, own: Tensor) -> Tensor:
    """DeepSpeed's slice, padded, on the tensor's device, of what each rank has for its part."""
    topology = session.topology
    return slice_of_rank(gather_parts(session, param, own), topology.rank, topology.world_size).to(own.device)


def part_of_slices(session: Session, param: Parameter, one_slice: Tensor) -> Tensor:
    """The inverse of `slice_of_parts`."""
    mine = one_slice.to(session.device).contiguous()
    slices = [torch.empty_like(mine) for _ in range(session.topology.world_size)]
    dist.all_gather(slices, mine, group=session.topology.group)
    full = torch.cat(slices)[: sharded.numel(param)]
    return session.placement.own_part(param, full).to(one_slice.device)
