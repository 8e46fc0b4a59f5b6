"""Parameters that are frozen, and trained again, after the engine was made.

DeepSpeed's optimizer holds what required gradients then: momentum and weight decay go on changing what is frozen later.
"""

import freezing_jobs as jobs
import pytest
from ranks import run_two
from recipes import WAYS
from running import differing


@pytest.mark.parametrize(
    "way, granularity, accumulation, schedules",
    [
        ("lossless", "module", 1, ["progressive", "all but the norms"]),
        # Stock's leaf modules fail where nothing that comes into a block needs a gradient, so that embeddings train.
        ("lossless, node's copy", "block", 1, ["and back", "in turns"]),
        ("lossless, node's copy", "module", 2, ["progressive", "and back"]),
    ],
)
def test_lossless_is_stock_bit_for_bit(way, granularity, accumulation, schedules):
    options = {"way": way, "granularity": granularity, "accumulation": accumulation, "schedules": schedules}
    runs = run_two(jobs.beside_stock, **options)[0]
    for schedule, (stock, plugin) in runs.items():
        assert differing(plugin, stock) == {}, schedule


# Of the loss, at weights that have moved far. Copies that are not renewed are off by 4 to 18 %. Delayed scaling lets
# activations saturate that grow by half in a step: 0.1 to 2.8 % seen.
TOLERANCE = {
    "zeropp-4bit": 0.08,
    "mxfp8": 0.03,
    "fp8-lm-o2": 0.05,
    "fp8-lm-zeropp": 0.05,
    "lossless, delayed FP8 compute": 0.05,
}


CASES = [*((way, "progressive") for way in WAYS), ("zeropp", "in turns"), ("FP8 operands", "and back")]


@pytest.fixture(scope="module")
def computed_and_exact():
    return run_two(jobs.computed_and_exact, cases=CASES, lr=5e-2)[0]


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{way}-{schedule}" for way, schedule in CASES])
def test_what_is_computed_is_what_the_weights_say(case, computed_and_exact):
    computed, exact = computed_and_exact[case]
    assert computed == pytest.approx(exact, rel=TOLERANCE.get(CASES[case][0], 0.02))


def test_what_is_frozen_between_micro_batches_has_a_gradient_of_zeros():
    """As in stock, whose list of gradients says so at the end of each backward; also where gradients rest in FP8."""
    ways = [None, "lossless", "zeropp", "fp8-lm-o2", "fp8-lm", "FP8 states", "FP8 store"]
    for way, (frozen, others) in run_two(jobs.frozen_between_micro_batches_in, ways=ways)[0].items():
        assert frozen < 1e-3 < 5e-3 < others, way
