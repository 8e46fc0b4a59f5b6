"""TRL's SFT, reward, RLOO and GRPO trainers, unmodified, beside stock DeepSpeed; more of them in test_trainer.py."""

import pytest
import trl_jobs as jobs
from ranks import run_two

WAYS = (None, "lossless", "zeropp")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    pytest.importorskip("trl", reason="TRL is not installed (extra `rlhf`)")
    return run_two(jobs.train, ways=WAYS, folder=str(tmp_path_factory.mktemp("trl")))[0]


@pytest.mark.parametrize("kind", ("sft", "sft_lora", "sft_streamed", "reward", "dpo_precomputed"))
def test_beside_stock(runs, kind):
    """Losses, and those of evaluation or the margins of rewards."""
    losses, others = runs[kind][None]
    assert len(set(losses)) == 3 and others
    assert runs[kind]["lossless"] == (losses, others)
    assert runs[kind]["zeropp"][0] == pytest.approx(losses, rel=0.01) and runs[kind]["zeropp"][0] != losses
    assert runs[kind]["zeropp"][1] == pytest.approx(others, rel=0.01, abs=0.01)


def test_rloo_generates_with_the_plugin(runs):
    """Tokens are sampled: those of `zeropp` are others from the second step on."""
    norms, rewards, _ = runs["rloo"][None]
    assert runs["rloo"]["lossless"] == (norms, rewards, {"values"}) and len(set(norms)) == len(set(rewards)) == 3
    of_zeropp, _, stayed = runs["rloo"]["zeropp"]
    assert of_zeropp[0] == pytest.approx(norms[0], rel=0.02) and of_zeropp[0] != norms[0] and stayed == {"values"}


def test_reference_of_grpo_follows_the_policy(runs):
    """Tokens are sampled: the losses of `zeropp` are of others from the second step on."""
    losses, _ = runs["grpo"][None]
    assert runs["grpo"]["lossless"][0] == losses and len(set(losses)) == 3
    for way, (_, differences) in runs["grpo"].items():
        assert max(differences) < 1e-6, way
