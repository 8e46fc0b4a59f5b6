"""Engines over one model that cannot be made, or end, the last one first: each leaves what was there before it."""

import ending_jobs
import failing_jobs
import pytest
import trace_jobs
from ranks import run_two
from surrounding_jobs import differences

GRANULARITIES = [("block", "block"), ("block", "module"), ("module", "block")]


# Each place is met with two pairs of granularities: of one kind with the next pair.
@pytest.mark.parametrize(
    ("kind", "granularities"), [("lossless", GRANULARITIES), ("zeropp", GRANULARITIES[1:] + GRANULARITIES[:1])]
)
def test_an_engine_that_cannot_be_made_leaves_nothing(kind, granularities):
    for found in run_two(failing_jobs.beside_failures, kind=kind, granularities=granularities, timeout=400):
        alone = {case[:2]: run for case, run in found.items() if case[2] == "alone"}
        for case, run in found.items():
            if case[2] != "alone":
                failed, left, losses = run
                assert failed, case
                assert not left, (case, left[:8])
                assert losses == alone[case[:2]], case


def test_a_model_without_another_engine():
    """As it was before: a failed engine leaves ZeRO-3's parameters, as one does that was destroyed."""
    for found in run_two(failing_jobs.without_another, kind="zeropp", timeout=400):
        for case, (failed, left, parts, losses) in found.items():
            assert failed and not left and not parts, (case, left[:8], parts)
            assert losses == found[None, case[1]][3], case


def test_low_precision_after_a_failure():
    for counts in run_two(failing_jobs.converted_again):
        assert counts == [0, 8, 8, 0]


def test_blocks_are_compiled_in_turn():
    assert run_two(ending_jobs.compiled_in_turn) == [(True, True, True)] * 2


def test_an_engine_does_not_end_before_later_ones():
    """destroy() is refused, with what to do, and changes nothing for either."""
    for found in run_two(ending_jobs.ended_too_early, timeout=400):
        for said, alone, beside in found:
            assert len(said) == 3 and beside == alone and len(set(alone)) == 4
            for message in said:
                assert "made later over this model" in message and "call their destroy() first" in message


def test_leaf_modules_are_those_of_the_engine_that_has_the_model():
    pairs = [("block", "module"), ("module", "block"), ("parameter", "block"), ("block", "parameter")]
    found = run_two(
        ending_jobs.units_gathered, granularities=[*pairs, *((a, a) for a in ("block", "module", "parameter"))]
    )
    for run in found:
        for (own, (first, second)), (alone, beside, again, left) in run.items():
            assert again == alone == run[own, (first, first)][0], (own, first, second)
            assert beside == run[own, (second, second)][0], (own, first, second)
            assert left == (2 if own else 0)
    (units, hooked, leaves, marked), (of_modules, more_hooked, none, no_marked) = found[0][False, pairs[0]][:2]
    assert leaves == ["LlamaDecoderLayer"] * 2 and not none and marked == 18 and not no_marked
    assert of_modules > units and more_hooked > hooked


@pytest.mark.parametrize("kind", ["lossless", "zeropp", "whole tensors"])
def test_any_order(kind):
    found = run_two(ending_jobs.in_any_order, kind=kind, seeds=range(12), length=20, timeout=400)
    for rank in found:
        for seed, (said, trained, evaluated, (expected, expected_evaluations), log) in rank.items():
            assert not said, (seed, said[0])
            # Where weights lie decides, on a CPU, on the last bit of a product.
            within = 1e-6 if seed % 2 else 0
            assert [number for number, _ in trained] == [number for number, _ in expected]
            for losses, wanted in ((trained, expected), (evaluated, expected_evaluations)):
                wanted = pytest.approx([loss for _, loss in wanted], rel=within, abs=0)
                assert [loss for _, loss in losses] == wanted, (seed, log)
    log = " ".join(line for _, _, _, _, log in found[0].values() for line in log)
    for what in ("make", "to train", "fail", "train ", "evaluate", "destroy", "refuse", "collect"):
        assert what in log


def test_an_engine_that_is_collected_gives_nothing_back():
    """Ranks collect at moments of their own: they would not agree on what is owed, nor on who gathers it."""
    for handed_over, said in run_two(ending_jobs.collected_on_a_rank):
        assert handed_over == [21, 21, 21]
        assert "uses parameters that another engine has" in said


def test_checkpoints_are_loaded_after_a_later_engine_has_ended(tmp_path):
    """DeepSpeed reads weights in the flat buffer that shards of the first were in."""
    kinds = ["lossless", "FP8 states", "whole tensors", "zeropp-exact", "zeropp, no copy"]
    for found in run_two(ending_jobs.loaded_after_a_later_one, kinds=kinds, folder=str(tmp_path), timeout=400):
        for kind, losses in found.items():
            assert losses[True] == losses[False], kind


def test_hooks_that_were_put_on_again_are_silent_in_the_turn_of_another():
    for alone, beside in run_two(ending_jobs.hooks_again):
        assert alone == beside and len(set(alone)) == 4


def test_failures_beside_weights_that_rest_as_codes():
    for failed, left, losses in run_two(failing_jobs.stored_weights):
        assert failed and not left
        assert len(set(losses)) == 1


def test_owners_that_have_some_of_the_parts():
    """Failures while a later engine takes whole tensors over, and while the earlier one gives them up."""
    for found in run_two(failing_jobs.owners_half_placed):
        (_, _, alone) = found.pop(None)
        for where, (failed, left, losses) in found.items():
            assert failed and not left and losses == alone, (where, left[:5], losses, alone)


def test_owners_that_fail_on_one_rank():
    """The error goes its way, and no rank is left waiting by it."""
    assert run_two(failing_jobs.owners_failed_on_a_rank) == [None, True]


@pytest.mark.parametrize("kind", ["zeropp", "zeropp-exact", "zeropp, no copy"])
def test_an_engine_that_fails_on_one_rank(kind):
    """Nothing that a rank does then needs the others, where parameters have no owners."""
    for left, (alone, after) in run_two(failing_jobs.failed_on_a_rank, kind=kind):
        assert not left and alone == after


@pytest.mark.parametrize("name", trace_jobs.OWN_STATES)
def test_an_engine_that_does_not_train_leaves_no_trace(name):
    """Copies of each other's weights, and the state of rounding, are what they were: each bit is."""
    for found in run_two(
        differences, ways=[name], trained=trace_jobs.without_a_trace, kinds=trace_jobs.TURNS, timeout=400
    ):
        assert len(found) == len(trace_jobs.TURNS) - 1
        assert not any(found.values()), found


def test_weights_that_were_written_while_a_later_engine_was_there():
    """Copies of the engines before it are of other weights then."""
    kinds = ["zeropp", "zeropp, no copy", "zeropp-exact", "exact, whole tensors", "whole tensors"]
    for found in run_two(trace_jobs.written_while_later_ones_were_there, kinds=kinds, timeout=400):
        assert len(found) == 3 * len(kinds)
        for (kind, who), (new, again) in found.items():
            assert again == [new] * 2, (kind, who)
