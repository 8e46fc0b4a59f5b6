"""Parity with stock ZeRO-3: bit for bit where nothing is quantized, close where it is."""

import deepspeed
import parity_jobs as jobs
import pytest
import torch
from packaging.version import Version
from ranks import run_ranks, run_two
from running import differing
from thinning import thinned

ACCUMULATE_AND_CLIP = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
SMALL_BUCKETS = {
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 9000,
        "overlap_comm": True,
        "stage3_prefetch_bucket_size": 20000,
        "stage3_param_persistence_threshold": 100,
    }
}
PARITY_CASES = {
    "plain": {},
    "zero-init": {"zero_init": True},
    "accumulation, clipping": ACCUMULATE_AND_CLIP,
    "tied weights, zero-init, accumulation": {"tie": True, "zero_init": True, **ACCUMULATE_AND_CLIP},
    "small buckets, prefetch": SMALL_BUCKETS,
}


def assert_same(stock, plugin):
    assert differing(stock, plugin, but=["seen", "bytes"]) == {}
    assert stock.masters and all(weight.dtype == torch.float32 for weight in stock.masters.values())


# Each case in both dtypes and both granularities somewhere; all 20 combinations hold, and take 3 minutes more.
@pytest.mark.parametrize(
    "case, dtype, granularity",
    [
        ("plain", "fp32", "module"),
        ("plain", "bf16", "block"),
        ("zero-init", "fp32", "block"),
        ("zero-init", "bf16", "module"),
        ("accumulation, clipping", "fp32", "module"),
        ("accumulation, clipping", "bf16", "block"),
        ("tied weights, zero-init, accumulation", "fp32", "block"),
        ("tied weights, zero-init, accumulation", "bf16", "module"),
        ("small buckets, prefetch", "fp32", "block"),
    ],
)
def test_lossless_is_stock_bit_for_bit(case, dtype, granularity):
    """`block` is compared with stock whose decoder layers are z3 leaf modules.

    4 steps: the first records the order of modules, the second uses it; a bit that differs in any step stays in the
    optimizer's fp32 weights, in which they end.
    """
    run = run_ranks if case in ("plain", "small buckets, prefetch") else run_two  # others fill the same buckets
    stock, plugin = run(jobs.train_both, granularity=granularity, dtype=dtype, steps=4, **PARITY_CASES[case])[0]
    assert_same(stock, plugin)


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_lossless_is_stock_with_activation_checkpointing(checkpointing):
    stock, plugin = run_two(jobs.train_both, granularity="block", dtype="fp32", steps=4, checkpointing=checkpointing)[0]
    assert_same(stock, plugin)


def test_stock_is_back_after_disable():
    """Stock, then a quantized run, then stock again in one process: the same bits, and every name restored."""
    first, quantized, again, restored = run_two(jobs.stock_plugin_stock)[0]
    assert restored
    assert quantized.losses != first.losses
    assert_same(first, again)


def test_documentation_model_through_both():
    """The linear stack and cross-entropy of DeepSpeed's own tests and documentation, in-tree ZeRO++ keys."""
    stock, lossless, zeropp = run_ranks(jobs.train_mlp)[0]
    assert lossless == stock
    assert zeropp != stock
    assert zeropp == pytest.approx(stock, rel=2e-2)


@pytest.mark.parametrize("world, ranks_per_node", [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3)])
def test_other_worlds(world, ranks_per_node):
    """One rank, one node, one rank per node, odd counts: quantized training stays close to stock."""
    stock, plugin = run_ranks(
        jobs.train_both,
        world=world,
        ranks_per_node=ranks_per_node,
        granularity="block",
        dtype="fp32",
        steps=4,
        recipe="zeropp",
        detect=True,
    )[0]
    assert plugin.losses == pytest.approx(stock.losses, rel=3e-3)


@pytest.fixture(scope="module")
def losses_of_variants():
    return run_two(jobs.train_variants)[0]


@pytest.mark.parametrize("variant", ["reentrant", "non-reentrant", "overlap off", "module", "parameter", "fp16"])
def test_quantized_variants_train_like_the_plain_one(variant, losses_of_variants):
    """qgZ and qwZ with checkpointing of both kinds, overlap_comm off, other gather units, fp16 loss scaling."""
    plain, varied = losses_of_variants["plain"], losses_of_variants[variant]
    assert varied == pytest.approx(plain, rel=2e-3)
    assert varied[-1] < varied[0]


def test_quantized_with_tied_weights_accumulation_clipping_and_prefetch():
    stock, zeropp = run_ranks(jobs.train_quantized_with_everything)[0]
    assert zeropp.losses == pytest.approx(stock.losses, rel=3e-3)
    report = zeropp.bytes
    assert report["weights_backward"]["inter"] == 0
    # two micro-batches a step, and the weights cross the network once: 123,904 parameters in int8, half of them a rank
    assert report["weights_forward"]["inter"] < 0.6 * 123904 / 2


@pytest.mark.parametrize("checkpointing, zero_init", thinned([None, "reentrant", "non-reentrant"], [False, True]))
def test_lora_added_after_zero_init(checkpointing, zero_init):
    """PEFT adapters on a frozen base, at block granularity: the first block's input needs no gradient."""
    if checkpointing == "non-reentrant" and Version(deepspeed.__version__) < Version("0.19"):
        pytest.skip("stock DeepSpeed 0.18 raises torch's CheckpointError here")
    stock, lossless, zeropp = run_two(jobs.train_lora, checkpointing=checkpointing, zero_init=zero_init)[0]
    assert lossless.losses == pytest.approx(stock.losses, rel=1e-6)
    assert zeropp.losses == pytest.approx(stock.losses, rel=5e-3)
    adapters = [name for name in stock.weights if "lora_" in name]
    assert adapters
    for name in adapters:
        torch.testing.assert_close(lossless.weights[name], stock.weights[name], rtol=1e-3, atol=1e-5)
    moved = [(zeropp.weights[n] - zeropp.seen[0][n]).abs().max() > 0 for n in adapters if "layers.0." in n]
    assert all(moved), "the first block's adapters did not train"
    frozen = [name for name in stock.weights if "lora_" not in name]
    assert all(torch.equal(zeropp.weights[n], zeropp.seen[0][n]) for n in frozen)


@pytest.mark.parametrize("granularity", ["block", "module"])
def test_ranks_with_different_unused_parameters(granularity):
    """No hang, and the gradient is the mean with zeros for what a rank did not use."""
    reference = jobs.branchy_reference()
    exact_gradients = {"gradients": {"intra_format": "none", "inter_format": "none"}}
    fields = {"gather_granularity": granularity, "weights": {"format": "none"}}
    runs = [("zeropp", fields), ("zeropp", {"gather_granularity": granularity, **exact_gradients})]
    if granularity == "block":  # at module granularity `lossless` fills stock's buckets in stock's way
        runs.append(("lossless", {**fields, **exact_gradients}))
    for (recipe, _), *ranks in zip(runs, *run_ranks(jobs.train_branchy, runs=runs)):
        for name, expected in reference.items():
            atol = 1e-5 if recipe == "lossless" else 2e-2
            torch.testing.assert_close(ranks[0][0][name], expected, rtol=0, atol=atol)
        # The total over ranks, asked for on one rank alone, is the sum of what each rank counted itself.
        total = ranks[1][2]
        for kind, links in total["per_step"].items():
            for link, num_bytes in links.items():
                assert num_bytes == pytest.approx(sum(report["per_step"][kind][link] for _, report, _ in ranks))
        assert total["per_step"]["gradients"]["inter"] > 0
