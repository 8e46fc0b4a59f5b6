"""Two-level all-gather of uint8 payloads (qwZ), with the node's copy kept on the way (hpZ).

ZeRO++ (arXiv 2306.10209), sections 3.1 and 3.2, with the hops in the order that uses the network once: first ranks
with the same local index exchange across nodes, then each node exchanges over its own links. Each node sends (N-1)/N
of the model; in a ring it would send (W-1)/W.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp_fp8.comm.issue import issue
from zeropp_fp8.comm.ledger import WireLedger
from zeropp_fp8.comm.topology import Level

# torch 2.13 renamed all_gather_into_tensor.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def start_level(
    gathered: Tensor, payload: Tensor, level: Level, ledger: WireLedger | None, async_op: bool = True
) -> dist.Work | None:
    """Start one hop: flat uint8 `gathered` becomes the payloads of the level's ranks; None if the level is one rank.

    `payload` may be this rank's part of `gathered` (in place).
    """
    if level.size == 1:
        return None
    sent = (level.size - 1) * payload.numel()
    return issue(_all_gather_single, gathered, payload, level=level, ledger=ledger, sent=sent, async_op=async_op)


def start_regions(
    gathered: Sequence[Tensor], payloads: Sequence[Tensor], level: Level, ledger: WireLedger | None
) -> list[dist.Work]:
    """Call `start_level` for several pairs of buffers, without the empty ones."""
    works = [start_level(g, p, level, ledger) for g, p in zip(gathered, payloads) if p.numel()]
    return [work for work in works if work is not None]


def gather_through(payload: Tensor, levels: Sequence[Level], ledger: WireLedger | None = None) -> Tensor:
    """All-gather flat uint8 `payload` through `levels`. Flat, last hop outermost, complete on the current stream."""
    for level in levels:
        if level.size > 1:
            gathered = torch.empty(level.size * payload.numel(), dtype=payload.dtype, device=payload.device)
            start_level(gathered, payload, level, ledger, async_op=False)
            payload = gathered
    return payload


def rows_by_rank(gathered: Tensor, level_sizes: Sequence[int]) -> Tensor:
    """Return uint8 [ranks, payload bytes] in the order of ranks, from hops over levels of these sizes."""
    dims, ranks = len(level_sizes), math.prod(level_sizes)
    num_bytes = gathered.numel() // ranks
    # An all-gather puts its own level in front, so the buffer's dimensions are last hop first.
    payloads = gathered.view(*reversed(level_sizes), num_bytes)
    return payloads.permute(*reversed(range(dims)), dims).reshape(ranks, num_bytes)


def ranks_held(level_sizes: Sequence[int], hops: int, rank: int) -> list[int]:
    """Return the ranks whose rows `rank`'s buffer holds after `hops` hops over levels of these sizes, in row order.

    Every hop puts its own level in front, so the buffer's dimensions are the levels, last hop first, while ranks count
    with the first level outermost: rank = (i_0 * size_1 + i_1) * size_2 + i_2.
    """
    ranks = torch.arange(math.prod(level_sizes), device="cpu").view(*level_sizes)
    place = (ranks == rank).nonzero()[0].tolist()
    held = ranks[(slice(None),) * hops + tuple(place[hops:])]
    return held.permute(tuple(reversed(range(hops)))).reshape(-1).tolist()
