"""hpZ, qgZ inside ZeRO-3, accuracy, checkpoints, refusals and what is printed."""

import functools
import re
import statistics

import deepspeed
import pytest
import torch
import zero_jobs as jobs
from packaging.version import Version
from ranks import run_ranks, run_two
from thinning import thinned

import zeropp_fp8
from zeropp_fp8.config.sections import FrozenConfig, PluginConfig
from zeropp_fp8.zero.stage_part import idle_pattern_rows


@pytest.mark.parametrize("scope, world, ranks_per_node", [("node", 4, 2), ("rank", 4, 2), ("none", 4, 2), (2, 8, 4)])
def test_secondary_shards(scope, world, ranks_per_node):
    """The forward fills the node's copy; until the weights change nothing crosses the network again."""
    log = run_ranks(
        jobs.secondary_shards, world=world, ranks_per_node=ranks_per_node, scope=scope, node_size=ranks_per_node
    )[0]
    assert log["exact"] and log["write is seen"]
    assert log["first evaluation"] > 0 and log["after step"] == log["first evaluation"]
    again = ("second evaluation", "training forward", "second micro-batch", "generation")
    if scope == "none":
        assert all(log[key] > 0 for key in again) and log["held"] == 0
    else:
        assert not any(log[key] for key in again), log
        assert log["held after step"] == 0
        copies_per_model = {"node": ranks_per_node, "rank": 1}.get(scope, scope)
        # int8 codes and scales of the 124,224 parameters of models.llama(), shared by that many ranks
        assert log["held"] == pytest.approx(124224 / copies_per_model, rel=0.05)


def test_persistent_parameters_stay_exact():
    lossy, sent = run_ranks(jobs.persistent_parameters_stay_exact)[0]
    assert lossy > 0, "the case did not occur"
    assert sent["weights_backward"]["inter"] == 0


def test_several_inits_with_hpz():
    """Four models; the same seed gives the same loss; stock code never saw the keys (it would need nvcc)."""
    (a, b, c, d), text = run_ranks(jobs.several_inits_with_hpz)[0]
    assert (a, b) == (c, d) and a != b
    assert text.count("zeropp_fp8: recipe none (lossless plus the ZeRO++ keys)") == 4


def test_quantized_nontrainable_weights():
    losses, formats, at_rest, trainable, text = run_two(jobs.quantized_nontrainable_weights)[0]
    for name, wire_format in formats.items():
        stored = "_proj" in name and not trainable[name]
        assert wire_format.startswith("int8" if stored else "float32"), name
        assert at_rest[name] == (torch.uint8 if stored else torch.float32), name
    assert any(trainable.values()) and losses[1] == losses[1]
    assert re.search(r"frozen store +int8 \(block 256\) +\d+  7 tensors, stored in 1\.0\d+ bytes per param", text)


def test_data_parallel_group_is_not_the_world():
    results = run_ranks(jobs.data_parallel_group_is_not_the_world)
    for rank, (first, last, reduced) in enumerate(results):
        assert (first, last) == pytest.approx((rank % 2, rank % 2 + 2), rel=0.01)
        assert reduced == pytest.approx([rank % 2 + 1.0], rel=0.01)


@pytest.mark.parametrize("formats, dtype", thinned(jobs.FORMATS, ["fp32", "bf16", "fp16"]))
def test_reduced_gradient_of_one_batch(formats, dtype):
    """128 sequences; limits from the in-tree qgZ's failure."""
    cosine, norm = run_ranks(jobs.reduced_gradient, dtype=dtype, formats=formats)[0]
    _, least, off = jobs.FORMATS[formats]
    assert cosine >= least and abs(norm - 1) <= off, f"cosine {cosine}, norm {norm} of stock's"


def test_overflow_on_one_rank_skips_the_step_on_all():
    for overflow, unchanged, kept, dropped, losses, skipped in run_ranks(jobs.overflow_is_seen):
        assert unchanged and kept > 0 and dropped == 0
        assert skipped == 1 and not overflow and all(loss == loss for loss in losses)


# By recipe: seeds, and limits of the loss and of the bytes between nodes, beside stock's.
HELD_OUT = {
    "zeropp": (range(2), 0.007, 0.19),
    "zeropp-4bit": (range(3), 0.02, 0.13),
    "zeropp-exact": (range(2), 0.007, 0.25),  # at 2e-3 about 6 bits of a weight change
}


@functools.cache
def held_out_of_stock(dtype, seeds):
    runs = [(None, seed) for seed in seeds]
    return run_ranks(jobs.held_out_losses, world=1, ranks_per_node=1, dtype=dtype, runs=runs, ranks=4)[0]


@pytest.mark.parametrize(
    "recipe, dtype",
    [case for case in thinned(HELD_OUT, ["fp32", "bf16"]) if case[0] != "zeropp-exact"] + [("zeropp-exact", "bf16")],
)
def test_held_out_loss_and_bytes(recipe, dtype):
    """zeropp within 0.7 % of stock, zeropp-4bit within 2 %; bytes between nodes 0.19 x and 0.13 x.

    Means over seeds; five seeds differ from stock by 0.34 +- 0.07 % and 0.7 +- 0.5 % (standard deviation), so 4 bits
    need more of them. Stock runs on one rank with the batches of all four: the losses are those of four ranks to 4
    decimals, in a tenth of the time.
    """
    seeds, limit, limit_of_bytes = HELD_OUT[recipe]
    stock, own = ([(name, seed) for seed in seeds] for name in (None, recipe))
    results = held_out_of_stock(dtype, seeds) | run_ranks(jobs.held_out_losses, dtype=dtype, runs=own, ranks=4)[0]
    print(dtype, {run: loss for run, loss in results.items() if "report" not in run})
    stock, own = (statistics.mean(results[run] for run in runs) for runs in (stock, own))
    assert stock < 3.6, "little was learned"
    assert abs(own / stock - 1) <= limit
    report = results[(recipe, "report")]
    inter = sum(kind["inter"] for kind in report["per_step"].values())
    stock_inter = sum(kind["inter"] for kind in report["stock_per_step"].values())
    assert report["per_step"]["weights_backward"]["inter"] == 0
    assert inter <= limit_of_bytes * stock_inter, inter / stock_inter


@pytest.mark.parametrize(
    "recipe, fields",
    [
        ("zeropp", {}),
        ("zeropp-4bit", {}),
        ("mxfp8", {}),
        ("lossless", {}),
        ("zeropp", {"secondary": {"scope": "none"}}),
    ],
)
def test_what_lies_beyond_the_end_of_a_parameter_is_not_sent(recipe, fields):
    """A shard of the last rank ends in memory that nobody has written; its block's scale must not come from there."""
    results = run_ranks(jobs.padding_of_shards, world=3, ranks_per_node=1, recipe=recipe, fields=fields)
    assert results[-1][2] > 0, "a tensor that 3 ranks do not divide"
    for loss, with_nan, _ in results:
        assert with_nan == loss


def test_a_part_of_the_model_that_is_called_by_itself():
    """As `generate` of a reference engine does: its order is learned, and does not grow from call to call."""
    few, many = run_ranks(jobs.a_part_called_by_itself, world=2, numbers_of_calls=(3, 20))[0]
    assert few == many and many[1] >= 3


FED_BACK = {"gradients": {"error_feedback": True}}


@pytest.mark.parametrize(
    "recipe, fields, dtype",
    [
        ("lossless", {"gather_granularity": "module"}, "fp32"),
        ("zeropp", None, "bf16"),
        ("zeropp-4bit", FED_BACK, "bf16"),
        ("zeropp-pcie", {"secondary": {"memory_gb": 7e-5}}, "bf16"),
        ("zeropp-exact", None, "bf16"),
        ("zeropp-exact", {"partition": "whole_tensor"}, "bf16"),
        ("zeropp-exact", {"secondary": {"scope": "rank"}}, "bf16"),
    ],
)
def test_checkpoints(recipe, fields, dtype):
    """Resume is exact (generators and residuals included); stock reads ours and we read stock's."""
    if "partition" in (fields or {}) and Version(deepspeed.__version__) < Version("0.19.3"):
        pytest.skip("whole tensors need DeepSpeed 0.19.3, and are refused before")
    for result in run_two(jobs.checkpoints, recipe=recipe, fields=fields, dtype=dtype):
        uninterrupted, resumed = result["resume losses"]
        assert resumed == uninterrupted and result["resume weights"]
        uninterrupted, in_stock = result["stock losses"]
        if recipe == "lossless":
            assert in_stock == uninterrupted
        assert in_stock == pytest.approx(uninterrupted, rel=1e-2 if recipe in ("zeropp-4bit", "zeropp-pcie") else 5e-3)
        assert result["stock to own"] and result["consolidated"] and result["zero_to_fp32"]


@pytest.mark.parametrize("evaluates, persistent", [(True, 0), (False, 5000)])
def test_what_was_drawn_for_the_weights_that_are_saved(evaluates, persistent):
    """By an evaluation, or a step, which gathers small matrices at its end: resumed training does not draw it again."""
    settings = {"recipe": "zeropp", "fields": FED_BACK, "evaluates": evaluates, "persistent": persistent}
    settings["exchanges"] = False
    for result in run_two(jobs.checkpoints, **settings):
        uninterrupted, resumed = result["resume losses"]
        assert resumed == uninterrupted and result["resume weights"]


def test_load_checkpoint_with_frozen_parameters_and_hpz():
    for expected, before, after in run_two(jobs.load_with_frozen_parameters):
        assert after == expected and before != expected


def test_refusals_reach_every_rank_before_any_collective():
    """Each message names the key and the remedy, and the next case can still be tried: no rank is left waiting."""
    cases = {
        "hpz": ({"secondary": {"scope": 3}}, {}, False),
        "world": ({"ranks_per_node": 3}, {}, False),
        "stage": ({}, {"zero_optimization": {"stage": 2}}, False),
        "nvme": ({}, {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/nvme"}}}, True),
        "hybrid": ({}, {"hybrid_engine": {"enabled": True}}, False),
        "unknown": ({"weights": {"fromat": "int8"}}, {}, True),
        "contradiction": ({}, {"zero_optimization": {"zero_quantized_weights": False}}, True),
    }
    expected = {
        "hpz": ("secondary.scope", "divisor of 2"),
        "world": ("ranks_per_node", "divisor of 4"),
        "stage": ("zero_optimization.stage", "set it to 3"),
        "nvme": ("offload_param.device", "cpu"),
        "hybrid": ("hybrid_engine.enabled", "remove one"),
        "unknown": ("weights.fromat", 'did you mean "format"'),
        "contradiction": ("zero_quantized_weights", "remove one"),
    }
    for messages in run_ranks(jobs.refusals, cases=cases):
        for name, parts in expected.items():
            assert messages[name].startswith("ConfigError: "), (name, messages[name])
            assert all(part in messages[name] for part in parts), messages[name]


def test_start_table_and_progress_line():
    text = run_ranks(jobs.start_table)
    assert "2 node(s) x 2 rank(s), from zeropp_fp8.topology.ranks_per_node" in text[0]
    for part in (
        "int8 (block 256)",
        "norms and biases stay in high precision",
        "int4 (block 128, hadamard)",
        "one copy in 2 rank(s)",
        "2 blocks (LlamaDecoderLayer)",
        "MB a rank sends per step",
        "step 2: a rank sends",
        "zeropp_fp8: stock DeepSpeed",
    ):
        assert part in text[0], part
    assert "zeropp_fp8:" not in text[1], "only rank 0 prints"


def test_the_start_table_says_which_patterns_name_nothing():
    """Misspelt ones; not those of defaults, which many models have no use for."""
    idle = {"weights": ["layrs.1", "lm_head"], "gradients": ["layers.0"], "frozen": ["*embd*", "score"]}
    fields = {name: {"skip_modules": patterns} for name, patterns in idle.items()}
    fields["compute"] = {"format": "fp8", "min_features": 16, "skip_modules": ["lm_head", "layers.7.*", "rout?r"]}
    fields["compute"]["high_precision_gemms"] = {"output": ["layers.0", "o_prj"], "grad_weight": ["layers.0.mlp"]}
    (text, *_) = run_ranks(jobs.start_table, fields=fields)
    said = re.findall(r"(\w+) +as without +(.*) names nothing of this model by (.*)", text)
    assert said == [
        ("weights", "skip_modules", "layrs.1"),
        ("compute", "skip_modules", "layers.7.*, rout?r"),
        ("compute", "high_precision_gemms", "o_prj"),
        ("frozen", "skip_modules", "*embd*"),
    ]
    frozen = FrozenConfig(format="int4", modules=["down_proj", "gate_prj"])
    ((_, _, _, said),) = idle_pattern_rows(PluginConfig(frozen=frozen), {"frozen": ["layers.0.down_proj"]})
    assert said == "modules names nothing of this model by gate_prj"


def test_wire_report_of_a_stock_engine_is_an_error():
    with pytest.raises(ValueError, match=r"enable\(\)"):
        zeropp_fp8.wire_report(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="takes a DeepSpeed engine, its module or a Trainer, not a object"):
        zeropp_fp8.wire_report(object())
