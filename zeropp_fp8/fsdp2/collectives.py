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
from zeropp_fp8.fsdp2.unit import FSDPUnit


@dataclass
class _Planned:
    """How some gradients of a module are reduced.

    Attributes:
        numels, names: elements per rank of each tensor, and what its residual goes by.
        is_whole: they are of all trained parameters of the module.
        sums: of earlier micro-batches, in the node.
    """

    plan: ReduceScatterPlan
    numels: list[int]
    names: list[str]
    is_whole: bool
    sums: list[Tensor] | None = None


class _OfAModule:
    """Both of them: memory is the allocator's, and the group is the one that all modules share."""

    def __init__(self, host: Host, unit: FSDPUnit, module: FSDPModule) -> None:
        self._host, self._unit, self._module = host, unit, module

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
        super().__init__(host, unit, module)
        self._plans: dict[tuple, _Planned] = {}
        self._summed: _Planned | None = None  # that of earlier micro-batches, if there are any

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
            torch.split_with_sizes_copy(input_tensor.view(world, -1), numels, dim=1, out=tensors)
            reduction, results = host.reduction(planned.names), output_tensor.split(numels)
            last = self._module._get_fsdp_state()._state_ctx.is_last_backward
            dropped = [member.sharded_param.grad is None for member in self._unit.trained]
            if all(dropped):  # by zero_grad(): torch gives each a gradient of zeros before
                self._summed = None
            if any(dropped) or ((last or planned.is_whole) and planned is not self._summed):
                self.check_finished()
            at_once = not planned.is_whole or plan.topology.nodes == 1
            if at_once or (last and self._summed is None):
                steps = plan.run(tensors, results, reduction)
            else:
                planned.sums = planned.sums or plan.new_sums(torch.float32)
                steps = plan.sum_in_node(tensors, planned.sums, reduction, accumulate=self._summed is not None)
                if last:
                    steps = itertools.chain(steps, plan.spread(planned.sums, results, reduction, accumulate=False))
                else:
                    output_tensor.zero_()
                self._summed = None if last else planned
            for _ in steps:
                pass
            reduction.first.before_current()
            reduction.last.before_current()
            factor = self._factor(op, world)
            if factor != 1:
                output_tensor.mul_(factor)

    def check_finished(self) -> None:
        """Refuse to go on without what earlier micro-batches have added up in the node.

        Raises:
            RuntimeError: no last backward has sent it on. It is the same on all ranks.
        """
        if self._summed is not None:
            raise RuntimeError(
                f"zeropp_fp8.fsdp2: gradients of {self._unit.names[0]} and others are still inside the node: say "
                "set_is_last_backward(True) before the last micro-batch, whose backward must reach all trained "
                "parameters of the module, or leave set_is_last_backward out"
            )

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
        key = self._unit.reduced_as(gradients)
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
