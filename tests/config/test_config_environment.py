"""ZEROPP_FP8_RECIPE: a recipe for ds_configs that do not say anything about the plugin."""

import copy

import pytest
from config_cases import BF16, ds_config, refusal, resolved

from zeropp_fp8.config import IN_TREE_KEYS, RECIPE_VARIABLE, RECIPES, SECTION, ConfigError, resolve


def dumped(config):
    return config.model_dump()


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_it_means_what_a_section_with_the_recipe_means(monkeypatch, recipe):
    named = resolved({"recipe": recipe}, **BF16)
    monkeypatch.setenv(RECIPE_VARIABLE, recipe)
    config = resolved(**BF16)
    assert dumped(config) == dumped(named)
    assert (config.recipe_variable, named.recipe_variable) == (RECIPE_VARIABLE, None)


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ({}, {}),
        ({"recipe": "lossless"}, {}),
        ({"weights": {"format": "int4"}}, {}),
        (None, {"zero_quantized_weights": True}),
        (None, {"zero_hpz_partition_size": 2}),
    ],
)
def test_what_a_ds_config_says_of_itself_wins(monkeypatch, section, keys):
    without = resolved(section, keys)
    monkeypatch.setenv(RECIPE_VARIABLE, "zeropp-4bit")
    config = resolved(section, keys)
    assert dumped(config) == dumped(without) and config.recipe_variable is None


@pytest.mark.parametrize("section", [{"enabled": False}, {"enabled": False, "recipe": "zeropp"}])
def test_a_section_that_switches_the_plugin_off_wins(monkeypatch, section):
    monkeypatch.setenv(RECIPE_VARIABLE, "zeropp")
    assert resolve({"zero_optimization": {"stage": 3}, SECTION: section}) is None


@pytest.mark.parametrize(
    "section, says", [({SECTION: None}, "must be an object"), ({"zeropp-fp8": {}}, "did you mean")]
)
def test_it_does_not_stand_in_for_a_section_that_says_nothing(monkeypatch, section, says):
    monkeypatch.setenv(RECIPE_VARIABLE, "zeropp")
    assert says in refusal(**section)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"bf16": {"enabled": True}},
        {"zero_optimization": True},
        *({"zero_optimization": {"stage": s}} for s in (0, 1, 2)),
    ],
)
def test_other_stages_run_as_stock(monkeypatch, config):
    monkeypatch.setenv(RECIPE_VARIABLE, "zeropp")
    assert resolve(config) is None


def test_empty_means_that_it_is_not_set(monkeypatch):
    monkeypatch.setenv(RECIPE_VARIABLE, "")
    assert resolved() is None


def test_an_unknown_recipe_names_the_variable(monkeypatch):
    monkeypatch.setenv(RECIPE_VARIABLE, "losless")
    message = refusal()
    assert message.startswith(f"{RECIPE_VARIABLE}=losless: ") and '(did you mean "lossless"?)' in message


def test_what_does_not_go_with_the_recipe_names_the_variable_and_the_key(monkeypatch):
    monkeypatch.setenv(RECIPE_VARIABLE, "lossless")
    message = refusal(zero={"offload_param": {"device": "nvme"}})
    assert message.startswith(f"{RECIPE_VARIABLE}=lossless: ") and '"zero_optimization.offload_param.device"' in message
    with pytest.raises(ConfigError, match=rf"{RECIPE_VARIABLE}=lossless: .*hybrid_engine"):
        resolve(ds_config(), hybrid_engine=True)


@pytest.mark.parametrize("key", sorted(IN_TREE_KEYS))
def test_a_key_that_says_off_contradicts_as_it_contradicts_a_section(monkeypatch, key):
    section = {"recipe": "qlora"}
    with pytest.raises(ConfigError) as beside:
        resolved(section, {key: IN_TREE_KEYS[key]})
    monkeypatch.setenv(RECIPE_VARIABLE, "qlora")
    assert refusal(zero={key: IN_TREE_KEYS[key]}) == f"{RECIPE_VARIABLE}=qlora: {beside.value}"


def test_the_users_ds_config_stays_as_it_is(monkeypatch):
    monkeypatch.setenv(RECIPE_VARIABLE, "zeropp")
    config = ds_config(bf16={"enabled": True})
    before = copy.deepcopy(config)
    resolve(config)
    assert config == before
