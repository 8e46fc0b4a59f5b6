"""Parameters of which each rank keeps a part: DeepSpeed's of ZeRO-3, as the rest of the package sees them.

Nothing else reads or writes what DeepSpeed has put on a parameter (`ds_*`), and what the plugin remembers of one lies
in one slot on it. Functions and not a class around a parameter: hooks and optimizers hand over the parameter itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

SLOT = "zeropp_fp8"  # the attribute with the plugin's Remembered


@dataclass
class Remembered:
    """What the plugin knows of one parameter.

    Attributes:
        wire: how the engine that has it gathers it (zero/gather/adopted.py).
        stored: its codes, where it rests as codes (zero/frozen/store.py).
        operand: its codes as they were gathered, for a product (compute/operand.py); its values are NaN meanwhile.
        as_numbers: they are decoded all the same, because somebody else than the layer reads them (DoRA's norm of the
            weight, a product that a model forms by itself): whenever the codes are there, for backward needs them too.
        name: in the model, for errors.
    """

    wire: Any = None
    stored: Any = None
    operand: Any = None
    as_numbers: bool = False
    name: str | None = None


_NOTHING = Remembered()


def known(param: Tensor) -> Remembered:
    """What is remembered, to be read."""
    return param.__dict__.get(SLOT, _NOTHING)


def remember(param: Tensor, **values) -> None:
    """Set fields of what is remembered; a slot in which nothing is left goes."""
    remembered = param.__dict__.get(SLOT)
    if remembered is None:
        remembered = param.__dict__[SLOT] = Remembered()
    vars(remembered).update(values)
    if remembered == _NOTHING:
        del param.__dict__[SLOT]


# -- the full tensor -------------------------------------------------------------------------------------------------


def is_sharded(param: Tensor) -> bool:
    """Whether each rank keeps a part of it."""
    return hasattr(param, "ds_status")


def key(param: Parameter) -> int:
    """Its number, the same on every rank; modules have one too."""
    return param.ds_id


def shape(param: Tensor) -> torch.Size:
    """Of the full tensor, also of one that is not sharded."""
    return param.ds_shape if hasattr(param, "ds_shape") else param.shape


def numel(param: Parameter) -> int:
    """Elements of the full tensor."""
    return param.ds_numel


def is_full(param: Parameter) -> bool:
    """Whether its values are there."""
    return param.ds_status._name_ == "AVAILABLE"


def is_dropped(param: Tensor) -> bool:
    """Whether it is sharded and its values are not there."""
    status = getattr(param, "ds_status", None)
    return status is not None and status._name_ == "NOT_AVAILABLE"


def set_full(param: Parameter, values: Tensor) -> None:
    """Let it have its values, in its full shape."""
    param.data = values
    param.ds_status = type(param.ds_status).AVAILABLE


def set_dropped(param: Parameter, nothing: Tensor | None = None) -> None:
    """Let it count as having none; `nothing` takes their place."""
    if nothing is not None:
        param.data = nothing
    param.ds_status = type(param.ds_status).NOT_AVAILABLE


def free(param: Parameter) -> None:
    """Drop its values.

    Raises:
        RuntimeError: a module uses them.
    """
    from deepspeed.runtime.zero.partition_parameters import free_param

    free_param(param)


def users(param: Parameter) -> set[int]:
    """`key` of the modules that are using its values."""
    return param.ds_active_sub_modules


def stays(param: Parameter) -> bool:
    """Whether it is to be kept gathered between steps."""
    return param.ds_persist


def leave_between_steps(param: Parameter) -> None:
    """Let it not be kept gathered."""
    param.ds_persist = False


def describe(param: Parameter) -> dict:
    """All that DeepSpeed knows of it."""
    return param.ds_summary()


def gathered(params: list[Parameter], modifier_rank: int | None = None) -> AbstractContextManager:
    """Context in which all values are there; what `modifier_rank` has written becomes that of all. Collective."""
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters(params, modifier_rank=modifier_rank)


# -- this rank's part ------------------------------------------------------------------------------------------------


def shard(param: Parameter) -> Tensor:
    """This rank's part, flat, with padding."""
    return param.ds_tensor.data


def shard_numel(param: Parameter) -> int:
    """Elements of the part, with padding; where it rests as codes, of what they stand for."""
    return param.ds_tensor.ds_numel


def group(param: Parameter) -> torch.distributed.ProcessGroup:
    """The ranks that have the parts."""
    return param.ds_process_group


def wire_dtype(param: Parameter) -> torch.dtype:
    """Of numbers that travel unquantized."""
    from deepspeed.runtime.zero.partition_parameters import get_allgather_dtype

    return get_allgather_dtype(param, param.ds_tensor)


def rests_as_codes(param: Parameter) -> bool:
    """Whether the part is codes of the frozen store, in whosever engine."""
    return known(param).stored is not None


def move_shard(param: Parameter, data: Tensor) -> None:
    """Let the part lie in `data`, which has its elements."""
    param.ds_tensor.data = data


def replace_shard(param: Parameter, own: Tensor, numel: int | None = None) -> None:
    """Let another tensor be the part, of another dtype too; `numel` where its elements are codes of that many."""
    before = param.ds_tensor
    own.requires_grad = False
    own.ds_numel, own.status, own.final_location = numel or own.numel(), before.status, before.final_location
    param.ds_tensor = own


@dataclass(frozen=True)
class Shard:
    """This rank's part where it lies, with DeepSpeed's notes about its size."""

    data: Tensor
    numel: int
    padding_size: Callable[[], int]

    @classmethod
    def of(cls, param: Parameter) -> Shard:
        """What is there now."""
        return cls(param.ds_tensor.data, param.ds_tensor.ds_numel, param.padding_size)

    @classmethod
    def made_of(cls, own: Tensor, padding: int) -> Shard:
        """Elements of which the last `padding` are none of the parameter's."""
        return cls(own, own.numel(), lambda: padding)

    def put(self, param: Parameter) -> None:
        """Let it be a parameter's."""
        param.ds_tensor.data, param.ds_tensor.ds_numel, param.padding_size = self.data, self.numel, self.padding_size


# -- modules, and models that are being made -------------------------------------------------------------------------


def is_leaf(module: nn.Module) -> bool:
    """Whether all parameters in a module are gathered together, by DeepSpeed's mark."""
    from deepspeed.utils import z3_leaf_module

    return z3_leaf_module(module)


def under_construction() -> Any:
    """The zero.Init under which a model is being made; None where none is."""
    from deepspeed.runtime.zero import partition_parameters

    return partition_parameters.top_level_context


def device() -> torch.device:
    """Of this rank, as DeepSpeed has chosen it."""
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())
