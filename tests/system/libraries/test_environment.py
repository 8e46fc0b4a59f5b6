"""ZEROPP_FP8_RECIPE puts a recipe into a job whose ds_config has no section."""

import pytest
from environment_jobs import recipe_of_environment
from ranks import run_ranks

FROM_VARIABLE = "(from ZEROPP_FP8_RECIPE)"


def run(recipe, **arguments):
    return run_ranks(recipe_of_environment, world=2, env={"ZEROPP_FP8_RECIPE": recipe}, **arguments)


@pytest.mark.parametrize("zero_init", [False, True])
def test_a_job_without_a_section_runs_with_the_recipe(zero_init):
    by_variable = run("zeropp", zero_init=zero_init)
    by_section = run("", zero_init=zero_init, section={"recipe": "zeropp"})
    for ours, theirs in zip(by_variable, by_section):
        assert ours["recipe"] == theirs["recipe"] == "zeropp"
        assert ours["untouched"]
        assert (ours["losses"], ours["weights"]) == (theirs["losses"], theirs["weights"])
    assert f"zeropp_fp8: recipe zeropp {FROM_VARIABLE}; " in by_variable[0]["printed"]
    assert "zeropp_fp8: recipe zeropp; " in by_section[0]["printed"] and FROM_VARIABLE not in by_section[0]["printed"]


def test_a_section_wins_over_the_variable():
    found = run("zeropp", section={"recipe": "lossless"})[0]
    assert found["recipe"] == "lossless" and FROM_VARIABLE not in found["printed"]


def test_another_stage_stays_stock_and_a_line_says_so():
    found = run("zeropp", stage=2)[0]
    assert found["recipe"] is None and "stock DeepSpeed; the ds_config has stage 2, no" in found["printed"]
    assert "and ZEROPP_FP8_RECIPE=zeropp is for stage 3 without a section\n" in found["printed"]
