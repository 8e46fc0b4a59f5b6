"""The Hugging Face Trainer, unmodified, with the plugin switched on by its ds_config."""

import pytest
import trainer_jobs as jobs
from ranks import run_two


def test_trainer(tmp_path):
    stock, _ = run_two(jobs.train_with_trainer, recipe=None, folder=str(tmp_path))[0]
    for recipe in ("zeropp", "fp8-lm"):
        losses, report = run_two(jobs.train_with_trainer, recipe=recipe, folder=str(tmp_path))[0]
        assert len(losses) == 4 and losses == pytest.approx(stock, rel=3e-3) and losses != stock
        assert report["steps"] == 4
        assert report["per_step"]["weights_forward"]["inter"] > 0
        assert (report["per_step"]["weights_backward"]["inter"] == 0) == (recipe == "zeropp")


def test_reference_of_dpo_follows_the_policy(tmp_path):
    """TRL gathers policy and reference in one context to mix them: two engines' parameters."""
    pytest.importorskip("trl", reason="TRL is not installed (extra `rlhf`)")
    stock, _ = run_two(jobs.train_with_dpo, way=None, folder=str(tmp_path))[0]
    for way, rel in (("zeropp", 0.01), ("FP8 operands, node's copy", 0.05), ("fp8-lm", 0.05)):
        losses, difference = run_two(jobs.train_with_dpo, way=way, folder=str(tmp_path))[0]
        assert losses == pytest.approx(stock, rel=rel), way
        assert difference < 0.01, way
