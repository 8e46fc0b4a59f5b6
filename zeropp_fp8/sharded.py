"""Parameters of which each rank keeps a part: DeepSpeed's of ZeRO-3, as the rest of the package sees them.

Nothing else reads or writes what DeepSpeed has put on a parameter (`ds_*`), and what the plugin remembers of one lies
in one slot on it. Functions and not a class around a parameter: hooks and optimizers hand over the parameter itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter
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
        lossy: its values came through a quantized format.
        stored: its codes, where it rests as codes (zero/frozen/store.py).
        operand: its codes as they were gathered, for a product (compute/operand.py); its values are NaN meanwhile.
        as_numbers: they are decoded all the same, because somebody else than the layer reads them (DoRA's norm of the
            weight, a product that a model forms by itself): whenever the codes are there, for backward needs them too.
        name: in the model, for errors.
    """

    wire: Any = None
    lossy: bool = False
    stored: Any = None
    operand: Any = None
    as_numbers: bool = False
    name: str | None = None


_NOTHING = Remembered()


def known(param: Tensor) -> Remembered:
    """What is remembered, to be read."""
    return param.__dict__.get(SLOT, _NOTHING)


attached: Callable[[Parameter], Remembered] = attrgetter(SLOT)  # the same of a parameter that an engine gathers


def remember(param: Tensor, **values) -> None:
    """Set fields of what is remembered; a slot in which nothing is left goes."""
    remembered = param.__dict__.get(SLOT)
    if remembered is None:
        remembered = param.__dict__[SLOT] = Remembered()
    vars(remembered).update(values)
    if remembered == _NOTHING:
        del param.__dict__[SLOT]


# -- the full tensor -------------------------------------------------------------------------------------------------
# attrgetter: asked for each parameter of each gather, where a function of Python's takes three times as long.

key: Callable[[Any], int] = attrgetter("ds_id")  # the number of a parameter, the same on every rank; or of a module
numel: Callable[[Parameter], int] = attrgetter("ds_numel")  # elements of the full tensor
users: Callable[[Parameter], set[int]] = attrgetter("ds_active_sub_modules")  # key of the modules that use its values
stays: Callable[[Parameter], bool] = attrgetter("ds_persist")  # whether it is to be kept gathered between steps


def is_sharded(param: Tensor) -> bool:
    """Whether each rank keeps a part of it."""
    return hasattr(param, "ds_status")


def shape(param: Tensor) -> torch.Size:
    """Of the full tensor, also of one that is not sharded."""
    return param.ds_shape if hasattr(param, "ds_shape") else param.shape


def is_full(param: Parameter) -> bool:
    """Whether its values are there."""
    return param.ds_status._name_ == "AVAILABLE"


def full(params: Iterable[Parameter]) -> list[Parameter]:
    """Those whose values are there."""
    return [param for param in params if param.ds_status._name_ == "AVAILABLE"]


def missing(params: Iterable[Parameter]) -> list[Parameter]:
    """Those that are not full."""
    return [param for param in params if param.ds_status._name_ != "AVAILABLE"]


def is_dropped(param: Tensor) -> bool:
    """Whether it is sharded and its values are not there."""
    status = getattr(param, "ds_status", None)
    return status is not None and status._name_ == "NOT_AVAILABLE"


def set_full(param: Parameter, values: Tensor, lossy: bool = False) -> None:
    """Let it have its values, in its full shape; `lossy`: not every bit of what rests."""
    param.data = values
    param.ds_status = type(param.ds_status).AVAILABLE
    remembered = param.__dict__.get(SLOT)
    if remembered is not None:
        remembered.lossy = lossy


def set_dropped(param: Parameter, nothing: Tensor | None = None) -> None:
    """Let it count as having none; `nothing` takes their place."""
    if nothing is not None:
        param.data = nothing
    param.ds_status = type(param.ds_status).NOT_AVAILABLE


def drop(params: Iterable[Parameter], nothing: Iterable[Tensor]) -> None:
    """Let parameters that an engine gathers have no operand, and no values: `nothing`, a tensor each."""
    for param, empty in zip(params, nothing):
        param.data = empty
        param.ds_status = type(param.ds_status).NOT_AVAILABLE
        remembered = param.__dict__[SLOT]
        remembered.lossy, remembered.operand = False, None


def free(param: Parameter) -> None:
    """Drop its values.

    Raises:
        RuntimeError: a module uses them.
    """
    from deepspeed.runtime.zero.partition_parameters import free_param

    free_param(param)


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

shard: Callable[[Parameter], Tensor] = attrgetter("ds_tensor.data")  # flat, with padding
# Elements of the part, with padding; where it rests as codes, of what they stand for.
shard_numel: Callable[[Parameter], int] = attrgetter("ds_tensor.ds_numel")
shard_dtype: Callable[[Parameter], torch.dtype] = attrgetter("ds_tensor.dtype")
group: Callable[[Parameter], Any] = attrgetter("ds_process_group")  # the ranks that have the parts


def unpadded(param: Parameter, numel: int) -> Tensor:
    """The first elements of the part: what is before its padding."""
    return param.ds_tensor.data.narrow(0, 0, numel)


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
