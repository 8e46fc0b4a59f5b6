"""Every recipe's checkpoint on more and on fewer ranks: loaded, or refused on every rank by one message."""

import other_world_jobs as jobs
import pytest
from ranks import run_ranks

RECIPES = {
    "lossless": ("lossless", {}),
    "zeropp": ("zeropp", {"gradients": {"error_feedback": True, "rounding": "stochastic"}}),
    "fp8-lm": ("fp8-lm", {}),
    "fp8-lm-o2": ("fp8-lm-o2", {}),
    "mxfp8": ("mxfp8", {}),
    "qlora": ("qlora", {}),
}


def saved_by(world, name, folder):
    recipe, fields = RECIPES[name]
    options = {"folder": str(folder), "recipe": recipe, "fields": fields}
    return run_ranks(jobs.save, world=world, ranks_per_node=1, **options)[0], options


def is_refusal(message, saved, ranks):
    parts = (f"was saved by {saved} ranks, and this job has {ranks}", "deepspeed.checkpoint.ds_to_universal")
    return isinstance(message, str) and all(part in message for part in parts)


@pytest.mark.parametrize("name", RECIPES)
def test_more_ranks_than_saved(name, tmp_path):
    _, options = saved_by(2, name, tmp_path)
    for results in run_ranks(jobs.load, world=3, ranks_per_node=1, timeout=120, **options):
        assert all(is_refusal(message, 2, 3) for message in results.values()), results


@pytest.mark.parametrize("name", RECIPES)
def test_fewer_ranks_than_saved(name, tmp_path):
    """Optimizer states are refused; weights alone are put together from the files of all."""
    expected, options = saved_by(3, name, tmp_path)
    for results in run_ranks(jobs.load, world=2, ranks_per_node=1, timeout=120, **options):
        assert is_refusal(results["all"], 3, 2), results
        for way in ("no states", "neither"):
            assert results[way] == pytest.approx(expected, rel=2e-3), (way, results)


def test_a_file_that_cannot_be_read_or_is_missing(tmp_path):
    _, options = saved_by(2, "lossless", tmp_path)
    for unreadable, missing in run_ranks(jobs.load_a_part, world=2, ranks_per_node=1, timeout=120, **options):
        assert "zero_pp_rank_1_mp_rank_00_model_states.pt cannot be read" in unreadable
        assert "was saved by 2 ranks, but rank 1 has no file of it" in missing
