"""Jobs that count what a training step calls in Python."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from models import llama, section
from running import Spec, run, step, within

import zeropp_fp8

_ZERO = Path(zeropp_fp8.__file__).parent / "zero"
_SHARDED = _ZERO.with_name("sharded.py")
_DEEPSPEED = Path(deepspeed.__file__).parent
NOTHING_STAYS = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "reduce_bucket_size": 10**8,
    "stage3_prefetch_bucket_size": 10**8,
}


def _calls(layers: int, recipe: str, folders: Sequence[Path] = (_ZERO, _SHARDED, _DEEPSPEED), **more) -> Counter:
    """Functions of some folders (none: all) that one step calls, after some that have learned its order."""
    config = {"zero_optimization": NOTHING_STAYS}
    spec = Spec(section(recipe, **more), "bf16", config, functools.partial(llama, layers))
    tokens = torch.randint(0, 64, (1, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    found: Counter = Counter()

    def count(frame, event, _) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and (not folders or any(map(path.is_relative_to, folders))):
            found[f"{path.stem}.{frame.f_code.co_name}"] += 1

    @contextlib.contextmanager
    def profiled(engine):
        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(None)

    run(spec, [step, step, step, step, within(profiled, step)], data=itertools.repeat(tokens))
    return found


def of_a_block(recipes: list[str]) -> dict[str, tuple[float, dict[str, float]]]:
    """By recipe: calls that one more block costs, and which they are."""
    found = {}
    for recipe in recipes:
        whole = {"weights": {"difference": "none"}} if recipe.endswith("-whole") else {}
        few, many = (_calls(layers, recipe.removesuffix("-whole"), **whole) for layers in (2, 6))
        each = {name: (count - few[name]) / 4 for name, count in many.items() if count != few[name]}
        found[recipe] = sum(each.values()), each
    return found


def of_numerics(recipes: list[str]) -> dict[str, tuple[int, Counter]]:
    """By recipe: all calls of a step, and those that it has more with a section `numerics`, after a sampled one."""
    found = {}
    for recipe in recipes:
        without = _calls(4, recipe, folders=())
        beside = _calls(4, recipe, folders=(), numerics={"every": 4, "file": os.devnull})
        found[recipe] = without.total(), beside - without
    return found
