"""DeepSpeedZeroOptimizer_Stage3 as the parts of this project's stage extend it.

A stage is composed when an engine is made (compose.py): ZeroppStage3, then the parts that the configuration asks for
(states/, owners/), then this class. Each overrides what concerns it, and `super()` is the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8.zero.session import Session

GRAD_PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


class Stage3Base(DeepSpeedZeroOptimizer_Stage3):
    """What parts of a stage ask of each other, answered as DeepSpeed has it.

    Attributes:
        store, states: reduced gradients and optimizer states in low precision; None where there are none.
    """

    store = states = None

    def __init__(self, module, init_optimizer, param_names, *args, session: Session, **kwargs) -> None:
        self.session = session
        super().__init__(module, init_optimizer, param_names, *args, **kwargs)

    def _order_is_known(self, params: list[Parameter]) -> None:
        """In which quantized gradients of `params` are reduced."""

    def _gradient_results(
        self, params: list[Parameter], again: bool, twice: bool, headroom: float
    ) -> tuple[Sequence[Tensor], Callable[[], None] | None]:
        """(where this rank's parts of a unit's mean gradients are to be written, what is called when they are).

        Args:
            again: they are added to what is there.
            twice: some of that is of this very backward.
            headroom: how many times larger than with the shared scales alone the numbers of FP8 codes will be.
        """
        partitions = getattr(self, GRAD_PARTITIONS)
        return [partitions[p.ds_id].view(-1)[: self.session.own_numel(p)] for p in params], None

    def _prepare_fp32_grad_for_sub_group(self, sub_group_id: int) -> None:
        """What an optimizer step is given: the sub-group's partitions as one flat tensor.

        DeepSpeed tells the allocator of each partition which stream reads it, and finds the stream in Python each time.
        They are views of few buffers, of which each is told once.
        """
        partitions, flat = self.averaged_gradients[sub_group_id], self.fp32_partitioned_groups_flat[sub_group_id]
        flat.grad = self.flatten(partitions).to(flat.dtype)
        for partition in {p.untyped_storage().data_ptr(): p for p in partitions if p.is_cuda}.values():
            partition.record_stream(torch.cuda.current_stream(partition.device))
        self.averaged_gradients[sub_group_id] = None

    def _drop_gradients_of_frozen(self) -> None:
        """What is frozen as the step begins has a gradient of zeros, whatever came before.

        DeepSpeed's own lists hold zeros.
        """


class Freed:
    """Stands for what an engine had."""

    def __getattr__(self, name: str):
        raise RuntimeError(
            "zeropp_fp8: engine.destroy() has freed the gradients and optimizer states that were in low precision, and "
            "the residuals of error feedback; look at them, and save checkpoints, before it"
        )


class Replaced:
    """Context in which an attribute of an object has another value."""

    def __init__(self, owner: object, name: str, value: object) -> None:
        self._owner, self._name, self._value = owner, name, value

    def __enter__(self) -> None:
        self._before = getattr(self._owner, self._name)
        setattr(self._owner, self._name, self._value)

    def __exit__(self, *exc) -> None:
        setattr(self._owner, self._name, self._before)
