"""Two-level all-gather of uint8 payloads (qwZ), with the node's copy kept on the way (hpZ).

ZeRO++ (arXiv 2306.10209), sections 3.1 and 3.2, with the hops in the order that crosses the network once: ranks with
the same local index exchange across nodes, then the node fans out over its own links. Each node sends (N-1)/N of the
model instead of the (W-1)/W of a ring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp_fp8.comm.issue import issue
from zeropp_fp8.comm.ledger import WireLedger
from zeropp_fp8.comm.topology import Level, Topology
from zeropp_fp8.formats import WireFormat

# torch 2.13 renamed all_gather_into_tensor.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class PendingGather:
    """The last hop of an all-gather, under way."""

    def __init__(self, buffer: Tensor, work: dist.Work | None, level_sizes: Sequence[int], payload_bytes: int) -> None:
        self._buffer = buffer
        self._work = work
        self._level_sizes = level_sizes
        self._payload_bytes = payload_bytes

    def wait(self) -> Tensor:
        """uint8 [*level sizes, first hop first, payload_bytes]: the payloads of all ranks in rank order.

        The result is a (permuted) view; flattening its leading dimensions gives rank order.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        # An all-gather puts its own level in front, so the buffer's dimensions are last hop first.
        payloads = self._buffer.view(*reversed(self._level_sizes), self._payload_bytes)
        dims = len(self._level_sizes)
        return payloads.permute(*reversed(range(dims)), dims)


def _all_gather(payload: Tensor, level: Level, ledger: WireLedger | None, async_op: bool) -> tuple[Tensor, object]:
    if level.size == 1:
        return payload, None
    gathered = torch.empty(level.size * payload.numel(), dtype=payload.dtype, device=payload.device)
    return gathered, start_level(gathered, payload, level, ledger, async_op)


def start_level(
    gathered: Tensor, payload: Tensor, level: Level, ledger: WireLedger | None, async_op: bool = True
) -> dist.Work | None:
    """Start one hop: flat uint8 `gathered` becomes the payloads of the level's ranks; None where it is one rank.

    `payload` may be this rank's part of `gathered` (in place).
    """
    if level.size == 1:
        return None
    sent = (level.size - 1) * payload.numel()
    return issue(_all_gather_single, gathered, payload, level=level, ledger=ledger, sent=sent, async_op=async_op)


def start_regions(
    gathered: Sequence[Tensor], payloads: Sequence[Tensor], level: Level, ledger: WireLedger | None
) -> list[dist.Work]:
    """`start_level` for several pairs of buffers; empty ones are left out."""
    works = [start_level(g, p, level, ledger) for g, p in zip(gathered, payloads) if p.numel()]
    return [work for work in works if work is not None]


def gather_through(payload: Tensor, levels: Sequence[Level], ledger: WireLedger | None = None) -> Tensor:
    """All-gather flat uint8 `payload` through `levels`, complete on the current stream. Flat, last hop outermost."""
    for level in levels:
        payload, _ = _all_gather(payload, level, ledger, async_op=False)
    return payload


def start_gather(
    held: Tensor, before: Sequence[Level], after: Sequence[Level], payload_bytes: int, ledger: WireLedger | None = None
) -> PendingGather:
    """Start the hops `after` on `held`, the flat result of the hops `before` on payloads of `payload_bytes`."""
    *first, last = after
    held = gather_through(held, first, ledger)
    buffer, work = _all_gather(held, last, ledger, async_op=True)
    return PendingGather(buffer, work, [level.size for level in (*before, *after)], payload_bytes)


def rank_of_rows(level_sizes: Sequence[int]) -> list[int]:
    """Which rank's payload each row of a gathered buffer is, after hops over levels of these sizes.

    Every hop puts its own level in front, so the buffer's dimensions are the levels, last hop first, while ranks count
    with the first hop outermost.
    """
    dims = len(level_sizes)
    ranks = torch.arange(math.prod(level_sizes)).view(*level_sizes)
    return ranks.permute(*reversed(range(dims))).reshape(-1).tolist()


def quantized_all_gather(
    shard: Tensor,
    wire_format: WireFormat,
    topology: Topology,
    ledger: WireLedger | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """All-gather equal flat shards in `wire_format`.

    Args:
        shard: flat fp32, bf16 or fp16 tensor [n], the same n on every rank.

    Returns:
        [world_size * n] of the shard's dtype, the same bits on every rank.
    """
    payload = wire_format.encode(shard, generator)
    before, after = topology.gather_levels()
    held = gather_through(payload, before, ledger)
    payloads = start_gather(held, before, after, payload.numel(), ledger).wait()
    rows = payloads.reshape(topology.world_size, payload.numel())
    return wire_format.decode_rows(rows, shard.numel(), shard.dtype).view(-1)
