"""Every recipe's checkpoint on more and on fewer ranks: loaded, or refused on every rank by one message."""

import functools

import other_world_jobs as jobs
import pytest
import torch
from ranks import run_ranks
from thinning import thinned

RECIPES = {
    "lossless": ("lossless", {}),
    "zeropp": ("zeropp", {"gradients": {"error_feedback": True}}),
    "zeropp-exact": ("zeropp-exact", {}),
    "fp8-lm": ("fp8-lm", {}),
    "fp8-lm-o2": ("fp8-lm-o2", {}),
    "fp8-lm-zeropp": ("fp8-lm-zeropp", {}),
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


@pytest.mark.parametrize("name, saved, ranks", [(name, *worlds) for name, worlds in thinned(RECIPES, [(3, 2), (2, 3)])])
def test_more_or_fewer_ranks_than_saved(name, saved, ranks, tmp_path):
    """Optimizer states are refused; on fewer ranks weights alone are put together from the files of all."""
    expected, options = saved_by(saved, name, tmp_path)
    loads = ("no states", "neither") if ranks < saved else ()
    for results in run_ranks(jobs.load, world=ranks, ranks_per_node=1, timeout=120, **options):
        for way, result in results.items():
            if way in loads:
                assert result == pytest.approx(expected, rel=2e-3), (way, results)
            elif way == "all" or not loads:
                assert is_refusal(result, saved, ranks), (way, results)


@pytest.mark.parametrize("sub_group_size", [10**9, 2000])
def test_a_universal_checkpoint_goes_on(sub_group_size, tmp_path):
    """As if nothing had been: each sub-group counts its own steps, in two groups of parameters or in many parts."""
    run = functools.partial(run_ranks, jobs.of_a_universal_checkpoint, ranks_per_node=1, sub_group_size=sub_group_size)
    whole, weights = run(world=2, folder=str(tmp_path), first=0, steps=6)[0]
    run(world=2, folder=str(tmp_path), first=0, steps=3, save_as="three")
    resumed, found = run(world=1, folder=str(tmp_path), first=3, steps=3)[0]
    assert resumed == pytest.approx(whole[3:], rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-5)


def test_a_file_that_cannot_be_read_or_is_missing(tmp_path):
    _, options = saved_by(2, "lossless", tmp_path)
    for unreadable, missing in run_ranks(jobs.load_a_part, world=2, ranks_per_node=1, timeout=120, **options):
        assert "zero_pp_rank_1_mp_rank_00_model_states.pt cannot be read" in unreadable
        assert "was saved by 2 ranks, but rank 1 has no file of it" in missing
