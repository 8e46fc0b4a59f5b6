"""Promises of recipes on both backends: DeepSpeed's ZeRO-3 and torch's fully_shard."""

import backend_jobs as jobs
import pytest
import torch
from ranks import run_ranks

NODES = [1, 2, 4]  # ranks of each, of four
on_each_backend = pytest.mark.parametrize("backend", jobs.BACKENDS)


def assert_same(one, other):
    assert one[0] == other[0]
    assert all(torch.equal(weight, other[1][name]) for name, weight in one[1].items())


@on_each_backend
@pytest.mark.parametrize("ranks_per_node", NODES)
def test_lossless_is_the_backend_itself(backend, ranks_per_node):
    runs = [{"recipe": None}, {"recipe": "lossless"}]
    for stock, lossless in run_ranks(jobs.several, ranks_per_node=ranks_per_node, backend=backend, runs=runs):
        assert_same(stock, lossless)


@pytest.mark.parametrize("recipe", ["zeropp", "zeropp-4bit"])
@pytest.mark.parametrize("ranks_per_node", NODES)
def test_both_send_the_same_and_learn_the_same(recipe, ranks_per_node):
    """Losses are near each other's; bytes differ by what cutting parameters to ranks pads."""
    whole = {"weights": {"difference": "none"}}
    for found in run_ranks(jobs.on_both, ranks_per_node=ranks_per_node, recipe=recipe, fields=whole):
        (losses, _, sent), (others, _, theirs) = (found[backend] for backend in jobs.BACKENDS)
        assert losses == pytest.approx(others, rel=1e-2)
        for kind in ("weights_forward", "weights_backward", "gradients"):
            for link in ("inter", "intra"):
                assert theirs[kind][link] == pytest.approx(sent[kind][link], rel=0.05), (kind, link)
        assert sent["weights_backward"]["inter"] == theirs["weights_backward"]["inter"] == 0


@on_each_backend
def test_differences_change_no_bit(backend):
    runs = [{"recipe": "zeropp", "fields": {"weights": {"difference": which}}} for which in ("none", "exact")]
    for whole, differences in run_ranks(jobs.several, backend=backend, runs=runs):
        assert_same(whole, differences)
        assert differences[2]["weights_forward"]["inter"] != whole[2]["weights_forward"]["inter"]


@on_each_backend
def test_evaluations_change_no_bit_and_cost_no_byte(backend):
    runs = [{"recipe": "zeropp", "evaluates": evaluates} for evaluates in (False, True)]
    for plain, evaluating in run_ranks(jobs.several, backend=backend, runs=runs):
        assert_same(plain, evaluating)
        assert plain[2]["gradients"] == evaluating[2]["gradients"]


@on_each_backend
def test_the_same_seed_is_the_same_training(backend):
    once, again = (run_ranks(jobs.trained, backend=backend, recipe="zeropp") for _ in range(2))
    for one, other in zip(once, again):
        assert_same(one, other)


@on_each_backend
@pytest.mark.parametrize(
    "recipe, fields, said",
    [
        ("zeropp", {"weights": {"format": "int5"}}, "weights.format"),
        ("zeropp", {"gradients": {"inter_format": "none", "error_feedback": True}}, "gradients.error_feedback"),
        ("zero++", {}, "recipe"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(backend, recipe, fields, said):
    for error in run_ranks(jobs.refused, world=2, backend=backend, recipe=recipe, fields=fields):
        assert said in error
