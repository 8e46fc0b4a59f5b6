"""What DeepSpeed itself makes of a ds_config, without a process group."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Read before DeepSpeedConfig is made, or by the launcher.
_READ_ELSEWHERE = frozenset({"sequence_parallel_size", "data_parallel_size", "autotuning"})

_OBJECTS_LIKE = {
    "bf16": '{"enabled": true}',
    "fp16": '{"enabled": true}',
    "zero_optimization": '{"stage": 3}',
    "optimizer": '{"type": "AdamW", "params": {"lr": 1e-4}}',
    "scheduler": '{"type": "WarmupLR", "params": {"warmup_num_steps": 100}}',
}
_OBJECTS = _OBJECTS_LIKE.keys() | {"activation_checkpointing", "comms_logger", "flops_profiler", "torch_autocast"}


class _Recording(dict):
    """A dict that knows which of its keys were asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key) -> bool:
        self.asked.add(key)
        return super().__contains__(key)

    def __copy__(self) -> _Recording:
        return self  # DeepSpeed reads a copy


def stock_refusal(ds_config: Mapping[str, Any], ranks: int | None = None) -> tuple[str | None, list[str]]:
    """(why DeepSpeed would refuse it, or None; top-level keys that it never looks at, with the nearest that it does).

    Args:
        ranks: of the job. Where they are not known, it is not checked whether batch sizes fit each other.
    """
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.utils import logger

    class OfRanks(DeepSpeedConfig):
        def _initialize_params(self, param_dict):
            # DeepSpeed asks the process group; ranks that share sequences count as one.
            shared = ranks and param_dict.get("sequence_parallel_size")
            self.world_size = ranks / shared if shared else ranks or 1
            super()._initialize_params(param_dict)

    given = dict(ds_config)
    no_object = _no_object(given)
    if no_object is not None:
        return no_object, []
    if ranks is None and "train_micro_batch_size_per_gpu" in given:
        given.pop("train_batch_size", None)
    recording, level = _Recording(given), logger.level
    logger.setLevel(logging.ERROR)
    try:
        OfRanks(recording)
    except Exception as error:  # of pydantic, assertions, types: DeepSpeed has no class of its own for most
        return f"{type(error).__name__}: {error}", []
    finally:
        logger.setLevel(level)
    refused = _optimizer_refusal(given) or _scheduler_refusal(given) or _stage_refusal(given)
    if refused is not None:
        return refused, []
    unread = sorted(set(given) - recording.asked - _READ_ELSEWHERE)
    return None, [f'"{key}"{_nearest(key, recording.asked)}' for key in unread]


def _no_object(ds_config: Mapping[str, Any]) -> str | None:
    """What DeepSpeed takes for an object, and is none: it would end in an error of Python's, which names no key."""
    for key in sorted(_OBJECTS & ds_config.keys()):
        value, example = ds_config[key], _OBJECTS_LIKE.get(key, "{}")
        if not isinstance(value, Mapping):
            return f'"{key}" is {value!r}; it has to be an object, for example {example}'
        params = value.get("params") if key in ("optimizer", "scheduler") else None
        if params is not None and not isinstance(params, Mapping):
            return f'"{key}.params" is {params!r}; it has to be an object, as in {example}'
    return None


# What ZeRO takes without being asked to (deepspeed/runtime/zero/utils.py), and what it never takes.
_TESTED = frozenset({"adam", "adamw", "adagrad", "lion", "muon"})
_ONE_BIT = frozenset({"onebitadam", "onebitlamb", "zerooneadam"})


def _optimizer_refusal(ds_config: Mapping[str, Any]) -> str | None:
    """What an engine says of the optimizer that it makes itself, with the remedy."""
    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    optimizer = ds_config.get("optimizer")
    kind = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    if not kind:
        return None
    name = str(kind).lower()
    if name in _ONE_BIT:
        return f'"optimizer.type" "{kind}" does not go with ZeRO; use another one'
    if name not in DEEPSPEED_OPTIMIZERS and not hasattr(torch.optim, str(kind)):
        return f'"optimizer.type": neither DeepSpeed nor torch.optim has "{kind}"'
    if name == "muon" and ds_config["zero_optimization"].get("reduce_scatter", True):
        return (
            '"optimizer.type" "Muon" does not go with reduce-scatter; set "zero_optimization.reduce_scatter" to false'
        )
    if name not in _TESTED and not ds_config.get("zero_allow_untested_optimizer"):
        return f'"optimizer.type" "{kind}" is untested with ZeRO; to use it set "zero_allow_untested_optimizer" to true'
    params = optimizer.get("params") or {}
    if "max_grad_norm" in params:  # by the engine, though FusedLamb has it
        return '"optimizer.params.max_grad_norm" is refused of every optimizer; set "gradient_clipping" instead'
    return _params_refusal("optimizer", str(kind), params, _optimizers(str(kind), params))


def _optimizers(kind: str, params: Mapping[str, Any]) -> list[Callable]:
    """What DeepSpeedEngine._configure_basic_optimizer may make of a type: which, depends on device and offloading.

    Nothing where that cannot be known: of Muon, whose import compiles, and of those in the package mup.
    """
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    name = kind.lower()
    if name not in DEEPSPEED_OPTIMIZERS:
        return [getattr(torch.optim, kind)]
    if name in ("adam", "adamw"):
        of_torch = [torch.optim.Adam, torch.optim.AdamW]
        return [_adam_switches, *(of_torch if params.get("torch_adam") else [FusedAdam, DeepSpeedCPUAdam])]
    own = {
        "adagrad": [torch.optim.Adagrad, DeepSpeedCPUAdagrad],
        "lamb": [FusedLamb],
        "lion": [FusedLion, DeepSpeedCPULion],
    }
    return own.get(name, [])


def _adam_switches(params, torch_adam=False, adam_w_mode=True, fp32_optimizer_states=None) -> None:
    """What an engine takes out of the parameters of Adam and AdamW before it makes them."""


def _scheduler_refusal(ds_config: Mapping[str, Any]) -> str | None:
    """What an engine says of the scheduler that it makes itself, with the remedy.

    One of torch.optim.lr_scheduler, which DeepSpeed takes too, refuses ZeRO's optimizer: it is none of torch's.
    """
    from deepspeed.runtime import lr_schedules

    scheduler = ds_config.get("scheduler")
    kind = scheduler.get("type") if scheduler else None
    if not kind:
        return None
    made = getattr(lr_schedules, str(kind), None)
    if made is None:
        known = ", ".join(lr_schedules.VALID_LR_SCHEDULES)
        return (
            f'"scheduler.type" "{kind}" does not go with ZeRO, which takes {known}; use one of them, or give '
            'deepspeed.initialize an "lr_scheduler"'
        )
    if scheduler.get("params") is None:
        return f'"scheduler.params" is missing; add an object, as in {_OBJECTS_LIKE["scheduler"]}'
    return _params_refusal("scheduler", str(kind), scheduler["params"], [made])


def _stage_refusal(ds_config: Mapping[str, Any]) -> str | None:
    """What ZeRO-3 says when an engine makes it, with the remedy."""
    zero = ds_config.get("zero_optimization") or {}
    if zero.get("stage") != 3:
        return None
    for key, off in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
        if zero.get("reduce_scatter", True) and ds_config.get(key, off) != off:
            remedy = 'remove it, or set "zero_optimization.reduce_scatter" to false'
            return f'"{key}" does not go with reduce-scatter; {remedy}'
    device = "cpu" if zero.get("cpu_offload") else (zero.get("offload_optimizer") or {}).get("device", "none")
    for dtype in ("fp16", "bf16"):
        given, key = ds_config.get(dtype) or {}, f"{dtype}_master_weights_and_grads"
        if given.get(key) and not given.get("bf16_optimizer_states") and device == "none":
            return f'"{dtype}.{key}" needs "zero_optimization.offload_optimizer"; offload to "cpu", or remove the key'
    return None


def _params_refusal(owner: str, kind: str, params: Mapping[str, Any], made: Iterable[Callable]) -> str | None:
    """What is wrong with the parameters of something that is one of `made`; where that is nothing, it is not known.

    The first parameter of each is what an engine gives.
    """
    signatures = [list(inspect.signature(each).parameters.values())[1:] for each in made]
    known = {one.name for each in signatures for one in each}
    for key, value in params.items():
        if known and key not in known:
            return (
                f'"{owner}.params.{key}"{_nearest(key, known)} is no parameter of "{owner}.type"; rename or remove it'
            )
        if isinstance(value, str) and _is_number(value):
            return f'"{owner}.params.{key}" is the text "{value}"; write the number without quotes'
    needed = [{one.name for one in each if one.default is one.empty} for each in signatures]
    missing = set.intersection(*needed) - params.keys() if needed else set()
    if missing:
        names = ", ".join(f'"{owner}.params.{name}"' for name in sorted(missing))
        return f'"{owner}.type" "{kind}" needs {names}; add what is missing'
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _nearest(key: str, known: set[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    return f' (did you mean "{close[0]}"?)' if close else ""
