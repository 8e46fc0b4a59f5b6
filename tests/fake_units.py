"""Parameters, blocks and units with just what DeepSpeed puts on them, for tests in one process."""

import itertools
from types import SimpleNamespace

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from zeropp_fp8 import sharded
from zeropp_fp8.comm.ledger import WireLedger
from zeropp_fp8.zero.gather.sliced import Sliced, SlicedUnit

_ids = itertools.count()
_SESSION = SimpleNamespace(ledger=WireLedger(1, 1))
SLICED = Sliced(SimpleNamespace(session=_SESSION))  # with a route that leads nowhere


def fake_parameters(numels, vectors=()):
    """Matrices of these sizes, but for the indices of `vectors`."""
    params = [nn.Parameter(torch.zeros(1)) for _ in numels]
    for index, (param, numel) in enumerate(zip(params, numels)):
        param.ds_numel = numel
        param.ds_shape = torch.Size((numel,) if index in vectors else (1, numel))
    return params


def as_block(params):
    block = nn.Module()
    for index, param in enumerate(params):
        block.register_parameter(f"p{index}", param)
    return block


def fake_unit(numel):
    """A unit of one parameter that has not been gathered."""
    param = nn.Parameter(torch.empty(0))
    param.ds_numel, param.ds_active_sub_modules, param.is_external_param = numel, set(), False
    param.ds_status, param.ds_id = ZeroParamStatus.NOT_AVAILABLE, next(_ids)
    param.ds_summary = lambda: {"numel": numel}
    unit = SlicedUnit([param], SLICED)
    sharded.remember(param, wire=SimpleNamespace(unit=unit))
    return unit
