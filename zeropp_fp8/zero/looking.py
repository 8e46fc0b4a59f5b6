"""DeepSpeed's safe_get_* and safe_set_* for gradients and states, in any storage and partition."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded


class Looking:
    """Answers these calls for a stage: reads with DeepSpeed's methods, writes with `write` of gradients and states.

    All ranks read full gradients together, and first finish the sums accumulated in the node; one rank alone cannot.
    """

    def __init__(self, stage) -> None:
        self.stage = stage

    def _own(self, param: Parameter, full: Tensor) -> Tensor:
        """This rank's elements of a flat or shaped full tensor."""
        if full.numel() != sharded.numel(param):
            raise ValueError(f"the parameter has {sharded.numel(param)} elements, the value {full.numel()}")
        return self.stage.session.placement.own_part(param, full)

    def _own_of_local(self, param: Parameter, value: Tensor) -> Tensor:
        """This rank's elements of a local value, which has the size of DeepSpeed's partition, padding included."""
        if value.numel() != param.partition_numel():
            raise ValueError(f"this rank's part has {param.partition_numel()} elements, the value {value.numel()}")
        return value.reshape(-1)[: self.stage.session.own_numel(param)]

    # -- gradients ---------------------------------------------------------------------------------------------------

    def get_fp32_grad_for_param(self, param: Parameter) -> Tensor | None:
        self.stage.reduction.flush_accumulated()
        return self.stage.stock.get_fp32_grad_for_param(param)

    def set_fp32_grad_for_param(self, value: Tensor, param: Parameter) -> None:
        self.stage.reduction.flush_accumulated()
        if param.requires_grad:
            self.stage.gradients.write(param, self._own(param, value))

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[[Tensor, Parameter], Tensor], param_list: Iterable[Parameter]
    ) -> None:
        for param in param_list:
            if param.requires_grad:
                self.set_fp32_grad_for_param(update_func(self.get_fp32_grad_for_param(param), param), param)

    def get_local_fp32_grad_for_param(self, param: Parameter) -> Tensor | None:
        self.stage.reduction.refuse_accumulated()
        return self.stage.stock.get_local_fp32_grad_for_param(param)

    def set_local_grad_for_param(self, value: Tensor, param: Parameter) -> None:
        stage = self.stage
        stage.reduction.refuse_accumulated()
        if param.requires_grad:
            if stage.offload_optimizer:
                stage.norm_for_param_grads[stage.get_param_id(param)] = stage._constant_buffered_norm2(value)
            stage.gradients.write(param, self._own_of_local(param, value))

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        self.stage.reduction.refuse_accumulated()
        return self.stage.gradients.get_fp32_grad_partitions()

    # -- states ------------------------------------------------------------------------------------------------------

    def set_full_hp_param(self, value: Tensor, param: Parameter, optim_state_key: str | None = None) -> None:
        if param.requires_grad:
            self.stage.states.write(param, self._own(param, value), optim_state_key)

    def set_local_hp_param(self, value: Tensor, param: Parameter, optim_state_key: str | None = None) -> None:
        if param.requires_grad:
            self.stage.states.write(param, self._own_of_local(param, value), optim_state_key)
