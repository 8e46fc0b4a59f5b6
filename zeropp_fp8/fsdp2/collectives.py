"""The collectives of one module, as torch's `set_custom_all_gather` and `set_custom_reduce_scatter` take them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from zeropp_fp8.comm.reduce_scatter import ReduceScatterPlan
from zeropp_fp8.config import ConfigError
from zeropp_fp8.fsdp2.host import Host
from zeropp_fp8.fsdp2.unit import FSDPUnit


@dataclass
class _Planned:
    """How some gradients of a module are reduced.

    Attributes:
        numels, names: elements per rank of each tensor, and what its residual goes by.
        sums, passes: of earlier micro-batches, in the node, and how many there are.
    """

    plan: ReduceScatterPlan
    numels: list[int]
    names: list[str]
    sums: list[Tensor] | None = None
    passes: int = 0


class _OfAModule:
    """Both of them: memory is the allocator's, and the group is the one that all modules share."""

    def __init__(self, host: Host, unit: FSDPUnit) -> None:
        self._host, self._unit = host, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _check(self, group: dist.ProcessGroup) -> None:
        if group is not self._host.session.topology.group:
            raise ConfigError(
                f"zeropp_fp8.fsdp2: {self._unit.names[0]} and others are gathered over other ranks than at apply(): "
                'give fully_shard "reshard_after_forward" as true or false, not as a number of ranks'
            )


class QuantizedAllGather(_OfAModule, AllGather):
    """qwZ and hpZ: codes on two levels; what crosses between nodes stays in the node until the weights change."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self._check(group)
        host, unit = self._host, self._unit
        with torch.no_grad(), host.counting_gathers():
            host.first_hops(unit)
            host.session.ledger.stock_would_send(group.size() * sum(unit.part_numels))
            host.hops.start(unit)
            pending = unit.pending
            pending.wait()
            unit.write(pending.gathered, output_tensor)
            host.hops.end(unit)


class QuantizedReduceScatter(_OfAModule, ReduceScatter):
    """qgZ: the mean over all ranks in two hops, of matrices in few bits.

    A backward that leaves parameters out does not say which, so all of them are then sent in full. Micro-batches before
    the last (`set_is_last_backward(False)`) add up in the node, and cross between nodes with the last.
    """

    def __init__(self, host: Host, unit: FSDPUnit) -> None:
        super().__init__(host, unit)
        self._plans: dict[tuple[int, torch.dtype], _Planned] = {}

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        self._check(group)
        host, world, planned = self._host, group.size(), self._planned(input_tensor)
        plan, numels = planned.plan, planned.numels
        with torch.no_grad(), host.session.ledger.counting("gradients"):
            host.session.ledger.stock_would_send(input_tensor.numel())
            whole = torch.empty_like(input_tensor).split([world * numel for numel in numels])
            tensors = [tensor.view(world, -1) for tensor in whole]
            torch._foreach_copy_(tensors, list(input_tensor.view(world, -1).split(numels, dim=1)))
            reduction, results = host.reduction(planned.names), output_tensor.split(numels)
            last = host.is_last_backward
            if last and not planned.passes:
                steps = plan.run(tensors, results, reduction)
            else:
                planned.sums = planned.sums or plan.new_sums(input_tensor.dtype)
                steps = plan.sum_in_node(tensors, planned.sums, reduction, accumulate=planned.passes > 0)
                planned.passes += 1
                if last:
                    steps = itertools.chain(steps, plan.spread(planned.sums, results, reduction, accumulate=False))
                    planned.passes = 0
                else:
                    output_tensor.zero_()
            for _ in steps:
                pass
            reduction.first.before_current()
            reduction.last.before_current()
            factor = self._factor(op, world)
            if factor != 1 and last:
                output_tensor.mul_(factor)

    def forget_sums(self) -> None:
        """Drop what micro-batches have added up in the node."""
        for planned in self._plans.values():
            planned.passes = 0

    def _factor(self, op: dist.ReduceOp | dist.ReduceOp.RedOpType, world: int) -> float:
        """The number that the mean over ranks is multiplied with."""
        if op == dist.ReduceOp.AVG:
            return 1.0
        if op == dist.ReduceOp.SUM:
            return float(world)
        divide_by = self._unit.group.gradient_divide_factor
        if divide_by is None:
            raise ValueError(f"zeropp_fp8.fsdp2: gradients are means or sums here, not {op}")
        return world / divide_by

    def _planned(self, gradients: Tensor) -> _Planned:
        """The plan of what torch reduces together."""
        key = gradients.numel(), gradients.dtype
        if key not in self._plans:
            session, world = self._host.session, self._host.session.topology.world_size
            trained = [m for m in self._unit.members if m.sharded_param.requires_grad]
            numels = [member.padded_sharded_param_size.numel() for member in trained]
            exact = [self._unit.sends_exactly("gradients", member) for member in trained]
            shapes = [(world * n,) if alone else (world, n) for alone, n in zip(exact, numels)]
            names = [self._unit.names[self._unit.members.index(member)] for member in trained]
            if world * sum(numels) != gradients.numel():
                numels, shapes, names = [gradients.numel() // world], [gradients.shape], [f"some of {names[0]} ..."]
            formats = session.formats
            dtypes = [gradients.dtype] * len(numels)
            plan = ReduceScatterPlan(
                shapes, dtypes, session.topology, formats.within, formats.between, gradients.device
            )
            self._plans[key] = _Planned(plan, numels, names)
        return self._plans[key]
