"""The mean of gradients over copies of the model, one per node, as torch's `set_all_reduce_hook` takes it.

Two ways, which give all copies the same bits. The one that sends less is taken:

    `MeanByAllGather`   codes of whole gradients in the format between nodes, of which each copy takes the mean
    `MeanByAllReduce`   codes of the same format, each rank's share of the mean in fp32; then codes of that share in the
                        format within nodes

With INT4 and INT8 two copies send 4 bits per gradient by the first, and four copies 9 by the second, where HSDP in bf16
sends 16 and 24.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from zeropp_fp8.comm.all_gather import gather_through
from zeropp_fp8.comm.payload import PayloadLayout
from zeropp_fp8.comm.reduce_scatter import ReduceScatterPlan, Reduction, formats_of_hops
from zeropp_fp8.fsdp2.host import Host, Replicas
from zeropp_fp8.fsdp2.micro_batches import MicroBatches
from zeropp_fp8.fsdp2.unit import FSDPUnit


class MeanOverReplicas:
    """The hook of one module: replaces this rank's gradients, flat and of one dtype, by their mean over the copies.

    Micro-batches before the last add up first, in fp32: `set_is_last_backward(False)` or `set_requires_all_reduce`. One
    that leaves parameters out does not say which: it is sent at once.
    """

    def __init__(self, host: Host, replicas: Replicas, unit: FSDPUnit, module: FSDPModule) -> None:
        self._host, self._replicas, self._unit = host, replicas, unit
        self._plans: dict[tuple, tuple] = {}
        where = "here and have not been sent to other copies: say set_is_last_backward, set_requires_all_reduce(True)"
        self.earlier = MicroBatches(unit, module, where)
        self._sums: Tensor | None = None  # of earlier micro-batches

    @torch.no_grad()
    def __call__(self, gradients: Tensor) -> None:
        key, earlier = self._unit.reduced_as(gradients), self.earlier
        way, numels, names = self._planned(key, gradients)
        is_whole = len(numels) == len(self._unit.trained)
        last = earlier.begin(key, is_whole, self._unit.group.all_reduce_grads)
        if is_whole and not last:
            zeros = torch.zeros_like(gradients, dtype=torch.float32) if earlier.kept is None else self._sums
            self._sums, earlier.kept = zeros.add_(gradients), key
            gradients.zero_()
            return
        if is_whole and earlier.kept is not None:
            gradients.copy_(self._sums.add_(gradients))
            self._sums = earlier.kept = None
        ledger = self._host.session.ledger
        with ledger.counting("gradients"):
            ledger.stock_would_send(2 * gradients.numel(), self._replicas.topology)  # HSDP's all-reduce
            way(list(gradients.split(numels)), [f"{name}, copies" for name in names])
        if self._unit.group.gradient_divide_factor is not None:  # of the sum over all copies
            gradients.mul_(self._replicas.topology.nodes)

    def _planned(self, key: tuple, gradients: Tensor) -> tuple[MeanByAllGather | MeanByAllReduce, list[int], list[str]]:
        if key not in self._plans:
            numels, exact, names = self._unit.reduced_together(gradients.numel())
            shapes = [(n,) if alone else (1, n) for alone, n in zip(exact, numels)]
            ways = [way(self._host, self._replicas, shapes, gradients) for way in (MeanByAllGather, MeanByAllReduce)]
            self._plans[key] = min(ways, key=lambda way: way.sent), numels, names
        return self._plans[key]


class MeanByAllGather:
    """The mean of whole gradients, which each copy sends to each other one; they are rounded once.

    Args:
        shapes: of the parts of `gradients`, whose dtype and device they have.

    Attributes:
        sent: bytes that this rank sends.
    """

    def __init__(self, host: Host, replicas: Replicas, shapes: list[tuple[int, ...]], gradients: Tensor) -> None:
        self._host, self._replicas = host, replicas
        numels, dtypes = [shape[-1] for shape in shapes], [gradients.dtype] * len(shapes)
        formats, _ = formats_of_hops(shapes, dtypes, host.session.formats.between, None)
        self._layout = PayloadLayout(numels, formats, dtypes, gradients.device)
        self._kept = [0 if each.is_exact else n for each, n in zip(formats, numels)]
        self.sent = (replicas.topology.nodes - 1) * self._layout.row_bytes

    def __call__(self, parts: list[Tensor], names: list[str]) -> None:
        """Replace the parts, flat, by their mean."""
        host, replicas, layout = self._host, self._replicas, self._layout
        residuals = None if host.feedback is None else host.feedback.of(names, self._kept, 1, layout.device)
        row = torch.empty(1, layout.row_bytes, dtype=torch.uint8, device=layout.device)
        layout.encode(parts, replicas.one_row, row, None, residuals)
        rows = gather_through(row.view(-1), [replicas.topology.between], host.session.ledger)
        layout.reduce_to_tensors(rows.view(-1, layout.row_bytes), parts)


class MeanByAllReduce:
    """The mean by a reduce-scatter and an all-gather, as `MeanByAllGather` otherwise; it is rounded twice."""

    def __init__(self, host: Host, replicas: Replicas, shapes: list[tuple[int, ...]], gradients: Tensor) -> None:
        self._host, self._replicas = host, replicas
        formats, dtypes, device = host.session.formats, [gradients.dtype] * len(shapes), gradients.device
        self._plan = ReduceScatterPlan(shapes, dtypes, replicas.topology, None, formats.between, device)
        back, _ = formats_of_hops(shapes, dtypes, formats.within, None)
        self._back = PayloadLayout(self._plan.slice_numels, back, [torch.float32] * len(shapes), device)
        self.sent = (replicas.topology.nodes - 1) * (self._plan.last.row_bytes + self._back.row_bytes)

    def __call__(self, parts: list[Tensor], names: list[str]) -> None:
        """Replace the parts, flat, by their mean."""
        host, replicas, back, sizes = self._host, self._replicas, self._back, self._plan.slice_numels
        shares = torch.empty(sum(sizes), dtype=torch.float32, device=back.device).split(sizes)
        resources = replicas.rings, replicas.first, replicas.last, host.session.ledger, host.feedback
        for _ in self._plan.run(parts, shares, Reduction(*resources, names)):
            pass
        replicas.first.before_current()
        replicas.last.before_current()
        row = torch.empty(1, back.row_bytes, dtype=torch.uint8, device=back.device)
        back.encode(shares, replicas.one_row, row)
        rows = gather_through(row.view(-1), [replicas.topology.between], host.session.ledger)
        whole = [len(rows) // back.row_bytes * n for n in sizes]
        means = torch.empty(sum(whole), dtype=torch.float32, device=row.device).split(whole)
        back.decode(rows.view(-1, back.row_bytes), replicas.in_order, means)
        torch._foreach_copy_(parts, [mean[: part.numel()] for mean, part in zip(means, parts)])
