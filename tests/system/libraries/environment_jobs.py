"""Jobs with ZEROPP_FP8_RECIPE set that run on ranks."""

from __future__ import annotations

import copy

from models import build, ds_config, full_weights, llama, make_engine, train
from ranks import printed

import zeropp_fp8


def recipe_of_environment(stage=3, section=None, zero_init=False):
    """Return the recipe of an engine whose ds_config has this section or none, and what it leaves of the ds_config."""
    zeropp_fp8.enable()
    config = ds_config(section, zero_optimization={"stage": stage})
    before = copy.deepcopy(config)
    engine = make_engine(build(llama, config, zero_init), config)
    session = getattr(engine, "zeropp_fp8_session", None)  # none in stock's
    losses = train(engine, 2)
    return {
        "recipe": None if session is None else session.config.recipe,
        "untouched": config == before and "zeropp_fp8" not in engine.config,
        "losses": losses,
        "weights": {name: value.tolist() for name, value in full_weights(engine.module).items() if value.ndim == 1},
        "printed": printed(),
    }
