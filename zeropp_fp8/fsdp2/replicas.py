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
from zeropp_fp8.fsdp2.unit import FSDPUnit


class MeanOverReplicas:
    """The hook of one module: replaces this rank's gradients, flat and of one dtype, by their mean over the copies.

    Micro-batches before the last add up first, in fp32: `set_is_last_backward(False)` or `set_requires_all_reduce`. One
    that leaves parameters out does not say which: it is sent at once.
    """

    def __init__(self, host: Host, replicas: Replicas, unit: FSDPUnit, module: FSDPModule) -> None:
        self._host, self._replicas, self._unit, self._module = host, replicas, unit, module
        self._plans: dict[tuple, tuple] = {}
        self._earlier: Tensor | None = None  # micro-batches, whose trained parameters are
        self._summed: tuple = ()

    @torch.no_grad()
    def __call__(self, gradients: Tensor) -> None:
        dropped = [member.sharded_param.grad is None for member in self._unit.trained]
        if all(dropped):
            self._earlier = None
        _, numels, _ = self._planned(gradients)
        is_whole = len(numels) == len(self._unit.trained)
        last = self._module._get_fsdp_state()._state_ctx.is_last_backward and self._unit.group.all_reduce_grads
        key = self._unit.reduced_as(gradients)
        if any(dropped) or (last and not is_whole) or (is_whole and key != self._summed):
            self.check_finished()
        self._summed = key if is_whole else self._summed
        if is_whole and not last:
            zeros = torch.zeros_like(gradients, dtype=torch.float32) if self._earlier is None else self._earlier
            self._earlier = zeros.add_(gradients)
            gradients.zero_()
            return
        if is_whole and self._earlier is not None:
            gradients.copy_(self._earlier.add_(gradients))
            self._earlier = None
        ledger = self._host.session.ledger
        with ledger.counting("gradients"):
            ledger.stock_would_send(2 * gradients.numel(), self._replicas.topology)  # HSDP's all-reduce
            self._reduce(gradients)
        if self._unit.group.gradient_divide_factor is not None:  # of the sum over all copies
            gradients.mul_(self._replicas.topology.nodes)

    def check_finished(self) -> None:
        """Refuse to go on without what earlier micro-batches have added up.

        Raises:
            RuntimeError: no last backward has sent it on.
        """
        if self._earlier is not None:
            raise RuntimeError(
                f"zeropp_fp8.fsdp2: gradients of {self._unit.names[0]} and others have not been sent to other copies: "
                "let the last micro-batch be so, by set_is_last_backward(True) or set_requires_all_reduce(True), and "
                "reach all trained parameters of the module"
            )

    def _reduce(self, gradients: Tensor) -> None:
        way, numels, names = self._planned(gradients)
        way(list(gradients.split(numels)), [f"{name}, copies" for name in names])

    def _planned(self, gradients: Tensor) -> tuple[MeanByAllGather | MeanByAllReduce, list[int], list[str]]:
        key = self._unit.reduced_as(gradients)
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
