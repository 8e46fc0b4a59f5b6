"""The frozen store in models and settings of all kinds, on any number of ranks: as weights rounded beforehand."""

import frozen_setting_jobs as jobs
import pytest
from frozen_jobs import frozen
from frozen_models import LINEAR, ON_CPU
from ranks import run_ranks

NAMED = [n for n in LINEAR if "q_proj" in n or "layers.1.mlp" in n]
ODD = [f"body.layers.{i}.weight" for i in range(3)]
CONV = [
    f"transformer.h.{i}.{n}.weight" for i in (0, 1) for n in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
]
INT4, INT8 = frozen("int4"), frozen("int8")
LAYER_0 = [n for n in LINEAR if ".layers.0." in n]
SETTINGS = {  # keyword arguments of the job, and what is stored
    "odd shapes": ({"model": "odd", "fields": frozen("int4", block_size=32)}, ODD),
    "odd shapes, double": ({"model": "odd", "fields": frozen("nf4", block_size=64, double_quantize=True)}, ODD),
    "odd shapes under zero.Init": (
        {"model": "odd", "fields": {**INT8, "skip_modules": ["head"]}, "zero_init": True},
        ODD,
    ),
    "Conv1D": ({"model": "gpt2", "fields": INT8}, CONV),
    "Conv1D under zero.Init": ({"model": "gpt2", "fields": frozen("mxfp8_e4m3"), "zero_init": True}, CONV),
    "Conv1D, one scale": ({"model": "gpt2", "fields": frozen("fp8_e4m3", scales="tensor"), "zero_init": True}, CONV),
    "odd shapes, one scale": ({"model": "odd", "fields": frozen("fp8_e4m3", scales="tensor")}, ODD),
    "tied, with biases": ({"model": "tied", "fields": INT4, "zero_init": True}, LINEAR),
    "tied, nothing skipped": ({"model": "tied", "fields": {**INT4, "skip_modules": []}}, LINEAR),
    "nothing skipped": ({"fields": {**INT4, "skip_modules": []}, "zero_init": True}, ["lm_head.weight", *LINEAR]),
    "reentrant": ({"fields": INT8, "checkpointing": "reentrant"}, LINEAR),
    "non-reentrant": ({"fields": INT8, "checkpointing": "non-reentrant", "secondary": {"scope": "rank"}}, LINEAR),
    "by module": ({"fields": INT4, "gather_granularity": "module", "zero_init": True}, LINEAR),
    "by parameter": ({"fields": INT4, "gather_granularity": "parameter"}, LINEAR),
    "on the host": ({"fields": INT4, "overrides": ON_CPU, "zero_init": True}, LINEAR),
    "named": ({"fields": {**INT4, "modules": ["q_proj", "layers.1.mlp.*"]}, "zero_init": True}, NAMED),
    "named, after": ({"fields": {**INT4, "modules": ["q_proj", "layers.1.mlp.*"]}}, NAMED),
    "frozen by then": ({"fields": {**INT4, "modules": "frozen"}, "zero_init": True}, LINEAR),
    "a layer skipped": ({"fields": {**INT4, "skip_modules": ["layers.1", "lm_head"]}, "zero_init": True}, LAYER_0),
    "a layer skipped, after": ({"fields": {**INT4, "skip_modules": ["layers.1", "lm_head"]}}, LAYER_0),
}


def check_settings(names, world):
    cases = {name: SETTINGS[name][0] for name in names}
    for log in run_ranks(jobs.all_against_rounded, world=world, ranks_per_node=1, cases=cases):
        for name in names:
            assert log[name]["stored"] == sorted(SETTINGS[name][1]), name
            assert log[name]["equal"], (name, log[name]["losses"])


def test_models_and_settings():
    check_settings(SETTINGS, world=2)


@pytest.mark.parametrize("world", [1, 3, 6])
def test_models_on_other_numbers_of_ranks(world):
    """With six ranks there are more of them than granules in most of the odd layers."""
    check_settings(["odd shapes under zero.Init", "odd shapes, double", "Conv1D under zero.Init"], world)
