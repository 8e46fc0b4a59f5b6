"""Reward functions by name, with TRL's signature: prompts, completions and each column of the rows, as lists.

    def my_reward(prompts, completions, answer, **columns) -> list[float]: ...

returns a number a completion, or None where it has nothing to say of one. Named "module:my_reward" or
"path/file.py:my_reward", any such function serves.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
import numbers
import re
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path

RewardFunction = Callable[..., "list[float | None]"]

# A minus sign after a digit, letter or bracket is an operator: the last number of "7-4" is 4. Commas group thousands.
NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def last_number(text: str) -> Decimal | None:
    """The last decimal number in a text; None if there is none."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def exact_match(prompts: list[str], completions: list[str], answer: list, **columns) -> list[float]:
    """1 where the completion, but for spaces and line ends around it, is the answer."""
    return [float(completion.strip() == str(right).strip()) for completion, right in zip(completions, answer)]


def gsm8k(prompts: list[str], completions: list[str], answer: list, **columns) -> list[float]:
    """1 where the last number of the completion equals the last number of the answer."""
    pairs = [(last_number(completion), last_number(str(right))) for completion, right in zip(completions, answer)]
    return [float(given is not None and given == right) for given, right in pairs]


def format_of_answer(prompts: list[str], completions: list[str], answer: list, **columns) -> list[float]:
    """1 where the completion has the form of the answer: a whole number where that is one, else one word."""
    rewards = []
    for completion, right in zip(completions, answer):
        form = r"-?[0-9]+" if re.fullmatch(r"-?[0-9]+", str(right).strip()) else r"[^\W\d_]+"
        rewards.append(float(re.fullmatch(form, completion) is not None))
    return rewards


VERIFIERS = {"exact_match": exact_match, "gsm8k": gsm8k, "format": format_of_answer}


def reward_function(name: str) -> RewardFunction:
    """The reward function called `name`: one of VERIFIERS, "module:function" or "file.py:function".

    What it returns is checked at each call: one finite number (bool, int, float, or a tensor of them) or None for each
    completion. It gets the columns that it has parameters for, or all of them if it takes **columns.

    Raises:
        ValueError: no such name or function, or (when called) a result that is not what is described above.
        FileNotFoundError, ModuleNotFoundError: the file or module is not there.
    """
    if name in VERIFIERS:
        return checked(name, VERIFIERS[name])
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise ValueError(
            f'reward function {name!r}: give one of {", ".join(VERIFIERS)}, or "module:function" or "file.py:function"'
        )
    module = load_file(Path(place).expanduser().resolve()) if place.endswith(".py") else importlib.import_module(place)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"reward function {name!r}: {place} has no function {attribute!r}")
    return checked(name, function)


@functools.cache
def load_file(path: Path):
    """A Python file as a module, run once a process. Its own folder is not on the search path."""
    if not path.is_file():
        raise FileNotFoundError(f"reward function: no such file: {path}")
    spec = importlib.util.spec_from_file_location(f"reward_function_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # before it runs: dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def needed_columns(function: RewardFunction) -> list[str]:
    """The columns without which the function cannot be called: its parameters that have no default."""
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and parameter.name not in ("prompts", "completions")
    ]


def columns_of(rows: Sequence[dict]) -> dict[str, list]:
    """The further columns of rows of kind "prompt", a list each; None where a row has no such column."""
    names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
    return {name: [row.get(name) for row in rows] for name in names}


def checked(name: str, function: RewardFunction) -> RewardFunction:
    """`function`, given only the columns it takes, and with its result checked."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
    taken = {parameter.name for parameter in parameters}
    if not takes_all and "completions" not in taken:
        raise ValueError(f"reward function {name!r} has no parameter `completions`")

    @functools.wraps(function)
    def call(prompts: list[str], completions: list[str], **columns) -> list[float | None]:
        arguments = {"prompts": prompts, "completions": completions, **columns}
        missing = [column for column in needed_columns(function) if column not in arguments]
        if missing:
            raise ValueError(f"reward function {name!r} needs the columns {', '.join(missing)}, which the rows lack")
        if not takes_all:
            arguments = {key: value for key, value in arguments.items() if key in taken}
        return rewards_from(name, function(**arguments), len(completions))

    return call


def rewards_from(name: str, result, count: int) -> list[float | None]:
    """Return what a reward function returned, as `count` floats or None.

    Raises:
        ValueError: it is not a list of `count` finite numbers or None.
    """
    values = result.tolist() if hasattr(result, "tolist") else result  # a tensor or an array
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"reward function {name!r} returned {type(values).__name__}, not a list of numbers")
    if len(values) != count:
        raise ValueError(f"reward function {name!r} returned {len(values)} rewards for {count} completions")
    rewards: list[float | None] = []
    for index, value in enumerate(values):
        value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
        if value is not None and not (isinstance(value, numbers.Real) and math.isfinite(value)):
            raise ValueError(
                f"reward function {name!r} returned {value!r} for completion {index}; give a finite number, or None "
                "where it has nothing to say"
            )
        rewards.append(None if value is None else float(value))
    return rewards
