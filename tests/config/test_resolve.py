"""The `zeropp_fp8` section: what asks for the plugin, recipes, names and types of keys, and where it is read from."""

import base64
import copy
import json
import re

import pytest
from config_cases import BF16, DEFAULTS, ZEROPP, ds_config, refusal, resolved, values
from pydantic import ValidationError

import zeropp_fp8
from zeropp_fp8.config import IN_TREE_KEYS, RECIPES, SECTION, ConfigError, asks_for_plugin, load_ds_config, resolve

# --- what is asked for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"zero_optimization": {"stage": 1}},
        {"zero_optimization": True},
        ds_config(),
        ds_config(zero=IN_TREE_KEYS),
        ds_config({"enabled": False, "recipe": "zeropp"}),
        ds_config({"enabled": False}, {"zero_quantized_weights": True}),
        {"zero_optimization": {"stage": 1}, SECTION: {"enabled": False}},
    ],
)
def test_none_when_not_asked(config):
    assert resolve(config) is None
    assert not asks_for_plugin(config)


@pytest.mark.parametrize("config", [ds_config({}), ds_config({"enabled": True}), ds_config({"recipe": None})])
def test_an_empty_section_is_lossless(config):
    assert asks_for_plugin(config)
    assert resolve(config) == resolved({"recipe": "lossless"}).model_copy(update={"recipe": None})


@pytest.mark.parametrize(
    "section, got", [("zeropp", '"zeropp"'), (True, "true"), (["zeropp"], '["zeropp"]'), (3, "3"), (None, "null")]
)
@pytest.mark.parametrize("zero", [None, {"zero_quantized_weights": True}, {"stage": 1}])
def test_section_must_be_an_object(section, got, zero):
    message = refusal(zero=zero, **{SECTION: section})
    assert message.startswith(f'"{SECTION}" must be an object such as {{"recipe": "zeropp"}}, or {{"enabled": false}} ')
    assert message.endswith(f"got {got}")


@pytest.mark.parametrize("name", ["zeropp-fp8", "zeropp_fp_8", "zeropp", "ZeroPP_FP8", "zero_pp_fp8", "_zeropp_fp8"])
@pytest.mark.parametrize("more", [{}, {SECTION: {"recipe": "zeropp"}}, {"zero_optimization": {"stage": 1}}])
def test_a_section_whose_name_is_misspelt(name, more):
    message = refusal(**{name: {"recipe": "zeropp"}, **more})
    assert message.startswith(f'"{name}" means nothing in a ds_config (did you mean "{SECTION}"?); rename or remove it')


def test_no_key_of_deepspeed_is_taken_for_it():
    from deepspeed.runtime import constants

    keys = {value for name, value in vars(constants).items() if name.isupper() and isinstance(value, str)}
    assert {"train_batch_size", "fp16", "bf16", "gradient_clipping"} <= keys
    assert resolve(ds_config(**{key: {} for key in keys})) is None


def test_config_error_is_public():
    assert zeropp_fp8.ConfigError is ConfigError and issubclass(ConfigError, ValueError)


# --- recipes ----------------------------------------------------------------------------------------------------

FP8_LM_O1 = {
    "compute.format": "fp8",
    "gradients.intra_format": "fp8_e4m3",
    "gradients.inter_format": "fp8_e4m3",
    "gradients.hadamard": False,
    "gradients.scales": "tensor",
    "gradients.store_format": "fp8_e4m3",
}
FP8_LM_O2 = {
    **FP8_LM_O1,
    "optimizer.master_format": "fp16",
    "optimizer.exp_avg_format": "fp8_e4m3",
    "optimizer.exp_avg_sq_format": "fp16",
}
FP8_LM = {
    **FP8_LM_O2,
    "weights.format": "fp8_e4m3",
    "partition": "whole_tensor",
    "activations.wire_format": "detect",
}


@pytest.mark.parametrize(
    ("recipe", "different"),
    [
        ("lossless", {}),
        ("zeropp", ZEROPP),
        ("zeropp-exact", {**ZEROPP, "weights.format": "none"}),
        (
            "zeropp-4bit",
            {
                **ZEROPP,
                "weights.format": "int4",
                "weights.block_size": 128,
                "weights.hadamard": True,
                "weights.difference": "none",
            },
        ),
        (
            "mxfp8",
            {
                "weights.format": "mxfp8_e4m3",
                "weights.block_size": 32,
                "secondary.scope": "node",
                "gradients.intra_format": "mxfp8_e4m3",
                "gradients.inter_format": "mxfp4",
                "gradients.block_size": 32,
                "gradients.hadamard": False,
                "compute.format": "mxfp8_e4m3",
                "compute.scaling": "mx",
            },
        ),
        ("fp8-lm-o1", FP8_LM_O1),
        ("fp8-lm-o2", FP8_LM_O2),
        ("fp8-lm", FP8_LM),
        (
            "fp8-lm-zeropp",
            {
                **FP8_LM,
                "secondary.scope": "node",
                "weights.difference": "exact",
                "gradients.intra_format": "int8",
                "gradients.inter_format": "int4",
                "gradients.hadamard": True,
                "gradients.scales": "block",
            },
        ),
    ],
)
def test_recipes(recipe, different):
    config = resolved({"recipe": recipe}, **BF16)
    assert config.recipe == recipe
    for path, value in {**DEFAULTS, **different}.items():
        assert values(config, path) == value, path
    assert config.quantizes_gradients == (recipe != "lossless")


def test_the_table_of_defaults_covers_every_field():
    def names(section):
        for name, value in section:
            parts = names(value) if hasattr(value, "model_fields_set") else ()
            yield from (f"{name}.{part}" for part in parts) if parts else (name,)

    fields = list(names(resolved({})))
    assert set(fields) - set(DEFAULTS) == {"recipe"}


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_field_set_by_hand_overrides_its_recipe_and_nothing_else(recipe):
    fields = {"weights": {"skip_modules": ["a"]}, "gather_granularity": "module"}
    base, config = (resolved({"recipe": recipe, **given}, **BF16) for given in ({}, fields))
    assert config.weights == base.weights.model_copy(update={"skip_modules": ["a"]})
    assert config == base.model_copy(update={"weights": config.weights, "gather_granularity": "module"})


@pytest.mark.parametrize(
    ("section", "path", "value"),
    [
        ({"weights": {"format": "none"}}, "weights.format", "none"),
        ({"weights": {"format": "fp8_e4m3"}}, "weights.format", "fp8_e4m3"),
        ({"weights": {"hadamard": True}}, "weights.hadamard", True),
        ({"weights": {"format": "none", "difference": "exact"}}, "weights.difference", "exact"),
        ({"secondary": {"scope": "rank"}}, "secondary.scope", "rank"),
        ({"secondary": {"scope": 2}}, "secondary.scope", 2),
        ({"secondary": {"memory_gb": "auto"}}, "secondary.memory_gb", "auto"),
        ({"secondary": {"memory_gb": "detect"}}, "secondary.memory_gb", "auto"),  # Accelerate refuses the word "auto"
        ({"gradients": {"accumulate_in": "detect"}}, "gradients.accumulate_in", "auto"),
        ({"trl_generation": "detect"}, "trl_generation", "auto"),
        ({"secondary": {"memory_gb": 8}}, "secondary.memory_gb", 8.0),
        ({"secondary": {"memory_gb": 0.5}}, "secondary.memory_gb", 0.5),
        ({"gradients": {"hadamard": False, "block_size": 34}}, "gradients.block_size", 34),
        ({"gradients": {"error_feedback": True}}, "gradients.error_feedback", True),
        ({"topology": {"ranks_per_node": 4}}, "topology.ranks_per_node", 4),
        ({"checkpoint": {"verify": False}}, "checkpoint.verify", False),
        ({"report": {"every": 0}}, "report.every", 0),
        ({"numerics": {"every": 50}}, "numerics.every", 50),
        ({"numerics": {"watch": "stop"}}, "numerics.watch", "stop"),
    ],
)
def test_fields_by_hand(section, path, value):
    assert values(resolved({"recipe": "zeropp", **section}, **BF16), path) == value


def test_the_result_cannot_be_changed_and_the_input_is_not():
    original = ds_config({"recipe": "zeropp", "weights": {"block_size": 128}}, {"zero_quantized_weights": True})
    before = copy.deepcopy(original)
    recipes = copy.deepcopy(RECIPES)
    config = resolve(original)
    assert original == before and recipes == RECIPES
    with pytest.raises(ValidationError):
        config.partition = "whole_tensor"
    with pytest.raises(ValidationError):
        config.weights.format = "int4"


@pytest.mark.parametrize(("recipe", "nearest"), [("zerop", "zeropp"), ("losless", "lossless"), ("4bit", "zeropp-4bit")])
def test_unknown_recipe_names_the_nearest(recipe, nearest):
    message = refusal({"recipe": recipe})
    assert f'"{SECTION}.recipe": there is no recipe {json.dumps(recipe)}' in message
    assert f'did you mean "{nearest}"' in message
    assert all(name in message for name in RECIPES)


@pytest.mark.parametrize("recipe", [3, True, ["zeropp"], {"name": "zeropp"}])
def test_recipe_of_a_wrong_type(recipe):
    assert f'"{SECTION}.recipe"' in refusal({"recipe": recipe})


# --- keys and types ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "where", "nearest"),
    [
        ({"wieghts": {}}, "wieghts", "weights"),
        ({"recipie": "zeropp"}, "recipie", "recipe"),
        ({"gather_granularty": "block"}, "gather_granularty", "gather_granularity"),
        ({"topology": {"ranks_pernode": 2}}, "topology.ranks_pernode", "ranks_per_node"),
        ({"weights": {"blocksize": 2}}, "weights.blocksize", "block_size"),
        ({"weights": {"fmt": "int8"}}, "weights.fmt", "format"),
        ({"secondary": {"scop": "node"}}, "secondary.scop", "scope"),
        ({"gradients": {"inter_fromat": "int4"}}, "gradients.inter_fromat", "inter_format"),
        ({"optimizer": {"exp_avg_sq": "fp32"}}, "optimizer.exp_avg_sq", "exp_avg_sq_format"),
        ({"frozen": {"double_quant": False}}, "frozen.double_quant", "double_quantize"),
        ({"report": {"evry": 1}}, "report.evry", "every"),
    ],
)
def test_unknown_key_names_the_nearest(section, where, nearest):
    message = refusal(section)
    assert f'"{SECTION}.{where}": unknown key (did you mean "{nearest}"?)' in message


@pytest.mark.parametrize(
    "where",
    [
        "seed",
        *(f"{part}.scale_mode" for part in ("weights", "gradients", "compute", "frozen")),
        *(f"{part}.rounding" for part in ("weights", "gradients", "compute", "optimizer")),
        *(f"gradients.{name}" for name in ("scale_policy", "amax_history", "reduction")),
        *(f"compute.{name}" for name in ("amax_history", "amax_reduction", "evaluate_in")),
        *(f"optimizer.{name}" for name in ("block_size", "expand_range")),
    ],
)
def test_a_key_of_earlier_versions_is_unknown(where):
    *parents, last = where.split(".")
    section = {last: "nearest"}
    for part in reversed(parents):
        section = {part: section}
    assert f'"{SECTION}.{where}": unknown key' in refusal(section)


def test_unknown_key_lists_the_keys_there():
    message = refusal({"weights": {"zzz": 1}})
    keys = "format, block_size, hadamard, skip_modules, difference"
    assert message == f'"{SECTION}.weights.zzz": unknown key; keys here are {keys}'


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            {"block_size": 3},
            'belongs to "{S}.weights" or "{S}.gradients" or "{S}.frozen"; keys here are enabled, recipe',
        ),
        ({"every": 3}, 'belongs to "{S}.report" or "{S}.numerics"; keys here are'),
        ({"weights": {"recipe": "zeropp"}}, 'belongs to "{S}"; keys here are format, block_size'),
        ({"gradients": {"format": "int4"}}, '"{S}.frozen"; keys here are intra_format, inter_format'),
    ],
)
def test_a_key_at_another_level(section, said):
    message = refusal({"recipe": "zeropp", **section})
    assert "unknown key; it belongs to" in message and said.replace("{S}", SECTION) in message


def test_every_mistake_is_reported_at_once():
    message = refusal({"weights": {"blocksize": 2, "hadamard": 1}, "partition": "slices"})
    assert all(f'"{SECTION}.{key}"' in message for key in ("weights.blocksize", "weights.hadamard", "partition"))


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("enabled", [0, 1, "true", None]),
        ("topology", [4, "detect", None]),
        ("topology.ranks_per_node", ["two", 0, -1, 2.0, True, None]),
        ("weights", ["int8", None]),
        ("weights.format", [8, None, ["int8"], True]),
        ("weights.block_size", ["128", 128.0, 0, 1, -2, True, None]),
        ("weights.hadamard", [1, "yes", None]),
        ("weights.difference", ["int4", 4, True, None, ["exact"]]),
        ("secondary", ["node"]),
        ("secondary.scope", ["nodes", 0, -1, True, 2.0, None]),
        ("secondary.memory_gb", ["8", "none", -1, float("inf"), float("nan"), True, None]),
        ("gradients", ["int8", []]),
        ("gradients.intra_format", [8, None]),
        ("gradients.inter_format", [4, None]),
        ("gradients.block_size", ["128", 0, 1 << 21]),
        ("gradients.hadamard", [0]),
        ("gradients.error_feedback", [1, "int8"]),
        ("gradients.store_format", [8]),
        ("gradients.scales", ["row", 1, None]),
        ("gradients.accumulate_in", ["rank", 2, None]),
        ("compute.format", [8, None]),
        ("compute.scaling", ["tensor"]),
        ("weights.skip_modules", ["lm_head", [1]]),
        ("gradients.skip_modules", ["lm_head", [1]]),
        ("compute.skip_modules", ["lm_head", [1]]),
        ("compute.high_precision_gemms", ["output", ["forward"], {"grad": ["a"]}, {"output": "a"}]),
        ("optimizer.master_format", [16]),
        ("optimizer.scales", ["row"]),
        ("partition_split", ["large", 1]),
        ("partition", ["slices", 1]),
        ("frozen.modules", ["all", [1]]),
        ("frozen.block_size", [64.0]),
        ("frozen.double_quantize", [1]),
        ("activations.wire_format", [8, "int8", None]),
        ("gather_granularity", ["layer"]),
        ("compile", ["model", True]),
        ("checkpoint.verify", [0, "no", None]),
        ("report.every", [-1, 1.5, "100"]),
        ("numerics.every", [-1, 0.5, "1"]),
        ("numerics.parts", [0, 1.5]),
        ("numerics.file", [1, None]),
        ("numerics.watch", ["fall back", True]),
        ("numerics.spike", [0, "8", float("inf")]),
    ],
)
def test_wrong_type_or_value(path, wrong):
    """The message quotes the key as the user would write it, and no key that does not exist."""
    *groups, last = path.split(".")
    for value in wrong:
        section = {last: value}
        for group in reversed(groups):
            section = {group: section}
        message = refusal(section)
        (named,) = set(re.findall(rf'"({SECTION}\.[^"]+)"', message))
        inside = next(iter(value), "") if isinstance(value, dict) else ""
        assert named in (f"{SECTION}.{path}", f"{SECTION}.{path}.{inside}"), message
        assert inside or json.dumps(value) in message


@pytest.mark.parametrize(
    ("section", "taken"),
    [
        ({"secondary": {"memory_gb": "lots"}}, "one of all, auto, detect or a number at least 0"),
        ({"secondary": {"scope": "lots"}}, "one of none, node, rank or a whole number at least 1"),
        ({"topology": {"ranks_per_node": "lots"}}, "detect or a whole number at least 1"),
        ({"gradients": {"accumulate_in": "lots"}}, "one of auto, detect, node, world"),
        ({"trl_generation": "lots"}, "one of auto, detect, values, codes, sharded, stock"),
        ({"frozen": {"modules": "lots"}}, "one of all-linear, frozen or a list of texts"),
    ],
)
def test_a_wrong_word_names_all_that_is_taken(section, taken):
    assert refusal(section).endswith(f': "lots" is not allowed; it takes {taken}')


# --- reading ----------------------------------------------------------------------------------------------------


def test_ds_config_from_a_dict_a_path_or_a_string(tmp_path):
    config = ds_config({"recipe": "zeropp"})
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    for source in (config, path, str(path), json.dumps(config)):
        loaded = load_ds_config(source)
        assert loaded == config
        loaded["zero_optimization"]["stage"] = 1
        assert config["zero_optimization"]["stage"] == 3


def test_ds_config_as_base64_and_with_comments(tmp_path):
    """The other two forms that DeepSpeed reads."""
    text = json.dumps(ds_config({"recipe": "zeropp"}))
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    assert resolve(load_ds_config(encoded)).recipe == "zeropp"
    path = tmp_path / "commented.json"
    path.write_text("# a comment\n" + text)
    assert load_ds_config(str(path)) == load_ds_config(text)
    with pytest.raises(ConfigError, match="neither a file nor base64"):
        load_ds_config("no/such/file.json")


TWICE = '{"bf16": {"enabled": true, "enabled": false}}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"bf16": ', "Expecting"),
        ("[]", "holds a list; it must be an object"),
        ("[[1, 2]]", "holds a list; it must be an object"),
        (TWICE, 'duplicate keys "enabled"; leave one of each'),
        ('{"a": 1, "b": 2, "b": 3, "a": 4}', 'duplicate keys "a", "b"; leave one of each'),
    ],
)
def test_ds_config_that_is_broken(tmp_path, text, said):
    """Wherever it comes from; of a file its name is said."""
    path = tmp_path / "ds.json"
    path.write_text(text)
    for source in (str(path), path, base64.urlsafe_b64encode(text.encode()).decode()):
        with pytest.raises(ConfigError, match=re.escape(said)) as raised:
            load_ds_config(source)
        assert ("ds.json" in str(raised.value)) == (str(source) == str(path)) and "\n" not in str(raised.value)


def test_ds_config_that_is_no_file_and_no_object(tmp_path):
    with pytest.raises(ConfigError, match=re.escape("an object or the path of a file with one, got [3]")):
        load_ds_config([3])
    with pytest.raises(ConfigError, match=f"{tmp_path}.* cannot be read"):
        load_ds_config(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary.* cannot be read"):
        load_ds_config(tmp_path / "binary")
