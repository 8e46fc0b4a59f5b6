"""Two-hop quantized reduce-scatter (qgZ): the mean over all ranks of each tensor's slices.

ZeRO++ (arXiv 2306.10209), section 3.3: the slices are reordered, so that each rank has its own slice after an
all-to-all inside the node and one between nodes; between the hops values are dequantized and summed in fp32. With rank
= n * L + l (N nodes of L ranks) and S = ceil(numel / W) elements per slice:

    x [N, L, S]  --reorder-->  [L, N, S]  --encode, all-to-all in the node-->  L contributions to [N, S]
    mean over L in fp32  --encode, all-to-all between nodes-->  N contributions to [S]  --mean over N in fp32

The first hop multiplies by 1/L and the second by 1/N, so the result is the mean over ranks. Only fp32 sums are
formed, so fp16 gradients cannot overflow on the way.
Blocks never straddle a slice or a tensor, so the result does not depend on the buckets.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from zeropp_fp8.comm.error_feedback import ErrorFeedback, Residuals
from zeropp_fp8.comm.issue import issue
from zeropp_fp8.comm.lanes import BufferRing, Lane
from zeropp_fp8.comm.ledger import WireLedger
from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder
from zeropp_fp8.comm.topology import Topology
from zeropp_fp8.formats import UnquantizedFormat, WireFormat
from zeropp_fp8.formats.scale_table import SharedScales
from zeropp_fp8.formats.shapes import is_vector


def slice_numel(numel: int, world_size: int) -> int:
    """Return the elements of one rank's slice of a flat tensor; the last slices are padded with zeros."""
    return -(-numel // world_size)


def slice_of_rank(flat: Tensor, rank: int, world_size: int) -> Tensor:
    """Return a rank's slice of a flat tensor, padded with zeros, in memory of its own."""
    size = slice_numel(flat.numel(), world_size)
    mine = flat[rank * size : (rank + 1) * size]
    return F.pad(mine, (0, size - mine.numel()))


@dataclass
class Rings:
    """The buffers of one engine's reductions, by their content."""

    sent_within: BufferRing
    received_within: BufferRing
    sent_between: BufferRing
    received_between: BufferRing

    @classmethod
    def on(cls, device: torch.device) -> Rings:
        # Two units on the fast links: one is sent while one is filled. Six on the network, so that backward can run
        # ahead of it: its buffers are ranks_per_node times smaller.
        return cls(BufferRing(device, 2), BufferRing(device, 2), BufferRing(device, 6), BufferRing(device, 6))

    def clear(self) -> None:
        """Drop all buffers. The current stream waits for their last users; lanes wait for it before they go on."""
        for ring in (self.sent_within, self.received_within, self.sent_between, self.received_between):
            ring.clear()


@dataclass
class Reduction:
    """The resources of one reduction.

    Attributes:
        first: the lane of the first hop and of the sum after it.
        last: the lane of the last sum.
        error_feedback, keys: residuals of the hop between nodes, and a stable name per tensor.
        shared: scales of all tensors, if the plan's formats are SharedScaleFormat.
    """

    rings: Rings
    first: Lane
    last: Lane
    ledger: WireLedger | None = None
    error_feedback: ErrorFeedback | None = None
    keys: Sequence[str] | None = None
    shared: SharedScales | None = None


class ReducePlan:
    """The plan that `run` follows to reduce a fixed list of tensors, all in one message per hop.

    Attributes:
        first: layout of the first message: `first_order` gives its rows.
        column: layout of the message from each rank of the node, with `column_rows` rows per rank.
        second: layout of the same tensors on their way between nodes, with the same number of rows.
        last: layout of the messages from the nodes, one row per node.
        sizes: by "within" and "between", the bytes (to each rank, from each rank) of the hop; None: equal parts.
        sent_by_all: by hop, bytes that all ranks send together, if ranks send unequal amounts.
    """

    topology: Topology
    device: torch.device
    first: PayloadLayout
    first_order: SliceOrder
    column: PayloadLayout
    column_rows: int
    second: PayloadLayout
    last: PayloadLayout
    sizes: dict[str, tuple[list[int], list[int]] | None]
    sent_by_all: Mapping[str, int] = MappingProxyType({})

    def sources(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the tensors that `first` encodes, made from those given to `run`."""
        return tensors

    def destinations(self, results: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the tensors that `last` writes, made from the results given to `run`."""
        return results

    def scales_of(self, layout: PayloadLayout, shared: SharedScales | None) -> SharedScales | None:
        """Return the scales of the tensors of one layout, out of those of all tensors."""
        return shared

    def amax_recorded(self, scales: SharedScales | None, shared: SharedScales | None) -> None:
        """Copy the amax that `first` has recorded in `scales` to `shared`."""

    def run(
        self, tensors: Sequence[Tensor], results: Sequence[Tensor], reduction: Reduction, accumulate: bool = False
    ) -> Iterator[None]:
        """Reduce `tensors` into `results`: a generator that yields whenever it would have to wait for other ranks.

        On a GPU nothing blocks, and the caller should run the generator to its end at once. On a CPU the caller can do
        other work in between, such as start other reductions. `tensors` are needed only until the first yield.

        Args:
            tensors: contiguous, with the shapes and dtypes of the plan.
            results: for each tensor at most its slice's elements, fp32, bf16 or fp16, contiguous; uint8 is also allowed
                with scales that ranks share.
            accumulate: add to `results` instead of writing them.
        """
        topology, shared = self.topology, reduction.shared
        if topology.world_size == 1 and shared is None:
            for tensor, result in zip(tensors, results):
                mean = tensor.view(-1).view(result.shape).to(result.dtype)
                result.add_(mean) if accumulate else result.copy_(mean)
            return

        scales = self.scales_of(self.last, shared)
        sent, sent_ring = self._encode_first(tensors, reduction)
        if topology.world_size == 1:  # nothing to send, but codes to make
            rows = sent.view(-1, self.first.row_bytes)
            self.last.reduce_to_tensors(rows, self.destinations(results), accumulate, scales)
            sent_ring.give_back(sent)
            return
        if topology.ranks_per_node > 1:
            received, work = self._exchange_within(sent, reduction)
            yield
        else:
            reduction.first.after_current()
        if topology.nodes > 1:
            with reduction.first:
                if topology.ranks_per_node > 1:
                    work.wait()
                    sent_ring.give_back(sent)
                    sent, sent_ring = self._encode_again(received, reduction)
                received = self._to_receive("between", sent, reduction)
                work = self._exchange("between", sent, received, reduction)
            yield
        with reduction.last:
            work.wait()
            sent_ring.give_back(sent)
            self._write(received, results, accumulate, scales, reduction.rings)

    # -- the two hops apart: sums over several backward passes accumulate in the node --------------------------------

    @functools.cached_property
    def _column_order(self) -> SliceOrder:
        """Cache the order: making it copies to the device, and the host waits for that."""
        return SliceOrder(range(self.column_rows), self.device)

    def new_sums(self, dtype: torch.dtype) -> list[Tensor]:
        """Return flat zeros for `sum_in_node`: per tensor of the second hop, what this rank sends of it."""
        sizes = [self.column_rows * numel for numel in self.column.slice_numels]
        return [torch.zeros(size, dtype=dtype, device=self.device) for size in sizes]

    def sum_in_node(
        self, tensors: Sequence[Tensor], sums: Sequence[Tensor], reduction: Reduction, accumulate: bool
    ) -> Iterator[None]:
        """Run the first hop alone, a generator like `run`: write or add the mean over the node to `sums`."""
        per_node, shared = self.topology.ranks_per_node, reduction.shared
        if per_node == 1:
            for source, total in zip(self.sources(tensors), sums, strict=True):
                total = total[: source.numel()]
                total.add_(source.view(-1)) if accumulate else total.copy_(source.view(-1))
            if shared is not None:
                norms = torch._foreach_norm([tensor.view(-1) for tensor in tensors], torch.inf)
                amax = torch.stack([norm.float() for norm in norms]).nan_to_num(0.0, 0.0, 0.0)
                torch.maximum(shared.amax, amax, out=shared.amax)
            return
        sent, sent_ring = self._encode_first(tensors, reduction)
        received, work = self._exchange_within(sent, reduction)
        yield
        with reduction.first:
            work.wait()
            sent_ring.give_back(sent)
            rows = received.view(per_node, -1)
            by_row = [total.view(self.column_rows, -1)[row] for row in range(self.column_rows) for total in sums]
            scales = self.scales_of(self.column, shared)
            if scales is not None:
                scales = scales.of_sums_in_node(self.topology.nodes, self.column_rows)
            self.column.joined(self.column_rows, sums).reduce_to_tensors(rows, by_row, accumulate, scales)
            reduction.rings.received_within.give_back(received)

    def spread(
        self,
        sums: Sequence[Tensor],
        results: Sequence[Tensor],
        reduction: Reduction,
        accumulate: bool,
        headroom: float = 1.0,
    ) -> Iterator[None]:
        """Run the second hop alone, a generator like `run`: the mean over nodes of the `sums` of `sum_in_node`.

        Args:
            headroom: with shared scales: how many times larger than one gradient a sum may be.
        """
        per_node, rows, shared = self.topology.ranks_per_node, self.column_rows, reduction.shared
        reduction.first.after_current()
        # Without a first hop, the ring's buffers are taken on the current stream.
        with reduction.first if per_node > 1 else Lane.here():
            scales = self.scales_of(self.second, shared)
            if scales is not None:
                scales = scales.to_spread(self.topology.nodes, headroom)
            sent_ring = reduction.rings.sent_between
            sent = sent_ring.take(rows * self.second.row_bytes)
            sent_rows = sent.view(rows, self.second.row_bytes)
            kept = self._residuals(reduction)
            self.second.joined(1, sums).encode(sums, self._column_order, sent_rows, scales, kept)
        reduction.first.after_current()
        with reduction.first:
            received = self._to_receive("between", sent, reduction)
            work = self._exchange("between", sent, received, reduction)
        yield
        with reduction.last:
            work.wait()
            sent_ring.give_back(sent)
            scales = self.scales_of(self.last, shared)
            if scales is not None:
                scales = scales.of_spread(headroom)
            self._write(received, results, accumulate, scales, reduction.rings)

    # -- the parts of a reduction ------------------------------------------------------------------------------------

    def _encode_first(self, tensors: Sequence[Tensor], reduction: Reduction) -> tuple[Tensor, BufferRing]:
        """Encode the first message; return (its buffer, the ring of that buffer)."""
        nodes, per_node = self.topology.nodes, self.topology.ranks_per_node
        rows, shared = len(self.first_order.slices), reduction.shared
        ring = reduction.rings.sent_within if per_node > 1 or nodes == 1 else reduction.rings.sent_between
        sent = ring.take(rows * self.first.row_bytes)
        sent_rows = sent.view(rows, self.first.row_bytes)
        scales = self.scales_of(self.first, shared)
        kept = self._residuals(reduction) if per_node == 1 else None
        self.first.encode(self.sources(tensors), self.first_order, sent_rows, scales, kept)
        self.amax_recorded(scales, shared)
        return sent, ring

    def _encode_again(self, received: Tensor, reduction: Reduction) -> tuple[Tensor, BufferRing]:
        """Encode the mean of the node's messages for the hop between nodes; return (its buffer, its ring)."""
        rings, shared = reduction.rings, reduction.shared
        contributions = received.view(self.topology.ranks_per_node, self.column_rows, self.column.row_bytes)
        sent = rings.sent_between.take(self.column_rows * self.second.row_bytes)
        sent_rows = sent.view(self.column_rows, self.second.row_bytes)
        if reduction.error_feedback is None:
            self.column.reduce_to_payload(contributions, self.second, sent_rows, shared)
        else:
            means = [self.column.mean(contributions, i) for i in range(len(self.column.slice_numels))]
            kept = self._residuals(reduction)
            self.second.joined(1, means).encode(means, self._column_order, sent_rows, None, kept)
        rings.received_within.give_back(received)
        return sent, rings.sent_between

    def _exchange_within(self, sent: Tensor, reduction: Reduction) -> tuple[Tensor, dist.Work]:
        """Start the first hop, on its lane; return (the buffer that it fills, its handle).

        Both buffers are of the current stream's memory, which activations use before and after a backward.
        """
        received = self._to_receive("within", sent, reduction)
        reduction.first.after_current()
        with reduction.first:
            return received, self._exchange("within", sent, received, reduction)

    def _to_receive(self, hop: str, sent: Tensor, reduction: Reduction) -> Tensor:
        """Take the buffer that a hop fills."""
        _, incoming = self.sizes[hop] or (None, None)
        ring = getattr(reduction.rings, f"received_{hop}")
        return ring.take(sum(incoming) if incoming else sent.numel())

    def _exchange(self, hop: str, sent: Tensor, received: Tensor, reduction: Reduction) -> dist.Work:
        """Start a hop, an all-to-all of flat uint8 buffers; return its handle."""
        level = self.topology.within if hop == "within" else self.topology.between
        outgoing, incoming = self.sizes[hop] or (None, None)
        to_others = sent.numel() - (outgoing[level.rank] if outgoing else sent.numel() // level.size)
        counted = {"ledger": reduction.ledger, "sent": to_others, "by_all": self.sent_by_all.get(hop)}
        return issue(dist.all_to_all_single, received, sent, incoming, outgoing, level=level, **counted)

    def _write(
        self, received: Tensor, results: Sequence[Tensor], accumulate: bool, scales: SharedScales | None, rings: Rings
    ) -> None:
        """Write or add the mean of the last hop's messages."""
        nodes, per_node = self.topology.nodes, self.topology.ranks_per_node
        ranks, ring = (nodes, rings.received_between) if nodes > 1 else (per_node, rings.received_within)
        rows = received.view(ranks, self.last.row_bytes)
        self.last.reduce_to_tensors(rows, self.destinations(results), accumulate, scales)
        ring.give_back(received)

    def _residuals(self, reduction: Reduction) -> Residuals | None:
        """Return the residuals of the message between nodes; None if there is no error feedback."""
        if reduction.error_feedback is None:
            return None
        second = self.second
        numels = [0 if f.is_exact else n for f, n in zip(second.formats, second.slice_numels)]
        return reduction.error_feedback.of(reduction.keys, numels, self.column_rows, self.device)


class ReduceScatterPlan(ReducePlan):
    """A plan after which every rank has its slice of every tensor.

    Args:
        shapes, dtypes: of the tensors (fp32, bf16 or fp16), the same list on every rank.
        intra_format, inter_format: wire formats of the hop within and between nodes; None sends the tensor's dtype, as
            do tensors of fewer than two dimensions.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        topology: Topology,
        intra_format: WireFormat | None,
        inter_format: WireFormat | None,
        device: torch.device,
    ) -> None:
        self.topology = topology
        self.device = device
        nodes, per_node = topology.nodes, topology.ranks_per_node
        numels = [int(torch.Size(shape).numel()) for shape in shapes]
        self.slice_numels = [slice_numel(numel, topology.world_size) for numel in numels]
        intra, inter = formats_of_hops(shapes, dtypes, intra_format, inter_format)
        within = PayloadLayout(self.slice_numels, intra, dtypes, device, inter)
        between = PayloadLayout(self.slice_numels, inter, dtypes, device, intra)
        natural = SliceOrder(range(nodes), device)
        # Row l * N + n of the first payload holds slice n * L + l.
        reordered = SliceOrder([n * per_node + i for i in range(per_node) for n in range(nodes)], device)
        one_hop = per_node == 1 and nodes > 1
        self.first, self.first_order = (between, natural) if one_hop else (within, reordered)
        self.column, self.column_rows = within, nodes
        self.second = between
        self.last = between if nodes > 1 else within
        self.sizes = {"within": None, "between": None}


def formats_of_hops(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    intra_format: WireFormat | None,
    inter_format: WireFormat | None,
) -> tuple[list[WireFormat], list[WireFormat]]:
    """Return the tensors' formats within and between nodes: the given ones for matrices, own dtypes for the others."""
    exact = [UnquantizedFormat(dtype) for dtype in dtypes]
    quantized = [not is_vector(shape) for shape in shapes]
    intra = [intra_format if q and intra_format else e for q, e in zip(quantized, exact)]
    inter = [inter_format if q and inter_format else e for q, e in zip(quantized, exact)]
    return intra, inter
