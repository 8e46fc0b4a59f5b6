"""The collectives of one module, as torch's `set_custom_all_gather` and `set_custom_reduce_scatter` take them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from zeropp_fp8.comm.reduce_scatter import ReduceScatterPlan
from zeropp_fp8.config import ConfigError
from zeropp_fp8.fsdp2.host import Host
from zeropp_fp8.fsdp2.micro_batches import MicroBatches
from zeropp_fp8.fsdp2.unit import FSDPUnit


@dataclass
class _Planned:
    """How some gradients of a module are reduced."""

    plan: ReduceScatterPlan
    numels: list[int]  # per rank
    names: list[str]  # what residuals go by
    is_whole: bool  # they are of all trained parameters
    sums: list[Tensor] | None = None  # of earlier micro-batches, in the node


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
    """qwZ and hpZ: codes on two levels; what is sent between nodes stays in the node until the weights change."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self._check(group)
        host, unit = self._host, self._unit
        with host.counting_gathers(), torch.no_grad():
            # Training uses the copies that an evaluation receives: they must not be inference tensors.
            with torch.inference_mode(False), torch.no_grad():
                host.first_hops(unit)
                host.session.ledger.stock_would_send(group.size() * sum(unit.part_numels))
                host.hops.start(unit)
                unit.pending.wait()
            unit.write(unit.pending.gathered, output_tensor)  # which is torch's, and may be one
            host.hops.end(unit)


class CountedReduceScatter(DefaultReduceScatter):
    """torch's own, where gradients are sent as they are; its bytes are counted."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args, **kwargs) -> dist.Work:
        ledger = self._host.session.ledger
        with ledger.counting("gradients"):
            ledger.sent_around_ring(input_tensor.numel() * input_tensor.element_size())
            ledger.stock_would_send(input_tensor.numel())
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


class QuantizedReduceScatter(_OfAModule, ReduceScatter):
    """qgZ: the mean over all ranks in two hops, of matrices in few bits.

    A backward that leaves parameters out does not say which, so all of them are then sent in full, and to the end.
    Otherwise micro-batches before the last (`set_is_last_backward(False)`) add up in the node, in fp32, and are
    sent between nodes with the last.
    """

    def __init__(self, host: Host, unit: FSDPUnit, module: FSDPModule) -> None:
        super().__init__(host, unit)
        self._plans: dict[tuple, _Planned] = {}
        self.earlier = MicroBatches(unit, module, "inside the node: say set_is_last_backward(True)")

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        self._check(group)
        host, world, key, earlier = self._host, group.size(), self._unit.reduced_as(input_tensor), self.earlier
        planned = self._planned(key, input_tensor)
        plan, numels = planned.plan, planned.numels
        with torch.no_grad(), host.session.ledger.counting("gradients"):
            host.session.ledger.stock_would_send(input_tensor.numel())
            whole = torch.empty_like(input_tensor).split([world * numel for numel in numels])
            tensors = [tensor.view(world, -1) for tensor in whole]
            torch.split_with_sizes_copy(input_tensor.view(world, -1), numels, dim=1, out=tensors)
            reduction, results = host.reduction(planned.names), output_tensor.split(numels)
            last = earlier.begin(key, planned.is_whole)
            if not planned.is_whole or plan.topology.nodes == 1 or (last and earlier.kept is None):
                steps = plan.run(tensors, results, reduction)
            else:
                planned.sums = planned.sums or plan.new_sums(torch.float32)
                steps = plan.sum_in_node(tensors, planned.sums, reduction, accumulate=earlier.kept is not None)
                if last:
                    steps = itertools.chain(steps, plan.spread(planned.sums, results, reduction, accumulate=False))
                else:
                    output_tensor.zero_()
                earlier.kept = None if last else key
            for _ in steps:
                pass
            reduction.first.before_current()
            reduction.last.before_current()
            factor = self._factor(op, world)
            if factor != 1:
                output_tensor.mul_(factor)

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

    def _planned(self, key: tuple, gradients: Tensor) -> _Planned:
        """The plan of what torch reduces together."""
        if key not in self._plans:
            session, world = self._host.session, self._host.session.topology.world_size
            numels, exact, names = self._unit.reduced_together(gradients.numel() // world)
            shapes = [(world * n,) if alone else (world, n) for alone, n in zip(exact, numels)]
            is_whole = len(numels) == len(self._unit.trained)
            formats = session.formats
            dtypes = [gradients.dtype] * len(numels)
            plan = ReduceScatterPlan(
                shapes, dtypes, session.topology, formats.within, formats.between, gradients.device
            )
            self._plans[key] = _Planned(plan, numels, names, is_whole)
        return self._plans[key]
