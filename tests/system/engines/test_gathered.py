"""Ranks run by themselves what all ranks have gathered, and training goes on as if they had not.

What an engine learns of its passes must be the same on all ranks, so it must not learn from what some ranks run. Stock
DeepSpeed lets a rank evaluate the whole model so, where it keeps what it has gathered until the backward.
"""

import random

import gathered_jobs as jobs
import pytest
from gathered_jobs import RUNS, WHEN, Excursion
from ranks import run_ranks, run_two
from recipes import WAYS
from running import differing
from thinning import thinned

GRANULARITIES = ["block", "module", "parameter"]
SOME = ("model.embed_tokens", "model.layers.0", "model.layers.1.mlp", "model.norm", "lm_head")


def _drawn(seed: str, world: int, most: int = 6) -> list[Excursion]:
    rng = random.Random(seed)
    excursions = []
    for _ in range(rng.randint(3, most)):
        what = rng.choice(list(RUNS))
        ranks = tuple(sorted(rng.sample(range(world), rng.randint(1, world))))
        gathered = rng.choice([RUNS[what][1], ("",)])
        if len(ranks) == world and rng.random() < 0.5:
            gathered = tuple(rng.sample(SOME, rng.randint(1, len(SOME))))
        modifier_rank = rng.choice([None, None, *range(world)])
        excursions.append(Excursion(rng.randrange(6), rng.choice(WHEN), gathered, what, ranks, modifier_rank))
    return excursions


def _check(run, world, way, keeps, granularity, seed):
    excursions = _drawn(f"{way} {keeps} {granularity} {seed}", world)
    dtype = "bf16" if way.startswith("fp8-lm") else "fp32"
    arguments = {"way": way, "dtype": dtype, "keeps": keeps, "granularity": granularity, "excursions": excursions}
    for plain, other in run(jobs.with_excursions, **arguments):
        assert differing(plain, other) == {}


@pytest.mark.parametrize("way, keeps, granularity", thinned([*WAYS, "stored"], [True, False], GRANULARITIES))
def test_training_goes_on_bit_for_bit(way, keeps, granularity):
    _check(run_two, 2, way, keeps, granularity, 0)


@pytest.mark.parametrize("way, granularity", [("zeropp", "block"), ("lossless, node's copy", "module")])
def test_some_ranks_of_a_node(way, granularity):
    _check(run_ranks, 4, way, True, granularity, 0)


@pytest.mark.parametrize("granularity, way", thinned(GRANULARITIES, ["lossless", "lossless, node's copy"]))
def test_whole_passes_of_all_ranks_send_no_weights(way, granularity):
    for plain, inside in run_two(jobs.whole_steps, way=way, granularity=granularity):
        assert differing(plain, inside).keys() == {"bytes"}
        sent = [
            sum(run.bytes["weights_forward"].values()) + sum(run.bytes["weights_backward"].values())
            for run in (plain, inside)
        ]
        assert sent[0] > 0 and sent[1] == 0


@pytest.mark.parametrize("way, granularity", thinned(["zeropp", "lossless", "fp8-lm"], GRANULARITIES))
def test_a_hook_of_one_rank(way, granularity):
    for without, other in run_two(jobs.lens, way=way, granularity=granularity):
        assert differing(without, other) == {}


@pytest.mark.parametrize("weights, way", thinned(["values", "codes", "sharded"], ["zeropp", "lossless"]))
def test_generation_inside(way, weights):
    run_two(jobs.generation_inside, way=way, weights=weights)


@pytest.mark.parametrize("way", ["zeropp", "lossless", "fp8-lm", "zeropp-exact"])
@pytest.mark.parametrize(
    "gathered, waits_for",
    [(SOME[:2], "model.layers.1.self_attn.q_proj.weight and 8 more"), (SOME[1:], "model.embed_tokens.weight.")],
)
def test_who_waits_in_vain_says_for_what(way, gathered, waits_for):
    said = run_two(jobs.a_rank_alone, way=way, gathered=gathered, granularity="block")[0]
    assert f"waiting for parameters, {waits_for}" in said and "GatheredParameters" in said
