"""FP8 and MX compute inside ZeRO-3: one code for wire and GEMM, scales over ranks, checkpoints, training."""

import compute_jobs as jobs
import pytest
import torch
from ranks import RankError, run_ranks, run_two, run_two_once
from running import differing

HPZ = {"secondary": {"scope": "node"}}


def fp8(scaling, **more):
    return {"format": "fp8", "scaling": scaling, **more}


@pytest.mark.parametrize("scaling, numbers", [("current", 13 * 4 + 1), ("per_channel", None), ("block", 13 * 4 + 3)])
def test_the_operand_is_the_gathered_payload(scaling, numbers):
    """One node: every weight operand of forward lies in the buffer that the all-gather filled.

    All scales come from one reduction after the step: a number per tensor, row or tile of all weights, and those of
    each weight at a multiple of 16 bytes.
    """
    per_layer = 4 * 128 + 2 * 384 + 128
    shared, count, after_step, in_next_forward, text = run_ranks(
        jobs.operands_are_the_payload, compute=fp8(scaling), node_size=4
    )[0]
    assert shared == [True] * 14 and count == 14
    assert (after_step, in_next_forward) == ([], [numbers or 2 * per_layer])
    assert "GEMM operands as received\n" in text


def test_the_operand_lies_in_the_secondary_shard_of_a_rank():
    shared, *_ = run_ranks(
        jobs.operands_are_the_payload, compute=fp8("current"), node_size=2, fields={"secondary": {"scope": "rank"}}
    )[0]
    assert shared == [False] * 14  # two hops bring slices out of order: one copy sorts them
    shared, *_ = run_ranks(
        jobs.operands_are_the_payload, compute=fp8("current"), node_size=1, fields={"secondary": {"scope": "rank"}}
    )[0]
    assert shared == [True] * 14


def test_two_hops_need_one_copy_and_the_table_says_so():
    shared, count, *_, text = run_ranks(jobs.operands_are_the_payload, compute=fp8("block"), node_size=2)[0]
    assert shared == [False] * 14 and count == 14
    assert "GEMM operands as received after one copy that sorts slices" in text


@pytest.mark.parametrize(
    "scaling, options",
    [
        ("current", {"node_size": 4}),
        ("current", {"fields": {"secondary": {"scope": "rank"}}, "accumulation": 2}),
        ("current", {"zero_init": True, "checkpointing": "reentrant"}),
        ("current", {"lora": True, "checkpointing": "non-reentrant"}),
        ("block", {"fields": HPZ}),
    ],
    ids=["one node", "rank scope, accumulation", "zero.Init, checkpointing", "LoRA, checkpointing", "block, hpZ"],
)
def test_codes_from_the_wire_equal_a_cast_of_the_gathered_weight(scaling, options):
    """The same codes, so the same bits: losses and weights of a run whose weights travel in 16 bits."""
    run = {"compute": fp8(scaling), "steps": 3, **options}
    start = run_ranks if "node_size" in options else run_two
    cast, gathered, text = start(jobs.cast_and_gathered, **run)[0]
    assert not differing(gathered, cast) and len(set(cast.losses)) == 3 * options.get("accumulation", 1)
    assert "fp8_e4m3, a scale per t" in text


def test_values_of_a_weight_that_is_there_as_codes():
    is_nan, read, before, after, evaluated, changed, generated = run_ranks(jobs.values_of_a_gathered_operand)[0]
    assert torch.allclose(read, before, rtol=2**-4, atol=before.abs().max().item() * 2**-9 / 448 * 8)
    assert is_nan and before.isfinite().all() and before.any() and not after.any()
    assert evaluated == evaluated and evaluated != changed and generated == (2, 7)


def test_delayed_scaling_reduces_amax_once_a_step():
    ranks = run_two(jobs.amax_histories)
    state, reductions, report = ranks[0]
    assert reductions == [42, 42, 42]  # three operands of 14 layers, three steps
    assert all(torch.equal(other["history"], state["history"]) for other, _, _ in ranks)
    # k, v and up get the input of q and gate, and share its codes.
    shared = [3 * (7 * layer + place) for layer in (0, 1) for place in (1, 2, 5)]
    assert sorted(set(range(42)) - set(state["known"])) == shared
    assert ((state["history"][-3:] > 0).all(0)).nonzero().flatten().tolist() == state["known"]
    assert report["per_step"]["other"]["inter"] > 0


@pytest.mark.parametrize("compute, weights", [(fp8("delayed"), "fp8_e4m3"), ({"format": "mxfp8_e4m3"}, "mxfp8_e4m3")])
def test_resume_is_exact(compute, weights):
    differences, losses = run_two(jobs.resume, compute=compute, weights=weights)[0]
    assert not differences and len(set(losses)) == 3


@pytest.mark.parametrize(
    "compute, recipe",
    [
        (fp8("delayed"), "zeropp"),
        (fp8("per_channel"), "lossless"),
        ({"format": "fp8_hybrid", "scaling": "current"}, "lossless"),
        ({"format": {"weights": "mxfp4", "activations": "mxfp6_e3m2"}}, "lossless"),
        ({"format": {"weights": "mxfp6_e3m2", "activations": "mxfp6_e3m2", "gradients": "none"}}, "lossless"),
        (None, "mxfp8"),
    ],
    ids=["delayed + zeropp", "per_channel", "hybrid", "mxfp4 x mxfp6", "forward only", "recipe mxfp8"],
)
def test_training_follows_high_precision(compute, recipe):
    """Losses over steps that learn stay near those of bf16 with the same recipe's wire."""
    run = {"weights": None, "recipe": recipe, "steps": 8}
    plain = run_two_once(jobs.trained, compute={"format": "none"}, **run)[0][0].losses
    trace, text = run_two(jobs.trained, compute=compute, **run)[0]
    low = trace.losses
    assert low != plain and "linear layers" in text
    fused = "6 norms and gated products hand codes to the layer after them; done on a GPU only, not here"
    assert (fused in text) == ((compute or {}).get("scaling") == "delayed")
    assert low == pytest.approx(plain, rel=0.02) and low[-1] < low[0]


def test_a_model_without_a_layer_that_can_is_refused():
    with pytest.raises(RankError, match=r'compute.format": no linear layer .*14 x features are not multiples of 128'):
        run_two(jobs.nothing_to_convert)
