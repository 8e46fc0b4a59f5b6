"""Keys that DeepSpeed 0.19 has and 0.18 has not: managed_gradient_accumulation, data_types.keep_in_fp32_modules."""

import late_key_jobs as jobs
import pytest
import torch
from deepspeed.runtime import engine
from ranks import run_two, run_two_once
from running import differing
from thinning import thinned

unmanaged = pytest.mark.skipif(
    not hasattr(engine.DeepSpeedEngine, "managed_gradient_accumulation"), reason="this DeepSpeed manages the boundary"
)
keeps_buffers = pytest.mark.skipif(
    not hasattr(engine, "keep_in_fp32_pattern"), reason="this DeepSpeed keeps no buffer in fp32"
)
WINDOWS = [1, 3, 2, 1]
STORED_IN_BLOCKS = {"gradients": {"store_format": "fp8_e4m3", "scales": "block"}}


def stock_of(**options):
    return run_two_once(jobs.accumulate, recipe=None, managed=False, dtype="bf16", **options)


@unmanaged
@pytest.mark.parametrize("granularity, offload", thinned(["module", "block"], [False, True]))
def test_the_user_decides_when_to_step(granularity, offload):
    """`lossless`, bit for bit as stock: only step() tells that a window of backward passes is over."""
    run = {"windows": WINDOWS, "managed": False, "offload": offload}
    stock = {"recipe": None, "leaf": granularity == "block", **run}
    mine = {"recipe": "lossless", "fields": {"gather_granularity": granularity}, **run}
    for exact, plugin in run_two(jobs.accumulate_several, runs=[stock, mine]):
        assert differing(plugin, exact) == {}


@unmanaged
@pytest.mark.parametrize(
    "recipe, windows, fields, offload",
    [
        ("zeropp", WINDOWS, {}, False),
        ("zeropp", WINDOWS, {}, True),
        ("zeropp-4bit", WINDOWS, {"gradients": {"error_feedback": True}}, False),
        ("mxfp8", WINDOWS, {}, False),
        ("zeropp", WINDOWS, {"partition": "whole_tensor"}, False),
        ("fp8-lm-o1", [2, 3, 2], {}, False),
        ("fp8-lm", [2, 3, 2], {}, False),
        ("zeropp", [2, 3, 2], STORED_IN_BLOCKS, False),
    ],
    ids=["zeropp", "offloaded", "4 bits", "mxfp8", "owners", "fp8-lm-o1", "fp8-lm", "stored in blocks"],
)
def test_it_is_the_same_as_telling_before(recipe, windows, fields, offload):
    """As with set_gradient_accumulation_boundary before each pass, bit for bit, and near stock."""
    run = {"windows": windows, "recipe": recipe, "fields": fields, "dtype": "bf16", "offload": offload}
    runs = [{**run, "managed": True}, {**run, "managed": False}]
    stock = stock_of(windows=windows, offload=offload)
    for (told, plugin), exact in zip(run_two(jobs.accumulate_several, runs=runs), stock):
        assert differing(plugin, told) == {}
        assert plugin.losses == pytest.approx(exact.losses, rel=0.01)


@unmanaged
@pytest.mark.parametrize("recipe, fields", [("fp8-lm", {}), ("zeropp", STORED_IN_BLOCKS)])
def test_a_gradient_store_that_is_not_told(recipe, fields):
    """A lone backward pass counts as one of several: its gradient becomes FP8 when the step begins, not before."""
    run = {"windows": [1] * 6, "managed": False, "dtype": "bf16"}
    stock = stock_of(windows=run["windows"])
    for plugin, exact in zip(run_two(jobs.accumulate, recipe=recipe, fields=fields, **run), stock):
        assert plugin.losses == pytest.approx(exact.losses, rel=0.01)
        assert plugin.losses[-1] < plugin.losses[0]


@keeps_buffers
@pytest.mark.parametrize("recipe, zero_init", thinned(["lossless", "fp8-lm", "zeropp", "qlora"], [False, True]))
def test_buffers_that_stay_fp32(recipe, zero_init, tmp_path):
    """Dtypes and values of buffers are stock's, named for fp32 or not, from the start and from a checkpoint."""
    fields = {"lossless": {"gather_granularity": "module"}, "qlora": {"frozen": {"modules": "frozen"}}}.get(recipe, {})
    options = {"recipe": recipe, "fields": fields, "dtype": "bf16", "zero_init": zero_init, "folder": str(tmp_path)}
    stock = run_two(jobs.named_buffers, plugin=False, **options)
    for (losses, buffers), (exact, expected) in zip(run_two(jobs.named_buffers, plugin=True, **options), stock):
        assert buffers == expected
        assert all(b["correction_bias"] == (torch.float32, (10 + torch.arange(64) / 1000).tolist()) for b in buffers)
        assert losses == pytest.approx(exact, rel=0.0 if recipe == "lossless" else 0.02, abs=0.0)
