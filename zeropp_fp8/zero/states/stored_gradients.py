"""Reduced gradients stored in FP8 until the step (FP8-LM, level O1), as a stage has them.

Everything that looks into them (clipping, overflow checks, safe_get_full_grad) is answered with decoded numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from deepspeed import comm as ds_comm
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8.zero.as_deepspeed import GRAD_PARTITIONS, Freed, norm_of_squares, on_any_rank, set_up_without_buffer
from zeropp_fp8.zero.states.block_gradient_store import BlockGradientStore
from zeropp_fp8.zero.states.gradient_store import GradientStore
from zeropp_fp8.zero.states.groups import STAYS, StateGroup, as_partition


class StoredGradients:
    """Takes the place of `Partitions`.

    Attributes:
        store: made when the order of reduction is known.
    """

    stays = STAYS

    def __init__(self, stage) -> None:
        self.stage = stage
        self.store: GradientStore | Freed | None = None

    def _setup_for_real_optimizer(self) -> None:
        set_up_without_buffer(self.stage)
        getattr(self.stage, GRAD_PARTITIONS).clear()

    def order_is_known(self, params: list[Parameter]) -> None:
        stage, session = self.stage, self.stage.session
        gradients, groups, dtype = session.config.gradients, stage.state_groups, stage.gradient_accumulation_dtype
        if stage.reducer.scales is not None:
            self.store = GradientStore(session.formats.between, stage.reducer.scales, groups, dtype)
        else:
            self.store = BlockGradientStore(gradients.store_format, gradients.block_size, groups, dtype)
        session.parts.append(self.store)
        self.store.show_in(getattr(stage, GRAD_PARTITIONS), params)  # what reads them is answered here

    # -- in backward -------------------------------------------------------------------------------------------------

    def destinations(self, params: list[Parameter], again: bool, headroom: float):
        # What was frozen since, and is stored in the node, becomes no codes: `drop` could not forget them.
        last = self.stage.reduction.at_boundary() and all(p.requires_grad for p in params)
        results = self.store.destinations(params, last, again, headroom)
        return results, functools.partial(self.store.arrived, params)

    @torch.no_grad()
    def take(self, params: list[Parameter], parts: list[Tensor], again: bool) -> list[Tensor]:
        for param, part in zip(params, parts):
            own = part.view(-1)[: self.stage.session.own_numel(param)]
            self.store.write(param, own + self.store.read(param) if again else own)
            param.grad = None
        return []

    def write(self, param: Parameter, values: Tensor) -> None:
        self.store.write(param, values)

    def drop(self, param: Parameter) -> None:
        self.store.drop_sum(param)

    def forget(self) -> None:
        """Codes stay where they are."""

    # -- at the step -------------------------------------------------------------------------------------------------

    def of(self, group: StateGroup):
        return self.store.of(group)

    def copy_range(self, sub_group_id: int, start: int, out: Tensor) -> None:
        """Write a sub-group's gradients, for a torch optimizer, from its element `start` on to flat `out`."""
        params, within = self.stage.fp16_groups[sub_group_id], self.stage.ranges[sub_group_id].within
        found = within(start, start + out.numel())
        self.store.copy_ranges((params[k], first, out[place:][: last - first]) for k, first, last, place in found)

    def has_overflow(self, partition_gradients: bool) -> bool:
        stage = self.stage
        if not partition_gradients:
            return stage.stock.has_overflow(partition_gradients)
        return on_any_rank(stage, torch.stack(self._square_sums()).isfinite().all().logical_not_())

    def norms(self) -> list[Tensor]:
        stage = self.stage
        tensor_parallel = stage.model_parallel_group is not None
        squares = torch.stack(self._square_sums(self._counts_in_norm if tensor_parallel else None))
        over_tensors = functools.partial(stage._model_parallel_all_reduce, op=ds_comm.ReduceOp.SUM)
        return list(norm_of_squares(squares, stage.session, over_tensors))

    def _square_sums(self, counted: Callable[[Parameter], bool] | None = None) -> list[Tensor]:
        self.store.close()
        return [self.store.square_sum(i, counted) for i in range(len(self.stage.fp16_groups))]

    def _counts_in_norm(self, param: Parameter) -> bool:
        """With tensor parallelism what all its ranks hold counts once, as in DeepSpeed's get_grad_norm_direct."""
        return is_model_parallel_parameter(param) or self.stage.model_parallel_rank == 0

    # -- looking at gradients ----------------------------------------------------------------------------------------

    def _partition(self, param: Parameter) -> Tensor:
        return as_partition(param, self.store.read(param))

    def _get_fp32_grad_state_partition(self, param: Parameter, release_swap_buffers: bool):
        return self._partition(param), self.stage.grad_position[self.stage.get_param_id(param)][0]

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        groups = enumerate(self.stage.fp16_groups)
        return {i: {k: self._partition(p) for k, p in enumerate(sub_group)} for i, sub_group in groups}

    def free(self) -> None:
        getattr(self.stage, GRAD_PARTITIONS).clear()
        self.stage.averaged_gradients.clear()
        self.store = Freed()
