"""Bytes between steps are not theirs: steps of equal work are said to send equal bytes, and stock beside them."""

import outside_jobs as jobs
import pytest
from ranks import run_ranks, run_two

CASES = [("lossless", "all"), *(("zeropp", stays) for stays in jobs.STAYS)]
CASES += [("fp8-lm-zeropp", "small"), ("fp8-lm-zeropp", "all"), ("stored", "all")]


@pytest.fixture(scope="module")
def sent():
    return run_ranks(jobs.sent, cases=CASES)[0]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_what_is_done_between_steps_is_not_theirs(sent, case):
    """Random evaluations, saves, looks, writes and generations before steps; the first step may learn the order of
    fetches, and copies of frozen weights come with it."""
    way, stays = case
    rows, foreseen = sent[case]
    learns = stays == "all"
    (_, usual), *others = rows[learns:]
    assert usual["of_stock_between_nodes"] > 0 and len({name for done, _ in rows for name in done}) > 5
    for done, found in others:
        assert found == pytest.approx(usual, rel=1e-9), done
    if stays != "all" and way != "fp8-lm-zeropp":  # whose ranks own unequal shares: foreseen is their mean
        for link, where in (("inter", "between_nodes"), ("intra", "within_nodes")):
            weights_and_gradients = usual[f"mb_{where}"] - usual.get(f"mb_{where}/other", 0)
            assert weights_and_gradients == pytest.approx(sum(links[link] for links in foreseen.values()) / 1e6)


def test_what_a_trainer_logs_while_it_evaluates_and_saves(tmp_path):
    """Each step's bytes and share of stock's are those of any other, from the first that knows the order of fetches."""
    for first, second, *others in run_two(jobs.log_of_trainer, folder=str(tmp_path)):
        assert len(others) == 5 and first["mb_between_nodes"] == second["mb_between_nodes"]
        assert all(each == second for each in others)
