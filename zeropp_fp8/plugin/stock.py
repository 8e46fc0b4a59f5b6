"""All that DeepSpeed refuses in a ds_config, misreads, or never reads, found without a process group.

DeepSpeed's own models and torch's own constructors do the checking. They run repeatedly, each time without the keys
that they have refused. If DeepSpeed reads a key without checking its value, its default for the key gives the type.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple

from pydantic import ValidationError

from zeropp_fp8.config.ds_config import without_in_tree_keys
from zeropp_fp8.config.resolve import is_asked, resolve
from zeropp_fp8.config.sections import SECTION, PluginConfig
from zeropp_fp8.config.words import ConfigError, Keys, at, key_of, match, nearest, once, refusals, shown, without
from zeropp_fp8.plugin.auto import as_if_filled

# DeepSpeed or its launcher reads these before DeepSpeedConfig is made.
_READ_ELSEWHERE = frozenset({"sequence_parallel_size", "data_parallel_size", "autotuning"})
# In these sections DeepSpeed takes text that looks like a number.
_FREE_TEXT = frozenset({"tensorboard", "wandb", "csv_monitor", "comet", "autotuning", "optimizer", "scheduler"})
# A key at least this similar to one of DeepSpeed's is a misspelling of it; other plugins' sections are less similar.
_MISSPELT = 0.88

MADE = ("optimizer", "scheduler")  # an engine makes these itself if the script hands over none
_OBJECTS_LIKE = {
    "bf16": '{"enabled": true}',
    "fp16": '{"enabled": true}',
    "zero_optimization": '{"stage": 3}',
    "optimizer": '{"type": "AdamW", "params": {"lr": 1e-4}}',
    "scheduler": '{"type": "WarmupLR", "params": {"warmup_num_steps": 100}}',
}
_OBJECTS = _OBJECTS_LIKE.keys() | {"activation_checkpointing", "comms_logger", "flops_profiler", "torch_autocast"}
_BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class Looked(NamedTuple):
    """The result of looking at a ds_config.

    Attributes:
        config: the resolved section; None if nothing asks for the plugin, or if the section is refused.
        lines: one per fault.
        remarks: about keys that DeepSpeed never reads.
        stock_refuses: whether DeepSpeed by itself would refuse the ds_config.
    """

    config: PluginConfig | None
    lines: list[str]
    remarks: list[str]
    stock_refuses: bool


@contextmanager
def _silence() -> Iterator[None]:
    """Keep DeepSpeed silent about the objects that are made here only for checking."""
    from deepspeed.utils import logger

    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@_silence()
def look(ds_config: Mapping[str, Any], world_size: float | None = None, made: Collection[str] = MADE) -> Looked:
    """Find all that is wrong with a ds_config.

    Args:
        world_size: data-parallel ranks of the job; where they are not known, batch sizes may be anything.
        made: sections of the objects that the engine makes; objects that a script hands over are not checked.
    """
    config, lines = None, []
    try:
        config = resolve(ds_config)
    except ConfigError as error:
        lines += error.faults
    filled = as_if_filled(without_in_tree_keys(ds_config))
    own = {key: value for key, value in filled.items() if key != SECTION}
    refused, unread = _of_config(own, world_size)
    named = set(map(key_of, refused))  # keys of a wrong type; they break other rules as well
    whole = bool(lines) if config is None else config.partition == "whole_tensor"
    lines = [line for line in lines if key_of(line) not in named]
    if not lines and not refused:
        lines += _of_engine(own, made, whole)
    if lines or refused:  # no engine is made then, and no script hands anything over
        refused += _of_engine(own, MADE, whole)
    lines += refused
    if config is not None and "optimizer" in made:
        lines += _of_states(own, config)
    lines = once(lines)
    named = set(map(key_of, lines))
    without_section = bool(refused) or _is_muon_with_reduce_scatter(own)
    return Looked(config, lines, [line for key, line in unread.items() if key not in named], without_section)


def checked(
    ds_config: Mapping[str, Any], world_size: float | None = None, made: Collection[str] = ()
) -> PluginConfig | None:
    """Return the result of `resolve`; if the plugin is asked for, refuse faults of DeepSpeed's own keys too.

    Raises:
        ConfigError: it has the lines of `look`.
    """
    if not is_asked(ds_config):
        return None
    found = look(ds_config, world_size, made)
    if found.lines:
        raise ConfigError(*found.lines)
    return found.config


# -- what DeepSpeedConfig makes of it ---------------------------------------------------------------------------------


class _Log:
    """The key that DeepSpeed has read last, and the keys that it refused or ignored: {path: line}."""

    def __init__(self) -> None:
        self.last: Keys | None = None
        self.lines: dict[Keys, str] = {}


class _Recording(dict):
    """An object of a ds_config that records which keys were read, and which values do not fit."""

    def __init__(self, values: Mapping[str, Any], log: _Log, path: Keys = ()) -> None:
        super().__init__(
            {
                key: _Recording(value, log, (*path, key)) if isinstance(value, Mapping) else value
                for key, value in values.items()
            }
        )
        self.log, self.path, self.asked = log, path, set()

    def _ask(self, key):
        self.asked.add(key)
        if super().__contains__(key):
            self.log.last = (*self.path, key)
            return True
        return False

    def get(self, key, default=None):
        if not self._ask(key):
            return default
        value, path = super().get(key), (*self.path, key)
        words = _unfit(value, default, key if len(path) == 1 else "")
        if words:
            self.log.lines[path] = _not_allowed(path, value, words)
            return default
        return value

    def __getitem__(self, key):
        self._ask(key)
        return super().__getitem__(key)

    def __contains__(self, key) -> bool:
        return self._ask(key)

    def __copy__(self) -> _Recording:
        return self  # DeepSpeed reads a copy


def _of_config(given: dict[str, Any], world_size: float | None) -> tuple[list[str], dict[str, str]]:
    """Return (a line per fault; {key that DeepSpeed never reads: remark})."""
    from deepspeed.runtime.config import DeepSpeedConfig

    log = _Log()

    class Looking(DeepSpeedConfig):
        looking = True

        def _initialize_params(self, param_dict):
            self.world_size = world_size or 1  # DeepSpeed asks the process group
            super()._initialize_params(param_dict)

        def _configure_train_batch_size(self):
            log.last = None
            if not log.lines:
                _check_batch(self, super()._configure_train_batch_size, world_size)

        def _do_sanity_check(self):
            if not log.lines:
                super()._do_sanity_check()

    log.lines |= _no_objects(given) | _numbers_as_text(given)
    left = None
    while left != given:
        left = given = reduce(without, filter(None, log.lines), given)
        log.last, recording = None, _Recording(given, log)
        try:
            Looking(recording)
        except Exception as error:  # pydantic's, assertions, types: DeepSpeed has hardly any class of its own
            log.lines |= _refused_by_deepspeed(error, given, log)
            given = reduce(without, filter(None, log.lines), given)
    lines = [*log.lines.values()]
    unread = {}
    for key in sorted(set(map(str, given)) - recording.asked - _READ_ELSEWHERE):
        if match(str(key).lower(), recording.asked, _MISSPELT):
            lines.append(f'"{key}": DeepSpeed has no such key{nearest(key, recording.asked)}; rename or remove it')
        else:
            near = nearest(key, recording.asked, 0.8)
            unread[key] = f'DeepSpeed never looks at "{key}"{near}: rename or remove it'
    return [*lines, *_misspelt_inside(recording)], unread


def _misspelt_inside(recording: _Recording) -> Iterator[str]:
    """Yield misspelt keys of a section whose keys DeepSpeed reads one by one."""
    for key in recording:
        part = dict.__getitem__(recording, key)
        if isinstance(part, _Recording):
            for unread in sorted(set(part) - part.asked):
                if match(unread, part.asked, 0.8):
                    name = ".".join((*part.path, unread))
                    yield f'"{name}": DeepSpeed has no such key{nearest(unread, part.asked)}; rename or remove it'
            yield from _misspelt_inside(part)


def _refused_by_deepspeed(error: Exception, given: Mapping[str, Any], log: _Log) -> dict[Keys, str]:
    """Return {path: line}; the path is () if the error concerns several keys and hides all further faults."""
    if isinstance(error, ConfigError):
        return {(): str(error)}
    last = log.last or ()
    if isinstance(error, ValidationError):
        (first, *_), within = error.errors(include_url=False)[0]["loc"] or ("",), last
        part = at(given, last)
        if first in given and not (isinstance(part, Mapping) and first in part):  # a model shared by several sections
            within = ()
        found = refusals(_model_named(error.title), error, at(given, within), ".".join(within), 0.6)
        return {(*within, *unknown[0]): line for unknown, line in found}
    text = "" if isinstance(error, (TypeError, AttributeError, LookupError)) else str(error)
    text = re.sub(r"\s*(See )?https?://\S+|.* is not a valid \w+$", "", text.partition("\n")[0]).strip(" .")
    if not last:
        return {(): f"DeepSpeed refuses it: {text or type(error).__name__}"}
    value = at(given, last)
    text = text.replace(repr(value), shown(value)).replace(f"Got: {value}", f"Got: {shown(value)}")
    why = f"refused by DeepSpeed: {text}" if text else "of a type that DeepSpeed cannot use"
    return {last: f'"{".".join(last)}": {shown(value)} is {why}'}


def _model_named(name: str) -> Any:
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    models = [DeepSpeedConfigModel]
    for model in models:
        models += model.__subclasses__()
    return next(model for model in models if model.__name__ == name)


def _check_batch(config: Any, configure: Callable[[], None], world_size: float | None) -> None:
    """Let DeepSpeed complete the batch sizes; without a number of ranks this checks nothing."""
    if world_size is None and config.train_micro_batch_size_per_gpu is not None:
        config.train_batch_size = None
    given = {name: getattr(config, name) for name in _BATCH_SIZES if getattr(config, name) is not None}
    if not given.keys() & set(_BATCH_SIZES[:2]):
        raise ConfigError('"train_micro_batch_size_per_gpu" is missing; give it, or "train_batch_size"')
    try:
        configure()
    except AssertionError:
        sizes = " and ".join(f'"{name}": {value}' for name, value in given.items())
        ranks = "any number of" if world_size is None else f"{world_size:g}"
        raise ConfigError(
            f'{sizes} cannot be on {ranks} ranks: "train_batch_size" is "train_micro_batch_size_per_gpu" x '
            '"gradient_accumulation_steps" x ranks; change one, or leave one out'
        ) from None


# -- values -----------------------------------------------------------------------------------------------------------


def _not_allowed(path: Keys, value: Any, words: str) -> str:
    quoted = isinstance(value, str) and (_is_number(value) or value.lower() in ("true", "false"))
    return f'"{".".join(path)}": {shown(value)} is not allowed; it takes {words}{", without quotes" * quoted}'


def _unfit(value: Any, default: Any, key: str = "") -> str:
    """Say in words which values a key takes instead of this one; empty if the value fits, or if that is not known."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
    if key in _BATCH_SIZES:
        fits, words = value is None or (type(value) is int and value >= 1), "a whole number at least 1"
    elif key == "steps_per_print":
        fits, words = value is None or (number and value > 0), "a number above 0, or null"
    elif isinstance(default, bool):
        fits, words = value is None or value in (0, 1) or isinstance(value, Mapping), "true or false"
    elif isinstance(default, (int, float)):
        fits, words = number and (value >= 0 or default < 0), "a number at least 0" if default >= 0 else "a number"
    elif isinstance(default, tuple):
        fits = isinstance(value, (list, tuple)) and len(value) == len(default)
        words = f"a list of {len(default)} numbers"
    elif isinstance(default, dict):
        fits, words = isinstance(value, Mapping), "an object, {...}"
    else:
        return ""
    return "" if fits else words


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _numbers_as_text(given: Mapping[str, Any], path: Keys = ()) -> dict[Keys, str]:
    """Find text that pydantic would silently read as a number or a truth value, and other code as text."""
    found = {}
    for key, value in given.items():
        if isinstance(value, Mapping):
            found |= _numbers_as_text(value, (*path, key)) if path or key not in _FREE_TEXT else {}
        elif type(value) is str and path and value.lower() in ("true", "false"):
            found[(*path, key)] = _not_allowed((*path, key), value, "true or false")
        elif type(value) is str and path and _is_number(value):
            found[(*path, key)] = _not_allowed((*path, key), value, "a number")
    return found


def _no_objects(given: Mapping[str, Any]) -> dict[Keys, str]:
    """Find values that DeepSpeed uses as objects although they are none: Python's error for them would name no key."""
    found: dict[Keys, str] = {}
    for key in sorted(_OBJECTS & given.keys()):
        value, example = given[key], _OBJECTS_LIKE.get(key, "{...}")
        params = value.get("params") if isinstance(value, Mapping) and key in MADE else None
        if not isinstance(value, Mapping):
            found[key,] = _not_allowed((key,), value, f"an object, for example {example}")
        elif key in MADE and not isinstance(value.get("type") or "", str):
            found[key, "type"] = _not_allowed((key, "type"), value["type"], "a name")
        elif params is not None and not isinstance(params, Mapping):
            found[key, "params"] = _not_allowed((key, "params"), params, f"an object, as in {example}")
    return found


# -- what an engine makes ---------------------------------------------------------------------------------------------

# The optimizers that ZeRO takes without being asked to (deepspeed/runtime/zero/utils.py), and those it never takes.
_TESTED = frozenset({"adam", "adamw", "adagrad", "lion", "muon"})
_ONE_BIT = frozenset({"onebitadam", "onebitlamb", "zerooneadam"})


def _section_of(ds_config: Mapping[str, Any], name: str) -> tuple[str, Mapping[str, Any]]:
    """Return (type, params) of an optimizer or a scheduler."""
    kind, params = at(ds_config, (name, "type")), at(ds_config, (name, "params"))
    return kind if isinstance(kind, str) else "", params if isinstance(params, Mapping) else {}


def _of_engine(ds_config: Mapping[str, Any], made: Collection[str], whole: bool) -> Iterator[str]:
    """Yield what an engine refuses when it is made; `whole`: tensors have owners."""
    yield from _of_stage(ds_config)
    if "optimizer" in made:
        yield from _of_optimizer(ds_config, whole)
    if "scheduler" in made:
        yield from _of_scheduler(ds_config)


def _of_states(ds_config: Mapping[str, Any], config: PluginConfig) -> Iterator[str]:
    """Yield what low-precision states refuse about the optimizer that an engine makes."""
    kind, params = _section_of(ds_config, "optimizer")
    if not kind or not config.stores_states_in_low_precision:
        return
    from zeropp_fp8.optim import UPDATES

    update = {name.lower(): each for name, each in UPDATES.items()}.get(kind.lower())
    if update is not None:
        yield from update.refusals(params)
        return
    yield (
        f'"{SECTION}.optimizer": states in low precision are those of {", ".join(UPDATES)}, but "optimizer.type" is '
        f'{shown(kind)}: use "AdamW" with "torch_adam": true, or set the formats to fp32'
    )


def _is_muon_with_reduce_scatter(ds_config: Mapping[str, Any]) -> bool:
    """Whether the optimizer is a Muon that DeepSpeed itself would not run."""
    is_muon = _section_of(ds_config, "optimizer")[0].lower() == "muon"
    return is_muon and at(ds_config, ("zero_optimization", "reduce_scatter")) is not False


def _of_optimizer(ds_config: Mapping[str, Any], whole: bool) -> Iterator[str]:
    """Yield an engine's faults with the optimizer that it makes itself, with the remedy."""
    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    kind, params = _section_of(ds_config, "optimizer")
    name = kind.lower()
    if not kind:
        return
    if name in _ONE_BIT:
        yield f'"optimizer.type" {shown(kind)} does not go with ZeRO; use another one'
        return
    if name not in DEEPSPEED_OPTIMIZERS and not isinstance(getattr(torch.optim, kind, None), type):
        of_torch = [each for each in dir(torch.optim) if each[0].isupper()]
        near = nearest(kind, [*of_torch, *DEEPSPEED_OPTIMIZERS], 0.7)
        yield f'"optimizer.type": neither DeepSpeed nor torch.optim has {shown(kind)}{near}'
        return
    if name == "muon" and whole:
        from zeropp_fp8.plugin.muon import refusals

        yield from refusals(params)
    elif _is_muon_with_reduce_scatter(ds_config):
        yield (
            '"optimizer.type" "Muon" does not go with reduce-scatter; set '
            f'"{SECTION}.partition" to "whole_tensor", or "zero_optimization.reduce_scatter" to false'
        )
    elif name not in _TESTED and not ds_config.get("zero_allow_untested_optimizer"):
        remedy = 'to use it set "zero_allow_untested_optimizer" to true'
        yield f'"optimizer.type" {shown(kind)} is untested with ZeRO; {remedy}'
    if "max_grad_norm" in params:  # the engine refuses it, though FusedLamb has it
        yield '"optimizer.params.max_grad_norm" is refused of every optimizer; set "gradient_clipping" instead'
        params = {key: value for key, value in params.items() if key != "max_grad_norm"}
    # Torch's own optimizers check the values; others, which are built for a device, give them the same meaning.
    own = getattr(torch.optim, {"adagrad": "Adagrad"}.get(name, kind), torch.optim.AdamW)
    own = torch.optim.AdamW if name in ("adam", "lamb", "lion") or not isinstance(own, type) else own
    parameter = torch.nn.Parameter(torch.empty(1, 1, device="meta"))  # Muon takes no vectors
    yield from _of_params("optimizer", kind, params, _optimizers(kind, params), own, [parameter])


def _optimizers(kind: str, params: Mapping[str, Any]) -> list[Callable]:
    """List what DeepSpeedEngine._configure_basic_optimizer may make of a type; device and offloading decide which.

    The list is empty if this cannot be known: for Muon, whose import compiles, and for optimizers of the package mup.
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
        return [*(of_torch if params.get("torch_adam") else [FusedAdam, DeepSpeedCPUAdam]), _adam_switches]
    own = {
        "adagrad": [torch.optim.Adagrad, DeepSpeedCPUAdagrad],
        "lamb": [FusedLamb],
        "lion": [FusedLion, DeepSpeedCPULion],
    }
    return own.get(name, [])


def _adam_switches(params, torch_adam=False, adam_w_mode=True, fp32_optimizer_states=None) -> None:
    """Take the parameters that an engine removes from those of Adam and AdamW before it makes them."""


def _of_scheduler(ds_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield an engine's faults with the scheduler that it makes itself, with the remedy.

    A scheduler of torch.optim.lr_scheduler, which DeepSpeed takes too, refuses ZeRO's optimizer, which is not torch's.
    """
    import torch
    from deepspeed.runtime import lr_schedules

    kind, params = _section_of(ds_config, "scheduler")
    if not kind:
        return
    made, known = getattr(lr_schedules, kind, None), lr_schedules.VALID_LR_SCHEDULES
    if made is None:
        yield (
            f'"scheduler.type" {shown(kind)} does not go with ZeRO{nearest(kind, known, 0.7)}, which takes '
            f'{", ".join(known)}; use one of them, or give deepspeed.initialize an "lr_scheduler"'
        )
    elif ds_config["scheduler"].get("params") is None:
        yield f'"scheduler.params" is missing; add an object, as in {_OBJECTS_LIKE["scheduler"]}'
    else:
        parameter = torch.nn.Parameter(torch.empty(1, device="meta"))
        yield from _of_params("scheduler", kind, params, [made], made, torch.optim.AdamW([parameter]))


def _of_stage(ds_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the faults that ZeRO-3 finds when an engine makes it, with the remedy."""
    zero = ds_config.get("zero_optimization")
    if not isinstance(zero, Mapping) or zero.get("stage") != 3:
        return
    for key, off in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
        if zero.get("reduce_scatter", True) and ds_config.get(key, off) != off:
            remedy = 'remove it, or set "zero_optimization.reduce_scatter" to false'
            yield f'"{key}" does not go with reduce-scatter; {remedy}'
    device = "cpu" if zero.get("cpu_offload") else at(zero, ("offload_optimizer", "device")) or "none"
    for dtype in ("fp16", "bf16"):
        key = f"{dtype}_master_weights_and_grads"
        others = device != "none" or at(ds_config, (dtype, "bf16_optimizer_states"))
        if at(ds_config, (dtype, key)) and not others:
            yield f'"{dtype}.{key}" needs "zero_optimization.offload_optimizer"; offload to "cpu", or remove the key'


def _of_params(
    owner: str, kind: str, params: Mapping[str, Any], made: list[Callable], judge: Callable, first: Any
) -> Iterator[str]:
    """Yield what is wrong with the parameters of an object that is one of `made`; if `made` is empty, it is not known.

    `judge`, a constructor, checks the values that it knows; the engine supplies `first`.
    """
    signatures = [list(inspect.signature(each).parameters.values())[1:] for each in [*made, judge]]
    known = {one.name: one.default for each in reversed(signatures) for one in each}
    own, judged = {one.name for each in signatures[:-1] for one in each}, {}
    for key, value in params.items():
        path = (owner, "params", key)
        if made and key not in own:
            yield f'"{".".join(path)}"{nearest(key, own, 0.6)} is no parameter of "{owner}.type"; rename or remove it'
        elif isinstance(value, str) and value == "auto":
            continue
        elif words := _unfit(value, known.get(key)) or (isinstance(value, str) and _is_number(value) and "a number"):
            yield _not_allowed(path, value, words)
        elif key in {one.name for one in signatures[-1]}:
            judged[key] = value
    needed = [{one.name for one in each if one.default is one.empty} for each in signatures[:-1]]
    missing = set.intersection(*needed[:1], *needed) - params.keys() if needed else set()
    if missing:
        names = ", ".join(f'"{owner}.params.{name}"' for name in sorted(missing))
        yield f'"{owner}.type" "{kind}" needs {names}; add what is missing'
    stand_in = dict.fromkeys((one.name for one in signatures[-1] if one.default is one.empty), 1)
    for key, error in _refused_alone(lambda given: judge(first, **{**stand_in, **given}), judged):
        why = f": {error}" if isinstance(error, (ValueError, RuntimeError)) else ", of a type that it cannot use"
        yield f'"{owner}.params.{key}": {shown(judged[key])} is refused by {kind}{why}'


def _refused_alone(make: Callable[[dict[str, Any]], Any], params: Mapping[str, Any]) -> Iterator[tuple[str, Exception]]:
    """Yield (name, error) for each parameter that makes construction fail whatever the others are."""
    taken: dict[str, Any] = {}
    left, tried = dict(params), len(params) + 1
    errors: dict[str, Exception] = {}
    while len(left) < tried:
        tried, errors = len(left), {}
        for key, value in left.items():
            try:
                make({**taken, key: value})
                taken[key] = value
            except Exception as error:  # any error of a constructor is its answer
                errors[key] = error
        left = {key: left[key] for key in errors}
    yield from errors.items()
