"""What the parts of a stage share that keep something in low precision between steps."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import Parameter

from zeropp_fp8.zero.stage3_base import GRAD_PARTITIONS, Stage3Base
from zeropp_fp8.zero.states.groups import StateGroup, make_state_groups


class AtRestStage3(Stage3Base):
    """A stage with gradients or states in low precision."""

    @property
    def state_groups(self) -> list[StateGroup]:
        """Made once DeepSpeed has its sub-groups."""
        if not hasattr(self, "_state_groups"):
            self._state_groups = make_state_groups(self.fp16_groups, self.session.own_numel, self.session.device)
        return self._state_groups

    def _own_part(self, param: Parameter, values: Tensor) -> Tensor:
        """This rank's elements of a flat or shaped full tensor."""
        return self.session.placement.own_part(param, values)

    def _own_part_of_local(self, param: Parameter, value: Tensor) -> Tensor:
        """This rank's elements of a local value, which has the size of DeepSpeed's partition, padding included."""
        if value.numel() != param.partition_numel():
            raise ValueError(f"this rank's part has {param.partition_numel()} elements, the value {value.numel()}")
        return value.reshape(-1)[: self.session.own_numel(param)]

    def _padded(self, param: Parameter, own: Tensor) -> Tensor:
        """A slice as DeepSpeed has it: zeros beyond the tensor's end."""
        return nn.functional.pad(own, (0, param.partition_numel() - own.numel()))

    def _gradients_of(self, group: StateGroup):
        """The gradients of a state group, as the fused step takes them."""
        partitions = getattr(self, GRAD_PARTITIONS)
        sizes = zip(group.params, group.segments.numels)
        return [partitions[param.ds_id].view(-1)[:numel] for param, numel in sizes]

    def _drop_gradient(self, param: Parameter) -> None:
        getattr(self, GRAD_PARTITIONS)[param.ds_id].zero_()

    def _drop_gradients_of_frozen(self) -> None:
        for param in (p for group in self.fp16_groups for p in group if not p.requires_grad):
            self._drop_gradient(param)

    def offload_states(self, *args, **kwargs) -> None:
        """DeepSpeed moves its own buffers, which are not where the numbers are.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "zeropp_fp8: offload_states does not know gradients and states in low precision; they take 6 bytes a "
            "parameter instead of 16. Leave the call out, or set gradients.store_format to none and the "
            "optimizer's formats to fp32"
        )
