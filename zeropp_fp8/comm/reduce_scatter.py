"""Two-hop quantized reduce-scatter (qgZ): the mean over all ranks of each tensor's slices.

ZeRO++ (arXiv 2306.10209), section 3.3: the slices are reordered so that after an all-to-all inside the node and one
between nodes each rank ends with its own slice; between the hops values are dequantized and summed in fp32. With rank
= n * L + l (N nodes of L ranks) and S = ceil(numel / W) elements a slice:

    x [N, L, S]  --reorder-->  [L, N, S]  --encode, all-to-all in the node-->  L contributions to [N, S]
    mean over L in fp32  --encode, all-to-all between nodes-->  N contributions to [S]  --mean over N in fp32

Dividing on each hop (by L, then by N) makes the result the mean over ranks; only an fp32 sum is ever formed, so fp16
gradients cannot overflow on the way.
Blocks never straddle a slice or a tensor, so the result does not depend on how tensors were bucketed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from zeropp_fp8.comm.error_feedback import ErrorFeedback
from zeropp_fp8.comm.ledger import WireLedger
from zeropp_fp8.comm.topology import Level, Topology
from zeropp_fp8.formats import UnquantizedFormat, WireFormat


def slice_numel(numel: int, world_size: int) -> int:
    """Elements of one rank's slice of a flat tensor; the last slices are padded with zeros."""
    return -(-numel // world_size)


def _exchange(rows_by_tensor: list[Tensor], level: Level, ledger: WireLedger | None) -> list[Tensor]:
    """All-to-all of encoded rows: each tensor is uint8 [level.size * k, bytes], row block d goes to rank d.

    All tensors travel in one message. Returns the same shapes, row block s received from rank s.
    """
    blocks = [rows.view(level.size, -1) for rows in rows_by_tensor]
    outgoing = torch.cat(blocks, dim=1)
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=level.group)
    if ledger is not None:
        ledger.sent(level.link, outgoing.numel() // level.size * (level.size - 1))
    received = incoming.split([block.shape[1] for block in blocks], dim=1)
    return [part.reshape(rows.shape) for part, rows in zip(received, rows_by_tensor)]


@torch.no_grad()
def quantized_reduce_scatter(
    tensors: Sequence[Tensor],
    topology: Topology,
    intra_format: WireFormat | None,
    inter_format: WireFormat | None,
    *,
    ledger: WireLedger | None = None,
    generator: torch.Generator | None = None,
    error_feedback: ErrorFeedback | None = None,
    keys: Sequence[str] | None = None,
    quantize_vectors: bool = False,
) -> list[Tensor]:
    """Reduce-scatter the mean over ranks of `tensors`, one message per hop for all of them.

    Args:
        tensors: fp32, bf16 or fp16 tensors of any shape, the same shapes and order on every rank.
        intra_format, inter_format: wire formats of the hop within and between nodes; None sends the tensor's dtype.
        error_feedback, keys: residuals of the hop between nodes, and a stable name for each tensor.
        quantize_vectors: also quantize tensors of fewer than two dimensions, which otherwise keep their dtype.

    Returns:
        for each tensor, fp32 [ceil(numel / world_size)]: this rank's slice of the mean. What lies beyond the
        tensor's end (padding) means nothing.
    """
    nodes, per_node, world = topology.nodes, topology.ranks_per_node, topology.world_size

    def formats_of(tensor: Tensor) -> tuple[WireFormat, WireFormat]:
        exact = UnquantizedFormat(tensor.dtype)
        if tensor.dim() < 2 and not quantize_vectors:
            return exact, exact
        return intra_format or exact, inter_format or exact

    slices = []
    for tensor in tensors:
        size = slice_numel(tensor.numel(), world)
        flat = F.pad(tensor.reshape(-1), (0, size * world - tensor.numel()))
        slices.append(flat.view(nodes, per_node, size))

    # Hop 1, inside the node.
    if per_node > 1:
        rows = []
        for tensor, x in zip(tensors, slices):
            reordered = x.transpose(0, 1).reshape(per_node * nodes, x.shape[-1])
            rows.append(formats_of(tensor)[0].encode_rows(reordered, generator))
        partial = []
        for tensor, x, received in zip(tensors, slices, _exchange(rows, topology.within, ledger)):
            values = formats_of(tensor)[0].decode_rows(received, x.shape[-1], torch.float32)
            partial.append(values.view(per_node, nodes, -1).sum(dim=0).div_(per_node))
    else:
        partial = [x.reshape(nodes, -1).float() for x in slices]

    # Hop 2, between nodes.
    if nodes == 1:
        return [x.view(-1) for x in partial]
    rows = []
    for index, (tensor, x) in enumerate(zip(tensors, partial)):
        wire_format = formats_of(tensor)[1]
        corrected = error_feedback is not None and not isinstance(wire_format, UnquantizedFormat)
        if corrected:
            x = x.clone()
            error_feedback.add_to_(keys[index], x)
        payload = wire_format.encode_rows(x, generator)
        if corrected:
            error_feedback.store(keys[index], x, wire_format.decode_rows(payload, x.shape[-1], torch.float32))
        rows.append(payload)
    results = []
    for tensor, x, received in zip(tensors, partial, _exchange(rows, topology.between, ledger)):
        values = formats_of(tensor)[1].decode_rows(received, x.shape[-1], torch.float32)
        results.append(values.sum(dim=0).div_(nodes))
    return results
