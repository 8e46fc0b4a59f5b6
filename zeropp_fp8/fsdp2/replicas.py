"""The mean of gradients over copies of the model, one per node, as torch's `set_all_reduce_hook` takes it.

    reduce-scatter   codes of the format between nodes, each rank's share of the mean in fp32
    all-gather       codes of that share in the format within nodes, which all copies decode to the same bits

Both halves of an all-reduce in few bits, so that copies stay equal: 12 bits per gradient with INT4 and INT8, where HSDP
in bf16 sends 32.
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
        self._plans: dict[tuple[int, torch.dtype], tuple] = {}
        self._earlier: Tensor | None = None

    @torch.no_grad()
    def __call__(self, gradients: Tensor) -> None:
        if any(member.sharded_param.grad is None for member in self._unit.trained):
            self._earlier = None  # zero_grad() has dropped them
        _, _, numels, _ = self._planned(gradients)
        is_whole = len(numels) == len(self._unit.trained)
        last = self._module._get_fsdp_state()._state_ctx.is_last_backward and self._unit.group.all_reduce_grads
        if last and not is_whole:
            self.check_finished()
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
        replicas, host = self._replicas, self._host
        plan, back, numels, names = self._planned(gradients)
        parts, sizes = list(gradients.split(numels)), plan.slice_numels
        shares = torch.empty(sum(sizes), dtype=torch.float32, device=gradients.device).split(sizes)
        resources = replicas.rings, replicas.first, replicas.last, host.session.ledger, host.feedback
        for _ in plan.run(parts, shares, Reduction(*resources, [f"{name}, copies" for name in names])):
            pass
        replicas.first.before_current()
        replicas.last.before_current()
        row = torch.empty(1, back.row_bytes, dtype=torch.uint8, device=gradients.device)
        back.encode(shares, replicas.one_row, row)
        rows = gather_through(row.view(-1), [replicas.topology.between], host.session.ledger)
        whole = [len(rows) // back.row_bytes * n for n in sizes]
        means = torch.empty(sum(whole), dtype=torch.float32, device=row.device).split(whole)
        back.decode(rows.view(-1, back.row_bytes), replicas.in_order, means)
        torch._foreach_copy_(parts, [mean[:n] for mean, n in zip(means, numels)])

    def _planned(self, gradients: Tensor) -> tuple[ReduceScatterPlan, PayloadLayout, list[int], list[str]]:
        key = gradients.numel(), gradients.dtype
        if key not in self._plans:
            numels, exact, names = self._unit.reduced_together(gradients.numel())
            shapes = [(n,) if alone else (1, n) for alone, n in zip(exact, numels)]
            formats, device = self._host.session.formats, gradients.device
            dtypes = [gradients.dtype] * len(numels)
            plan = ReduceScatterPlan(shapes, dtypes, self._replicas.topology, None, formats.between, device)
            back, _ = formats_of_hops(shapes, dtypes, formats.within, None)
            layout = PayloadLayout(plan.slice_numels, back, [torch.float32] * len(numels), device)
            self._plans[key] = plan, layout, numels, names
        return self._plans[key]
