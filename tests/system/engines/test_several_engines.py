"""Two engines in one GatheredParameters: a reference model that follows a policy, a moving average of weights.

DeepSpeed hands all parameters to the closures of the first, whatever engine the others belong to. And two over one
model, neither of them destroyed: TRL's DPO computes the reference's numbers so (`precompute_ref_log_probs`).
"""

import pytest
import several_engine_jobs as jobs
from ranks import run_two
from running import differing

# Each kind beside DeepSpeed's own engine, beside itself, and beside others that know their parameters in another way.
PAIRS = [
    ("stock", "zeropp"),
    ("stock", "FP8 operands"),
    ("stock", "fp8-lm"),
    ("stock", "lossless, node's copy"),
    ("zeropp", "lossless, node's copy"),
    ("zeropp", "FP8 operands"),
    ("zeropp", "fp8-lm"),
    ("fp8-lm", "fp8-lm"),
    ("fp8-lm", "FP8 operands, node's copy"),
    ("fp8-lm", "zeropp-pcie, some copies"),
    ("zeropp, rank's copy", "zeropp, no copy"),
]
STORED = ["stock", "zeropp", "fp8-lm"]  # engines that train, beside one whose weights rest as codes


@pytest.fixture(scope="module")
def runs():
    return run_two(jobs.follow_all, pairs=PAIRS, timeout=400)[0]


@pytest.fixture(scope="module")
def over_one_model():
    return run_two(jobs.over_one_model_each, kinds=jobs.OVER_ONE_MODEL, timeout=400)[0]


def check(run, computes_within, error=0.0):
    assert max(run["errors"]) <= error
    assert run["source's weights"]
    assert run["source"][0] == run["source"][1]
    assert run["computed"] == pytest.approx(run["exact"], rel=computes_within)
    assert abs(run["exact"] - run["before"]) > 0.05 * run["before"], "nothing to see"


@pytest.mark.parametrize("first_follows", [True, False], ids=["first follows", "second follows"])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_model_follows_another(pair, first_follows, runs):
    check(runs[(*pair, first_follows)], computes_within=0.02)


def test_a_model_that_rests_as_codes_follows_another():
    """Its linear weights are rounded to INT8: 0.5 % of their norm."""
    for kind in STORED:
        runs = run_two(jobs.follow_stored, kind=kind)[0]
        for run in runs.values():
            check(run, computes_within=0.02, error=0.01)


@pytest.mark.parametrize("kind", jobs.OVER_ONE_MODEL)
def test_two_engines_over_one_model(kind, over_one_model):
    """Both train, and evaluate, what one engine alone gives; stock itself fails at it."""
    losses, evaluated, _ = over_one_model[kind].pop("alone")
    assert len(set(losses)) == 4 and len(set(evaluated)) == 3
    for order, (trained, own, others) in over_one_model[kind].items():
        assert (trained, own, others) == (losses, evaluated, evaluated), order


# Where the second has weights on other ranks, or in other formats, than the first.
LATER = [
    ("lossless", "FP8 states"),
    ("zeropp", "whole tensors"),
    ("whole tensors", "FP8 states"),
    ("zeropp-exact", "zeropp"),
    ("FP8 operands", "FP8 states"),
    ("fp8-lm", "zeropp"),
]
ELSEWHERE = [("zeropp", "whole tensors"), ("whole tensors", "FP8 states"), ("fp8-lm", "zeropp")]


def test_training_goes_on_after_a_later_engine_has_ended():
    """As with stock: what the later one has taken over is given back, to where it was."""
    for found in run_two(jobs.before_later_ones, pairs=LATER, destroyed=True, timeout=400):
        for (first, _), run in found.items():
            assert run["beside"] == run["alone"], first


def test_training_beside_a_later_engine_that_has_weights_elsewhere():
    for found in run_two(jobs.before_later_ones, pairs=ELSEWHERE, destroyed=False, timeout=400):
        for run in found.values():
            training, *checkpoints = run["beside"]
            assert "a later engine over this model keeps its weights on other ranks" in training
            assert "destroy()" in training and "zeropp_fp8.partition" in training
            assert checkpoints == [training] * 2


def test_a_step_drops_what_a_later_engine_keeps_gathered():
    """Persistent parameters, and what an evaluation has left: the next forward would compute with old weights."""
    for found in run_two(jobs.keeping_weights_gathered, kinds=["lossless", "zeropp"]):
        for case, (alone, beside) in found.items():
            assert differing(alone, beside) == {}, case
            assert len({*alone.losses, *(loss for loss, _ in alone.seen)}) == 6 and all(kept for _, kept in alone.seen)


def test_master_weights_beside_a_later_engine_that_has_weights_elsewhere():
    for said, equal in run_two(jobs.master_weights):
        assert "cannot train, show master weights, save or load" in said and equal


def test_a_parameter_of_another_engine():
    for said in run_two(jobs.across_engines):
        assert "a Linear uses parameters that another engine has" in said and "make one engine over both models" in said


def test_later_engines_that_are_refused():
    """Over a part of what is gathered together, or with weights at rest as codes: the earlier one trains on."""
    for (over_a_part, stored), (alone, beside) in run_two(jobs.refused):
        assert "another engine has this model and more" in over_a_part and "call its destroy() first" in over_a_part
        assert 'frozen.format": another engine over this model has model.layers.0.self_attn.q_proj.weight' in stored
        assert "call its destroy() first" in stored
        assert alone == beside and len(set(alone)) == 2


def test_generation_beside_a_later_engine():
    for beside, after in run_two(jobs.generating):
        assert "a later engine has the weights" in beside and "destroy()" in beside and after == "done"
