"""Every two parts of the plugin together: trained, or refused by name. docs/recipes.md shows the same table."""

import re
from itertools import combinations

import pair_jobs as jobs
import pytest
from ranks import run_ranks

from tests.places import ROOT
from zeropp_fp8.config import ConfigError, resolve

PAIRS = list(combinations(jobs.PARTS, 2))
REFUSED = {("FP8 compute", "MX compute"): "one compute.format", ("qwZ", "differences"): "weights.format none"}
TRAINED = [pair for pair in PAIRS if pair not in REFUSED]
STEPS = 4


def chunks(items, size):
    return [items[start : start + size] for start in range(0, len(items), size)]


@pytest.fixture(scope="module")
def alone():
    """Losses with nothing on: of all weights, and of adapters."""
    return {
        lora: run_ranks(jobs.train_with, several=[[]], steps=STEPS, adapters=lora)[0][0][1] for lora in (False, True)
    }


def check_losses(losses, expected):
    """They fall as they do with nothing on, and are not the same numbers."""
    assert losses == pytest.approx(expected, rel=0.01) and losses != expected, (losses, expected)
    assert losses[0] - losses[-1] == pytest.approx(expected[0] - expected[-1], rel=0.2), (losses, expected)


@pytest.mark.parametrize("pairs", chunks(TRAINED, 7), ids=lambda pairs: f"{'+'.join(pairs[0])}...")
def test_pairs_train(pairs, alone):
    for pair, (on, losses) in zip(pairs, run_ranks(jobs.train_with, several=[list(p) for p in pairs], steps=STEPS)[0]):
        expected = alone["frozen store" in pair]
        assert on == set(pair) | {jobs.NEEDS[name] for name in pair if name in jobs.NEEDS}, pair
        if set(pair) == {"hpZ", "differences"}:
            assert losses == expected, "neither rounds"
        else:
            check_losses(losses, expected)


def test_all_at_once(alone):
    everything = [name for name in jobs.PARTS if name not in ("MX compute", "qwZ")]
    ((on, losses),) = run_ranks(jobs.train_with, several=[everything], steps=STEPS)[0]
    assert on == set(everything)
    check_losses(losses, alone[True])


def test_two_ways_to_compute_are_refused():
    """There is one format for each operand: a ds_config cannot even name two."""
    with pytest.raises(ConfigError, match='"mx" goes with MX formats, but weights are fp8_e4m3'):
        resolve(
            {
                "zero_optimization": {"stage": 3},
                "zeropp_fp8": {"compute": {"format": {"weights": "fp8_e4m3", "activations": "mxfp8_e4m3"}}},
            }
        )


def test_the_page_has_the_table():
    text = (ROOT / "docs/recipes.md").read_text()
    rows = dict(re.findall(r"^\| (\S[^|]*?) \| ((?:[^|\n]* \| ?)+)$", text.split("## What goes with what")[1], re.M))
    for first, second in PAIRS:
        cells = rows[second].split("|")
        said = cells[list(jobs.PARTS).index(first)].strip()
        assert said == REFUSED.get((first, second), "yes"), (first, second)
