"""The Hugging Face Trainer, unmodified, with the plugin switched on by its ds_config."""

import pytest
import trainer_jobs as jobs
from ranks import run_two


def test_trainer(tmp_path):
    runs = run_two(jobs.train_with_trainer, recipes=(None, "zeropp", "fp8-lm"), folder=str(tmp_path))[0]
    stock, _ = runs.pop(None)
    for recipe, (losses, report) in runs.items():
        assert len(losses) == 4 and losses == pytest.approx(stock, rel=3e-3) and losses != stock
        assert report["steps"] == 4
        assert report["per_step"]["weights_forward"]["inter"] > 0
        assert (report["per_step"]["weights_backward"]["inter"] == 0) == (recipe == "zeropp")


def test_torch_compile(tmp_path):
    eager, compiled, graphs = run_two(jobs.train_compiled, recipe="zeropp", folder=str(tmp_path))[0]
    assert compiled == eager and graphs > 1


def test_reference_of_dpo_follows_the_policy(tmp_path):
    """TRL gathers policy and reference in one context to mix them: two engines' parameters."""
    pytest.importorskip("trl", reason="TRL is not installed (extra `rlhf`)")
    within = {"zeropp": 0.01, "FP8 operands, node's copy": 0.05, "fp8-lm": 0.05}
    runs = run_two(jobs.train_with_dpo, ways=(None, *within), folder=str(tmp_path))[0]
    stock, _ = runs.pop(None)
    for way, (losses, difference) in runs.items():
        assert losses == pytest.approx(stock, rel=within[way]), way
        assert difference < 0.01, way
