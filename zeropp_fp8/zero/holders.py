"""Finds the engine or the model for an object of a script: an engine, its module, or a Hugging Face Trainer.

A Trainer's callbacks get the module, Accelerate's `prepare` gives the engine, and torch.compile and PEFT wrap either.
All of them have the engine's parameters, and a parameter knows the engine that it is attached to.
"""

from __future__ import annotations

from torch import nn

from zeropp_fp8 import sharded


def module_of(holder, caller: str) -> nn.Module:
    """The module itself (an engine is one), or the module of a Trainer.

    Raises:
        ValueError: `holder` is none of these; the message begins with `caller`.
    """
    held = holder if isinstance(holder, nn.Module) else getattr(holder, "model_wrapped", None)
    if not isinstance(held, nn.Module):
        raise ValueError(f"{caller} takes a DeepSpeed engine, its module or a Trainer, not a {type(holder).__name__}")
    return held


def engine_of(holder, caller: str):
    """The plugin's DeepSpeed engine. A part of the engine's module is enough to find it.

    Raises:
        ValueError: there is no engine, or there are several; the message begins with `caller`.
    """
    held = module_of(holder, caller)
    engines = {id(engine): engine for engine in _engines(held)}
    if not engines:
        raise ValueError(
            f"{caller}: this {type(held).__name__} does not run with the plugin (yet, or any more); call "
            'zeropp_fp8.enable() before deepspeed.initialize, put a "zeropp_fp8" section into the ds_config, and with '
            "a Trainer ask once it trains"
        )
    if len(engines) > 1:
        raise ValueError(f"{caller}: this {type(held).__name__} belongs to {len(engines)} engines; pass one of them")
    return next(iter(engines.values()))


def _engines(held: nn.Module) -> list:
    own = getattr(held, "zeropp_fp8_session", None)  # the session of an engine, which may have ended
    wires = (sharded.known(param).wire for param in held.parameters())
    sessions = [own] if own else [wire.owner.session for wire in wires if wire is not None]
    return [engine for engine in (session.engine() for session in sessions) if engine is not None]
