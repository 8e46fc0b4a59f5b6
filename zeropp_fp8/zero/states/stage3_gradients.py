"""Reduced gradients that rest in FP8 until the step (FP8-LM, level O1), inside DeepSpeed's stage 3.

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

from zeropp_fp8.zero.stage3_base import GRAD_PARTITIONS, Freed
from zeropp_fp8.zero.states.block_gradient_store import BlockGradientStore
from zeropp_fp8.zero.states.gradient_store import GradientStore
from zeropp_fp8.zero.states.groups import StateGroup
from zeropp_fp8.zero.states.stage3_at_rest import AtRestStage3


class StoredGradientsStage3(AtRestStage3):
    """The part of a stage whose reduced gradients rest in FP8."""

    # -- construction ------------------------------------------------------------------------------------------------

    def _setup_for_real_optimizer(self) -> None:
        # DeepSpeed allocates a buffer for all gradients here, which the store replaces: let it be small.
        dtype = self.gradient_accumulation_dtype
        self.gradient_accumulation_dtype = torch.uint8
        super()._setup_for_real_optimizer()
        self.gradient_accumulation_dtype = dtype
        self.grad_partitions_flat_buffer = torch.empty(0, dtype=dtype, device=self.device)
        getattr(self, GRAD_PARTITIONS).clear()

    def _order_is_known(self, params: list[Parameter]) -> None:
        gradients, dtype = self.session.config.gradients, self.gradient_accumulation_dtype
        if self.reducer.scales is not None:
            self.store = GradientStore(self.session.inter_format, self.reducer.scales, self.state_groups, dtype)
        else:
            element, block_size = gradients.store_format, gradients.block_size
            self.store = BlockGradientStore(element, block_size, self.state_groups, dtype)
        self.session.parts.append(self.store)
        self.store.show_in(getattr(self, GRAD_PARTITIONS), params)  # what reads them is replaced below

    def destroy(self) -> None:
        super().destroy()
        getattr(self, GRAD_PARTITIONS).clear()
        self.averaged_gradients.clear()
        self.store = Freed()

    # -- in backward -------------------------------------------------------------------------------------------------

    def _gradient_results(self, params: list[Parameter], again: bool, twice: bool, headroom: float):
        if twice:
            self.reducer.drain()  # what a second gradient is added to must be there
        # What was frozen since, and rests in the node, becomes no codes: `_drop_gradient` could not forget them.
        last = self._at_boundary() and all(p.requires_grad for p in params)
        results = self.store.destinations(params, last, again, headroom)
        return results, functools.partial(self.store.arrived, params)

    @torch.no_grad()
    def partition_grads(self, params_to_release: list[Parameter], grad_partitions: list[Tensor]):
        for param, part in zip(params_to_release, grad_partitions):
            own = part.view(-1)[: self.session.own_numel(param)]
            self.store.write(param, own if self.micro_step_id == 0 else own + self.store.read(param))
            param.grad = None
        return []

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        if not partition_gradients:
            return super().has_overflow(partition_gradients)
        bad = torch.stack(self._square_sums()).isfinite().all().logical_not_().to(torch.uint8)
        ds_comm.all_reduce(bad, op=ds_comm.ReduceOp.MAX, group=self.dp_process_group)
        self._model_parallel_all_reduce(tensor=bad, op=ds_comm.ReduceOp.MAX)
        return bool(bad.item())

    def _square_sums(self, counted: Callable[[Parameter], bool] | None = None) -> list[Tensor]:
        self.store.close()
        return [self.store.square_sum(i, counted) for i in range(len(self.fp16_groups))]

    def _counts_in_norm(self, param: Parameter) -> bool:
        """With tensor parallelism what all its ranks hold counts once, as in DeepSpeed's get_grad_norm_direct."""
        return is_model_parallel_parameter(param) or self.model_parallel_rank == 0

    def _get_norm_groups(self) -> list[Tensor]:
        tensor_parallel = self.model_parallel_group is not None
        squares = torch.stack(self._square_sums(self._counts_in_norm if tensor_parallel else None))
        ds_comm.all_reduce(squares, op=ds_comm.ReduceOp.SUM, group=self.session.topology.group)
        self._model_parallel_all_reduce(tensor=squares, op=ds_comm.ReduceOp.SUM)
        norms = squares.sqrt()
        # DeepSpeed's mark for a norm that is not finite.
        return list(torch.where(norms.isfinite(), norms, torch.full_like(norms, -1.0)))

    def _prepare_fp32_grad_for_sub_group(self, sub_group_id: int) -> None:
        parts = [self._padded(p, self.store.read(p)) for p in self.fp16_groups[sub_group_id]]
        flat = self.fp32_partitioned_groups_flat[sub_group_id]
        flat.grad = torch.cat(parts).to(flat.dtype)
        self.averaged_gradients[sub_group_id] = None

    def _gradients_of(self, group: StateGroup):
        return self.store.of(group)

    def _drop_gradient(self, param: Parameter) -> None:
        self.store.drop_sum(param)

    # -- looking at gradients, and changing them ---------------------------------------------------------------------

    def _get_fp32_grad_state_partition(self, param: Parameter, release_swap_buffers: bool):
        return self._padded(param, self.store.read(param)), self.grad_position[self.get_param_id(param)][0]

    def set_fp32_grad_for_param(self, value: Tensor, param: Parameter) -> None:
        if param.requires_grad:
            self.store.write(param, self._own_part(param, value))

    def set_local_grad_for_param(self, value: Tensor, param: Parameter) -> None:
        if param.requires_grad:
            self.store.write(param, self._own_part_of_local(param, value))

    def update_fp32_grad_for_param_vectorized(self, update_func, param_list) -> None:
        for param in param_list:
            if param.requires_grad:
                full = self._fp32_state_allgather(param, self._padded(param, self.store.read(param)))
                self.store.write(param, self._own_part(param, update_func(full, param)))

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        return {
            i: {k: self._padded(p, self.store.read(p)) for k, p in enumerate(sub_group)}
            for i, sub_group in enumerate(self.fp16_groups)
        }
