"""The stage of an engine, composed by its configuration. Its parts are imported only where they are asked for."""

from __future__ import annotations

import functools

import torch

from zeropp_fp8.config import PluginConfig
from zeropp_fp8.optim import FP8AdamW, StateFormats
from zeropp_fp8.zero.session import Session
from zeropp_fp8.zero.stage3 import ZeroppStage3


def make_stage3(module, init_optimizer, param_names, *args, session: Session, **kwargs) -> ZeroppStage3:
    """The stage of an engine with an optimizer, with the parts that its configuration asks for."""
    session.state_formats = _state_formats(session.config, init_optimizer)
    parts: list[type] = [ZeroppStage3]
    if session.state_formats is not None:
        from zeropp_fp8.zero.states.stage3_states import CompressedStatesStage3

        parts.append(CompressedStatesStage3)
    if session.config.gradients.store_format != "none":
        from zeropp_fp8.zero.states.stage3_gradients import StoredGradientsStage3

        parts.append(StoredGradientsStage3)
    if session.config.partition == "whole_tensor":
        from zeropp_fp8.zero.owners.stage3 import OwnersStage3

        parts.append(OwnersStage3)
    return _composed(*parts)(module, init_optimizer, param_names, *args, session=session, **kwargs)


@functools.cache
def _composed(*parts: type) -> type[ZeroppStage3]:
    """The class of these parts: what the first calls with `super()` is the second's, and so on."""
    return parts[0] if len(parts) == 1 else type(ZeroppStage3.__name__, parts, {"__module__": ZeroppStage3.__module__})


def _state_formats(config: PluginConfig, optimizer: torch.optim.Optimizer) -> StateFormats | None:
    """What master weights and moments rest in; None: in fp32, DeepSpeed's."""
    if not config.stores_states_in_low_precision and not isinstance(optimizer, FP8AdamW):
        return None
    from zeropp_fp8.zero.states.compressed import chosen_formats

    return chosen_formats(config, optimizer)
