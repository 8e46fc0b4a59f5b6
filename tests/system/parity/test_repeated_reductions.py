"""engine.allreduce_gradients() again after engine.backward() changes nothing, whoever sets the boundary."""

import pytest
import repeated_reduction_jobs as jobs
from ranks import run_two
from running import differing

OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
MODULE = {"gather_granularity": "module"}
ERROR_FEEDBACK = {"gradients": {"error_feedback": True}}
BLOCK_SCALES = {"gradients": {"scales": "block", "block_size": 128}, "optimizer": {"scales": "block"}}
BLOCK_SCALES |= {"partition": "slice", "weights": {"format": "none"}}


def assert_same(run, expected):
    assert differing(run, expected) == {}
    assert run.seen == [2] and len(set(run.losses)) == len(run.losses) and run.weights and run.masters


@pytest.mark.parametrize(
    "style, options", [*((style, {}) for style in jobs.known_styles()), ("managed", OFFLOAD), ("set boundary", OFFLOAD)]
)
def test_lossless_is_stock(style, options):
    stock, lossless = run_two(jobs.beside_stock, style=style, **options)[0]
    assert_same(lossless, stock)


@pytest.mark.parametrize(
    "recipe, fields, options",
    [
        ("zeropp", ERROR_FEEDBACK, {}),
        ("zeropp", MODULE, {}),
        ("zeropp", {"partition": "whole_tensor"}, {"accumulation": 1}),
        ("zeropp", {}, OFFLOAD),
        ("fp8-lm-o2", {}, {"dtype": "bf16"}),
        ("fp8-lm", {}, {"dtype": "bf16", "accumulation": 1}),
        ("fp8-lm", BLOCK_SCALES, {"dtype": "bf16"}),
        ("mxfp8", {}, {"accumulation": 1}),
        ("qlora", {}, {"lora": True}),
    ],
    ids=["error feedback", "modules", "owners", "offload", "o2", "o3", "block scales", "mxfp8", "qlora"],
)
def test_quantized_gradients_stay_as_they_are(recipe, fields, options):
    """Bit for bit the run without the calls: nothing is sent, added, drawn or fed back twice."""
    whens = ["always"] if options.get("accumulation") == 1 else ["boundary", "always"]
    found = run_two(jobs.with_and_without, recipe=recipe, whens=whens, fields=fields, **options)[0]
    for when in whens:
        assert_same(found[when], found["never"])


@pytest.mark.parametrize("style", jobs.known_styles()[1:])
@pytest.mark.parametrize("recipe, dtype", [("zeropp", "fp32"), ("fp8-lm", "bf16")])
def test_whoever_sets_the_boundary(recipe, dtype, style):
    """Also where the store learns of the boundary only in the step, or all gradients come at once."""
    found = run_two(jobs.with_and_without, recipe=recipe, whens=["always"], style=style, dtype=dtype)[0]
    assert_same(found["always"], found["never"])
