"""engine.allreduce_gradients() again after engine.backward() changes nothing, whoever sets the boundary."""

import pytest
import repeated_reduction_jobs as jobs
import torch
from ranks import run_ranks

OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
MODULE = {"gather_granularity": "module"}
ERROR_FEEDBACK = {"gradients": {"error_feedback": True}}
SLICES = {"partition": "slice", "weights": {"format": "none"}}
BLOCK_SCALES = {"gradients": {"scales": "block", "block_size": 128}, "optimizer": {"scales": "block"}}


def assert_same(run, expected):
    assert run["losses"] == expected["losses"] and run["steps"] == expected["steps"]
    for kind in ("weights", "fp32 weights"):
        assert run[kind].keys() == expected[kind].keys()
        for name, weight in expected[kind].items():
            assert torch.equal(run[kind][name], weight), (kind, name)


@pytest.mark.parametrize("fields", [None, MODULE], ids=["block", "module"])
@pytest.mark.parametrize("options", [{}, OFFLOAD], ids=["", "offload"])
def test_lossless_is_stock_with_repeated_reductions(fields, options):
    styles = [*jobs.STYLES] if jobs.has_styles() else ["managed", "set boundary"]
    if options:
        styles = styles[:3]
    found = run_ranks(jobs.with_and_without, recipe="lossless", fields=fields, styles=styles, beside_stock=True, **options)[0]
    for style in styles:
        for when in ("never", "boundary", "always"):
            assert_same(found[style, when], found[style, when, "stock"])
            assert_same(found[style, when], found[style, "never"])
        assert len(set(found[style, "never"]["losses"])) == 3, "nothing was trained"


@pytest.mark.parametrize(
    "recipe, fields, options",
    [
        ("zeropp", ERROR_FEEDBACK, {}),
        ("zeropp", {"gradients": {"rounding": "stochastic"}, **MODULE}, {}),
        ("zeropp", {"partition": "whole_tensor"}, {"accumulation": 1}),
        ("zeropp", None, OFFLOAD),
        ("fp8-lm-o2", None, {"dtype": "bf16"}),
        ("fp8-lm", None, {"dtype": "bf16"}),
        ("fp8-lm", {**SLICES, **BLOCK_SCALES}, {"dtype": "bf16"}),
        ("mxfp8", None, {"accumulation": 1}),
        ("qlora", None, {"lora": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_quantized_reductions_are_not_repeated(recipe, fields, options):
    """Bit for bit the run without the calls: no zeros sent, nothing added twice, nothing drawn or fed back."""
    styles = ["managed", "unmanaged"] if jobs.has_styles() and options != OFFLOAD else ["managed"]
    found = run_ranks(jobs.with_and_without, recipe=recipe, fields=fields, styles=styles, **options)[0]
    for style in styles:
        for when in ("boundary", "always"):
            assert_same(found[style, when], found[style, "never"])
        assert len(set(found[style, "never"]["losses"])) == 3, "nothing was trained"
