"""Sharded parameters: DeepSpeed's parameters of ZeRO-3, as the rest of the package sees them.

No other file reads or writes the attributes that DeepSpeed has put on a parameter (`ds_*`). The plugin keeps its own
notes on a parameter in one slot. These are functions, not a class: hooks and optimizers hand over the parameter itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

SLOT = "zeropp_fp8"  # the attribute with the plugin's Remembered


@dataclass
class Remembered:
    """The plugin's notes on one parameter.

    Attributes:
        wire: how the engine that it is attached to gathers it (zero/gather/attached.py).
        lossy: its values came through a quantized format.
        stored: its codes, if it is stored as codes (zero/frozen/store.py).
        operand: its gathered codes, for a product (compute/operand.py); meanwhile its values are NaN.
        in_graphs: (codes, scale) of `operand` in tensors that stay from gather to gather: graphs take them, and their
            backward saves them, not what is in them.
        as_numbers: the codes are also decoded, because code other than the layer reads the values (DoRA's norm of the
            weight, a product that a model forms by itself): whenever the codes are there; backward needs them too.
        name: in the model, for errors.
    """

    wire: Any = None
    lossy: bool = False
    stored: Any = None
    operand: Any = None
    in_graphs: tuple[Tensor, Tensor] | None = field(default=None, compare=False)  # alone it is no reason for a slot
    as_numbers: bool = False
    name: str | None = None


_NOTHING = Remembered()


def known(param: Tensor) -> Remembered:
    """Return the notes on a parameter, to be read."""
    return param.__dict__.get(SLOT, _NOTHING)


attached: Callable[[Parameter], Remembered] = attrgetter(SLOT)  # the notes on an attached parameter


def remember(param: Tensor, **values) -> None:
    """Set fields of the notes; remove a slot that becomes empty."""
    remembered = param.__dict__.get(SLOT)
    if remembered is None:
        remembered = param.__dict__[SLOT] = Remembered()
    vars(remembered).update(values)
    if remembered == _NOTHING:
        del param.__dict__[SLOT]


# -- the full tensor -------------------------------------------------------------------------------------------------
# attrgetter: every gather reads these for each of its parameters; a Python function takes three times as long.

key: Callable[[Any], int] = attrgetter("ds_id")  # the number of a parameter, the same on every rank; or of a module
numel: Callable[[Parameter], int] = attrgetter("ds_numel")  # elements of the full tensor
users: Callable[[Parameter], set[int]] = attrgetter("ds_active_sub_modules")  # keys of the modules that use its values
stays: Callable[[Parameter], bool] = attrgetter("ds_persist")  # whether it stays gathered between steps


def is_sharded(param: Tensor) -> bool:
    """Whether each rank keeps a part of the parameter."""
    return hasattr(param, "ds_status")


def shape(param: Tensor) -> torch.Size:
    """Return the shape of the full tensor, also for a parameter that is not sharded."""
    return param.ds_shape if hasattr(param, "ds_shape") else param.shape


def is_full(param: Parameter) -> bool:
    """Whether the parameter is gathered, so that its values are there."""
    return param.ds_status._name_ == "AVAILABLE"


def holds_codes(module: nn.Module) -> bool:
    """Whether a layer's weight is codes in a dtype of numbers, which rounding would spoil: bitsandbytes' of 4 bits."""
    return any(getattr(each, "quant_state", None) is not None for each in (module, module._parameters.get("weight")))


def full(params: Iterable[Parameter]) -> list[Parameter]:
    """Return the gathered parameters."""
    return [param for param in params if param.ds_status._name_ == "AVAILABLE"]


def missing(params: Iterable[Parameter]) -> list[Parameter]:
    """Return the parameters that are not gathered."""
    return [param for param in params if param.ds_status._name_ != "AVAILABLE"]


def is_dropped(param: Tensor) -> bool:
    """Whether the parameter is sharded and its values are not there."""
    status = getattr(param, "ds_status", None)
    return status is not None and status._name_ == "NOT_AVAILABLE"


def set_full(param: Parameter, values: Tensor, lossy: bool = False) -> None:
    """Give the parameter its values, in its full shape; `lossy`: these differ in some bits from the stored ones."""
    set_all_full([(param, values, not lossy)])


def set_all_full(arrived: Iterable[tuple[Parameter, Tensor, bool]]) -> None:
    """Do so for (parameter, its values, whether these are exact)."""
    for param, values, exact in arrived:
        param.data = values
        param.ds_status = type(param.ds_status).AVAILABLE
        remembered = param.__dict__.get(SLOT)
        if remembered is not None:
            remembered.lossy = not exact


def set_dropped(param: Parameter, nothing: Tensor | None = None) -> None:
    """Mark the parameter as dropped; `nothing` replaces its values."""
    if nothing is not None:
        param.data = nothing
    param.ds_status = type(param.ds_status).NOT_AVAILABLE


def set_operand(param: Parameter, operand: Any) -> None:
    """Give an attached parameter its gathered codes, a Float8Operand."""
    remembered = param.__dict__[SLOT]
    if remembered.in_graphs is None or remembered.in_graphs[0].dtype != operand.dtype:
        with torch.inference_mode(False):  # what an evaluation gathers first, training may save
            given = operand.codes, operand.scale
            remembered.in_graphs = tuple([torch.empty(0, dtype=each.dtype, device=each.device) for each in given])
    codes, scale = remembered.in_graphs
    codes.data, scale.data = operand.codes, operand.scale
    remembered.operand = operand


def drop_operand(param: Tensor) -> None:
    """Drop the parameter's codes, if there are some."""
    remembered = param.__dict__.get(SLOT)
    if remembered is not None and remembered.operand is not None:
        codes, _ = remembered.in_graphs
        codes.data = _nothing_of(codes.dtype, codes.device)
        remembered.operand = None


@functools.cache
@torch.inference_mode(False)
def _nothing_of(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def drop(params: Iterable[Parameter], nothing: Iterable[Tensor]) -> None:
    """Drop operand and values of parameters that an engine gathers; `nothing` has one replacement per parameter."""
    for param, empty in zip(params, nothing):
        param.data = empty
        param.ds_status = type(param.ds_status).NOT_AVAILABLE
        remembered = param.__dict__[SLOT]
        remembered.lossy = False
        if remembered.operand is not None:
            drop_operand(param)


def free(param: Parameter) -> None:
    """Drop the parameter's values.

    Raises:
        RuntimeError: a module uses them.
    """
    from deepspeed.runtime.zero.partition_parameters import free_param

    free_param(param)


def leave_between_steps(param: Parameter) -> None:
    """Do not keep the parameter gathered between steps."""
    param.ds_persist = False


def describe(param: Parameter) -> dict:
    """Return all that DeepSpeed knows of the parameter."""
    return param.ds_summary()


def gathered(params: list[Parameter], modifier_rank: int | None = None) -> AbstractContextManager:
    """Context in which all values are there; all ranks get what `modifier_rank` has written. Collective."""
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters(params, modifier_rank=modifier_rank)


# -- this rank's part ------------------------------------------------------------------------------------------------

shard: Callable[[Parameter], Tensor] = attrgetter("ds_tensor.data")  # flat, with padding
stored: Callable[[Parameter], Tensor] = attrgetter("ds_tensor")  # the same, to be read only
# Elements of the part, with padding; if it is stored as codes, the number of elements that the codes stand for.
shard_numel: Callable[[Parameter], int] = attrgetter("ds_tensor.ds_numel")
shard_dtype: Callable[[Parameter], torch.dtype] = attrgetter("ds_tensor.dtype")
group: Callable[[Parameter], Any] = attrgetter("ds_process_group")  # the ranks that have the parts


def experts_group(param: Parameter) -> Any:
    """Return the ranks that share a parameter of DeepSpeed's AutoEP, which have the same experts; None: all ranks."""
    if getattr(param, "ds_zero_placement_family", None) != "autoep_expert":
        return None
    from deepspeed.utils import groups

    return groups._get_expert_data_parallel_group(param.ds_zero_partition_group_name)


def unpadded(param: Parameter, numel: int) -> Tensor:
    """Return the first elements of the part: those before its padding."""
    return param.ds_tensor.data.narrow(0, 0, numel)


def wire_dtype(param: Parameter) -> torch.dtype:
    """Return the dtype of values that are sent unquantized."""
    from deepspeed.runtime.zero.partition_parameters import get_allgather_dtype

    return get_allgather_dtype(param, param.ds_tensor) or param.ds_tensor.dtype  # autocast of no dtype says None


def stored_as_codes(param: Parameter) -> bool:
    """Whether the part consists of codes of the frozen store, in any engine."""
    return known(param).stored is not None


def move_shard(param: Parameter, data: Tensor) -> None:
    """Put the part into `data`, which has the same elements."""
    param.ds_tensor.data = data


def replace_shard(param: Parameter, own: Tensor, numel: int | None = None) -> None:
    """Replace the part by another tensor, whose dtype may differ; `numel`: how many elements its codes stand for."""
    before = param.ds_tensor
    own.requires_grad = False
    own.ds_numel, own.status, own.final_location = numel or own.numel(), before.status, before.final_location
    param.ds_tensor = own


@dataclass(frozen=True)
class Shard:
    """This rank's part with DeepSpeed's notes about its size."""

    data: Tensor
    numel: int
    padding_size: Callable[[], int]

    @classmethod
    def of(cls, param: Parameter) -> Shard:
        """Return the part that the parameter has now."""
        return cls(param.ds_tensor.data, param.ds_tensor.ds_numel, param.padding_size)

    @classmethod
    def made_of(cls, own: Tensor, padding: int) -> Shard:
        """Make a part of these elements, of which the last `padding` are padding."""
        return cls(own, own.numel(), lambda: padding)

    def put(self, param: Parameter) -> None:
        """Make it the part of a parameter."""
        param.ds_tensor.data, param.ds_tensor.ds_numel, param.padding_size = self.data, self.numel, self.padding_size


# -- modules, and models that are being made -------------------------------------------------------------------------


def is_leaf(module: nn.Module) -> bool:
    """Whether all parameters in a module are gathered together, by DeepSpeed's mark."""
    from deepspeed.utils import z3_leaf_module

    return z3_leaf_module(module)


def under_construction() -> Any:
    """Return the zero.Init under which a model is being made; None outside of any."""
    from deepspeed.runtime.zero import partition_parameters

    return partition_parameters.top_level_context


def device() -> torch.device:
    """Return this rank's device, as DeepSpeed has chosen it."""
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())
