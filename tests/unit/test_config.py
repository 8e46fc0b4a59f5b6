"""Every rule of the `zeropp_fp8` section: what it resolves to, and what each refusal says."""

import base64
import copy
import json
import re

import pytest
from pydantic import ValidationError

import zeropp_fp8
from zeropp_fp8.config import (
    IN_TREE_KEYS,
    RECIPES,
    SECTION,
    WIRE_FORMATS,
    ConfigError,
    asks_for_plugin,
    check_topology,
    find_ranks_per_node,
    in_tree_keys,
    load_ds_config,
    resolve,
    secondary_ranks,
    without_in_tree_keys,
)
from zeropp_fp8.config.sections import ELSEWHERE, FROZEN_FORMATS


def ds_config(section=None, zero=None, **others):
    """A stage-3 ds_config with this section, these zero_optimization keys and these top-level keys."""
    config = {"zero_optimization": {"stage": 3, **(zero or {})}, **others}
    return config if section is None else {**config, SECTION: section}


def resolved(section=None, zero=None, **others):
    return resolve(ds_config(section, zero, **others))


def refusal(section=None, zero=None, **others):
    """The message of the ConfigError."""
    with pytest.raises(ConfigError) as error:
        resolved(section, zero, **others)
    return str(error.value)


def values(config, path):
    for part in path.split("."):
        config = getattr(config, part)
    return config


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


@pytest.mark.parametrize("section", ["zeropp", True, ["zeropp"], 3])
def test_section_must_be_an_object(section):
    message = refusal(section)
    assert f'"{SECTION}" must be an object' in message and '{"recipe": "zeropp"}' in message


def test_config_error_is_public():
    assert zeropp_fp8.ConfigError is ConfigError and issubclass(ConfigError, ValueError)


# --- recipes ----------------------------------------------------------------------------------------------------

DEFAULTS = {
    "enabled": True,
    "topology.ranks_per_node": "detect",
    "weights.format": "none",
    "weights.block_size": 256,
    "weights.hadamard": False,
    "weights.rounding": "nearest",
    "weights.scale_mode": "rceil",
    "secondary.scope": "none",
    "gradients.intra_format": "none",
    "gradients.inter_format": "none",
    "gradients.block_size": 128,
    "gradients.hadamard": True,
    "gradients.rounding": "nearest",
    "gradients.scale_mode": "rceil",
    "gradients.error_feedback": False,
    "gradients.scales": "block",
    "gradients.scale_policy": "auto",
    "gradients.amax_history": 16,
    "gradients.store_format": "none",
    "gradients.reduction": "two_hop",
    "compute.format": "none",
    "compute.scaling": "delayed",
    "compute.amax_history": 16,
    "compute.amax_reduction": "max",
    "compute.scale_mode": "rceil",
    "compute.rounding": "nearest",
    "compute.min_features": 64,
    "compute.evaluate_in": "compute_format",
    "compute.allow_fp16": False,
    "compute.skip_modules": ["lm_head"],
    "optimizer.master_format": "fp32",
    "optimizer.exp_avg_format": "fp32",
    "optimizer.exp_avg_sq_format": "fp32",
    "optimizer.scales": "tensor",
    "optimizer.block_size": 128,
    "optimizer.rounding": "nearest",
    "optimizer.expand_range": False,
    "partition": "slice",
    "partition_split": "balance",
    "frozen.modules": "all-linear",
    "frozen.format": "none",
    "frozen.block_size": 64,
    "frozen.double_quantize": False,
    "frozen.scale_mode": "rceil",
    "frozen.skip_modules": ["lm_head", "*embed*", "score", "classifier", "v_head"],
    "activations.wire_format": "none",
    "gather_granularity": "block",
    "report.every": 100,
}
ZEROPP = {
    "weights.format": "int8",
    "secondary.scope": "node",
    "gradients.intra_format": "int8",
    "gradients.inter_format": "int4",
}
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
        ("zeropp-4bit", {**ZEROPP, "weights.format": "int4", "weights.block_size": 128, "weights.hadamard": True}),
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
    ],
)
def test_recipes(recipe, different):
    config = resolved({"recipe": recipe})
    assert config.recipe == recipe
    for path, value in {**DEFAULTS, **different}.items():
        assert values(config, path) == value, path
    assert config.quantizes_gradients == (recipe != "lossless")


def test_the_table_above_covers_every_field():
    fields = []
    for name, value in resolved({}):
        fields += [f"{name}.{part}" for part, _ in value] if hasattr(value, "model_fields_set") else [name]
    assert set(fields) - set(DEFAULTS) == {"recipe", "seed"}


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_field_set_by_hand_overrides_its_recipe_and_nothing_else(recipe):
    base = resolved({"recipe": recipe})
    config = resolved({"recipe": recipe, "weights": {"rounding": "stochastic"}, "gather_granularity": "module"})
    assert config.weights == base.weights.model_copy(update={"rounding": "stochastic"})
    assert config == base.model_copy(update={"weights": config.weights, "gather_granularity": "module"})


@pytest.mark.parametrize(
    ("section", "path", "value"),
    [
        ({"weights": {"format": "none"}}, "weights.format", "none"),
        ({"weights": {"format": "fp8_e4m3"}}, "weights.format", "fp8_e4m3"),
        ({"weights": {"rounding": "stochastic"}}, "weights.rounding", "stochastic"),
        ({"secondary": {"scope": "rank"}}, "secondary.scope", "rank"),
        ({"secondary": {"scope": 2}}, "secondary.scope", 2),
        ({"gradients": {"hadamard": False, "block_size": 34}}, "gradients.block_size", 34),
        ({"gradients": {"error_feedback": True}}, "gradients.error_feedback", True),
        ({"topology": {"ranks_per_node": 4}}, "topology.ranks_per_node", 4),
        ({"report": {"every": 0}}, "report.every", 0),
        ({"seed": 7}, "seed", 7),
    ],
)
def test_fields_by_hand(section, path, value):
    assert values(resolved({"recipe": "zeropp", **section}), path) == value


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
    assert f'"{SECTION}.recipe": there is no recipe {recipe!r}' in message
    assert f'did you mean "{nearest}"' in message
    assert all(name in message for name in RECIPES)


@pytest.mark.parametrize("recipe", [3, True, ["zeropp"], {"name": "zeropp"}])
def test_recipe_of_a_wrong_type(recipe):
    assert f'"{SECTION}.recipe"' in refusal({"recipe": recipe})


# --- the four keys of DeepSpeed ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "different"),
    [
        ({"zero_quantized_weights": True}, {"weights.format": "int8"}),
        (
            {"zero_quantized_gradients": True},
            {"gradients.intra_format": "int8", "gradients.inter_format": "int4"},
        ),
        ({"zero_hpz_partition_size": 4}, {"secondary.scope": 4}),
        (
            {"zero_quantized_nontrainable_weights": True},
            {"frozen.format": "int8", "frozen.block_size": 256, "frozen.modules": "frozen"},
        ),
        (
            {"zero_quantized_weights": True, "zero_hpz_partition_size": 2, "zero_quantized_gradients": True},
            {**ZEROPP, "secondary.scope": 2},
        ),
        ({"zero_quantized_weights": True, "zero_hpz_partition_size": 1}, {"weights.format": "int8"}),
    ],
)
@pytest.mark.parametrize("section", [None, {}, {"report": {"every": 100}}])
def test_in_tree_keys_alone_activate_exactly_what_they_ask(section, keys, different):
    config = resolved(section, keys)
    for path, value in {**DEFAULTS, **different}.items():
        assert values(config, path) == value, path


@pytest.mark.parametrize(
    ("section", "key", "value", "field"),
    [
        ({"recipe": "zeropp"}, "zero_quantized_weights", False, "weights.format"),
        ({"recipe": "zeropp"}, "zero_quantized_gradients", False, "gradients.inter_format"),
        ({"recipe": "zeropp"}, "zero_hpz_partition_size", 1, "secondary.scope"),
        ({"recipe": "lossless"}, "zero_quantized_weights", True, "weights.format"),
        ({"recipe": "lossless"}, "zero_quantized_gradients", True, "gradients.inter_format"),
        ({"recipe": "lossless"}, "zero_hpz_partition_size", 2, "secondary.scope"),
        ({"recipe": "zeropp"}, "zero_quantized_nontrainable_weights", True, "frozen.format"),
        ({"frozen": {"format": "int8"}}, "zero_quantized_nontrainable_weights", False, "frozen.format"),
        ({"weights": {"format": "none"}}, "zero_quantized_weights", True, "weights.format"),
        ({"weights": {"format": "int8"}}, "zero_quantized_weights", False, "weights.format"),
        ({"gradients": {"intra_format": "int8"}}, "zero_quantized_gradients", False, "gradients.inter_format"),
        ({"secondary": {"scope": 2}}, "zero_hpz_partition_size", 4, "secondary.scope"),
        ({"secondary": {"scope": "none"}}, "zero_hpz_partition_size", 4, "secondary.scope"),
        ({"secondary": {"scope": "rank"}}, "zero_hpz_partition_size", 4, "secondary.scope"),
    ],
)
def test_a_key_that_contradicts_the_section_is_refused(section, key, value, field):
    message = refusal(section, {key: value})
    assert f'"zero_optimization.{key}": {json.dumps(value)} contradicts "{SECTION}.{field}"' in message
    assert "remove one of the two" in message
    assert ('(from recipe "' in message) == ("recipe" in section)


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ({"recipe": "zeropp"}, {"zero_quantized_weights": True, "zero_quantized_gradients": True}),
        ({"recipe": "zeropp-4bit"}, {"zero_quantized_weights": True}),
        ({"recipe": "lossless"}, IN_TREE_KEYS),
        ({"secondary": {"scope": 4}}, {"zero_hpz_partition_size": 4}),
        ({"weights": {"format": "int4"}}, {"zero_quantized_weights": True}),
    ],
)
def test_a_key_that_agrees_with_the_section_changes_nothing(section, keys):
    assert resolved(section, keys) == resolved(section)


def ranks_that_share(hpz, ranks_per_node):
    """How many ranks share a secondary copy with recipe zeropp, whose scope is the node, and this hpZ size."""
    config = resolved({"recipe": "zeropp"}, {"zero_hpz_partition_size": hpz})
    check_topology(config, 2 * ranks_per_node, ranks_per_node)
    return secondary_ranks(config, ranks_per_node)


@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_hpz_of_a_whole_node_agrees_with_scope_node(ranks_per_node):
    assert ranks_that_share(ranks_per_node, ranks_per_node) == ranks_per_node


@pytest.mark.parametrize(("hpz", "ranks_per_node"), [(3, 4), (4, 2), (8, 4)])
def test_hpz_that_does_not_divide_a_node_is_refused_beside_a_recipe_too(hpz, ranks_per_node):
    with pytest.raises(ConfigError, match="zero_hpz_partition_size"):
        ranks_that_share(hpz, ranks_per_node)


def test_hpz_of_part_of_a_node_is_never_ignored():
    """Beside scope "node" it is either honoured (the key was set by hand) or a contradiction."""
    try:
        shared = ranks_that_share(2, 4)
    except ConfigError as error:
        assert "zero_hpz_partition_size" in str(error)
    else:
        assert shared == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[(key, value) for key in IN_TREE_KEYS if key.startswith("zero_quantized") for value in (1, "true", None, [])],
        *[("zero_hpz_partition_size", value) for value in (0, -2, 2.0, "2", True, None)],
    ],
)
@pytest.mark.parametrize("section", [{}, {"recipe": "zeropp"}])
def test_wrong_type_of_an_in_tree_key(section, key, value):
    message = refusal(section, {key: value})
    assert f'"zero_optimization.{key}" must be' in message and repr(value) in message


def test_deepspeed_does_not_see_the_four_keys():
    config = ds_config({"recipe": "zeropp"}, {**dict.fromkeys(IN_TREE_KEYS, 2), "overlap_comm": True}, bf16={})
    before = copy.deepcopy(config)
    assert in_tree_keys(config) == dict.fromkeys(IN_TREE_KEYS, 2)
    assert without_in_tree_keys(config) == ds_config({"recipe": "zeropp"}, {"overlap_comm": True}, bf16={})
    assert config == before
    assert without_in_tree_keys({"bf16": {}}) == {"bf16": {}}


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


def test_unknown_key_lists_the_keys_there():
    message = refusal({"weights": {"zzz": 1}})
    assert (
        message
        == f'"{SECTION}.weights.zzz": unknown key; keys here are format, block_size, hadamard, rounding, scale_mode'
    )


def test_every_mistake_is_reported_at_once():
    message = refusal({"weights": {"blocksize": 2, "hadamard": 1}, "partition": "slices"})
    assert all(f'"{SECTION}.{key}"' in message for key in ("weights.blocksize", "weights.hadamard", "partition"))


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("enabled", [0, 1, "true", None]),
        ("seed", [-1, 1.0, "0", True]),
        ("topology", [4, "detect", None]),
        ("topology.ranks_per_node", ["two", 0, -1, 2.0, True, None]),
        ("weights", ["int8", None]),
        ("weights.format", [8, None, ["int8"], True]),
        ("weights.block_size", ["128", 128.0, 0, 1, -2, True, None]),
        ("weights.hadamard", [1, "yes", None]),
        ("weights.rounding", ["up", 1, None]),
        ("secondary", ["node"]),
        ("secondary.scope", ["nodes", 0, -1, True, 2.0, None]),
        ("gradients", ["int8", []]),
        ("gradients.intra_format", [8, None]),
        ("gradients.inter_format", [4, None]),
        ("gradients.block_size", ["128", 0, 1 << 21]),
        ("gradients.hadamard", [0]),
        ("gradients.rounding", ["stochastically"]),
        ("gradients.error_feedback", [1, "int8"]),
        ("gradients.store_format", [8]),
        ("gradients.scale_policy", ["post-scale", 2]),
        ("gradients.scales", ["row", 1, None]),
        ("gradients.amax_history", [0, 1.5, "16"]),
        ("gradients.reduction", ["ring", 2]),
        ("compute.format", [8, None]),
        ("compute.scaling", ["tensor"]),
        ("compute.amax_history", [0, 1.5]),
        ("compute.skip_modules", ["lm_head", [1]]),
        ("optimizer.master_format", [16]),
        ("optimizer.scales", ["row"]),
        ("optimizer.block_size", [1, 128.0, "128"]),
        ("optimizer.rounding", ["half_away", 1]),
        ("optimizer.expand_range", [1, "true"]),
        ("partition_split", ["rows", 1]),
        ("partition", ["slices", 1]),
        ("frozen.modules", ["all", [1]]),
        ("frozen.block_size", [64.0]),
        ("frozen.double_quantize", [1]),
        ("activations.wire_format", [8, "int8", None]),
        ("gather_granularity", ["layer"]),
        ("report.every", [-1, 1.5, "100"]),
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
        named = set(re.findall(rf'"({SECTION}\.[^"]+)"', message))
        assert named == {f"{SECTION}.{path}"}, message
        bad = value[0] if isinstance(value, list) and value and not isinstance(value[0], str) else value
        assert repr(bad) in message


# --- combinations -----------------------------------------------------------------------------------------------

FORMAT_FIELDS = ("weights.format", "gradients.intra_format", "gradients.inter_format", "frozen.format")


@pytest.mark.parametrize("field", FORMAT_FIELDS)
@pytest.mark.parametrize("name", [*ELSEWHERE, "int9", "INT8", "fp8"])
def test_format_that_is_not_there(field, name):
    group, key = field.split(".")
    there = FROZEN_FORMATS if group == "frozen" else WIRE_FORMATS
    if name in there:
        return
    message = refusal({group: {key: name}})
    assert f'"{SECTION}.{field}"' in message and name in message
    assert all(known in message for known in there)
    assert name not in ELSEWHERE or ELSEWHERE[name] in message
    if name == "int9":
        assert re.search(r'did you mean "int[48]"', message)


@pytest.mark.parametrize(
    ("field", "name"),
    [*((field, name) for field in FORMAT_FIELDS[:3] for name in WIRE_FORMATS)]
    + [("frozen.format", name) for name in FROZEN_FORMATS],
)
def test_format_that_is_there(field, name):
    group, key = field.split(".")
    assert values(resolved({group: {key: name}}), field) == name


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (
            {"weights": {"format": "int4", "block_size": 48, "hadamard": True}},
            ['"zeropp_fp8.weights.block_size": 48', "multiple of 32", "use 64"],
        ),
        (
            {"recipe": "zeropp", "gradients": {"block_size": 100}},
            ['"zeropp_fp8.gradients.block_size": 100', "multiple of 32", "use 128"],
        ),
        ({"weights": {"block_size": 33}}, ['"zeropp_fp8.weights.block_size"', "must be even", "33"]),
        (
            {"gradients": {"block_size": 33, "hadamard": False}},
            ['"zeropp_fp8.gradients.block_size"', "must be even", "33"],
        ),
        ({"frozen": {"format": "fp8_e5m2"}}, ['"zeropp_fp8.frozen.format"', "fp8_e5m2", "nf4, fp8_e4m3"]),
        ({"frozen": {"format": "int4", "block_size": 33}}, ['"zeropp_fp8.frozen.block_size"', "must be even", "33"]),
        (
            {"gradients": {"error_feedback": True}},
            ['"zeropp_fp8.gradients.error_feedback"', 'set "gradients.inter_format"', "remove error_feedback"],
        ),
        ({"compute": {"format": {"weights": "mxfp4"}}}, ['"zeropp_fp8.compute.format"', '"activations" is missing']),
        ({"compute": {"format": "fp9"}}, ['"zeropp_fp8.compute.format"', 'did you mean "fp8"']),
        ({"compute": {"format": "fp8", "scaling": "mx"}}, ['"zeropp_fp8.compute.scaling"', "use an MX format"]),
        ({"compute": {"format": "mxfp4", "scaling": "block"}}, ['"zeropp_fp8.compute.scaling"', 'use "scaling": "mx"']),
        (
            {"weights": {"format": "mxfp4", "block_size": 64}},
            ['"zeropp_fp8.weights.block_size": 64', "mxfp4", "remove it"],
        ),
        ({"weights": {"format": "mxint8", "hadamard": True}}, ['"zeropp_fp8.weights.hadamard"', "not rotated"]),
        (
            {"gradients": {"inter_format": "mxfp4", "hadamard": True}},
            ['"zeropp_fp8.gradients.hadamard"', "not rotated"],
        ),
        ({"frozen": {"format": "mxfp4", "block_size": 64}}, ['"zeropp_fp8.frozen.block_size": 64', "remove it"]),
        ({"frozen": {"double_quantize": True}}, ['"zeropp_fp8.frozen.double_quantize"', "there are no scales"]),
        (
            {"frozen": {"format": "mxfp4", "double_quantize": True}},
            ['"zeropp_fp8.frozen.double_quantize"', "mxfp4", "8 bits already", "int4, int8, nf4 or fp8_e4m3"],
        ),
    ],
)
def test_impossible_within_the_section(section, words):
    message = refusal(section)
    assert all(word in message for word in words), message


SHARED = {"intra_format": "fp8_e4m3", "inter_format": "fp8_e4m3", "scales": "tensor"}
FP8_MOMENT = {"exp_avg_format": "fp8_e4m3"}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"gradients": {"store_format": "int8"}}, ['gradients.store_format"', "'int8'", "fp8_e4m3, fp8_e5m2"]),
        ({"gradients": {"store_format": "fp8_e4m3"}}, ['gradients.store_format"', 'set "intra_format" and']),
        (
            {"recipe": "zeropp", "gradients": {"store_format": "fp8_e4m3", "block_size": 96}},
            ['gradients.block_size": 96', "16, 32, 64", "store_format to none"],
        ),
        ({"gradients": {"scales": "tensor"}}, ['gradients.scales"', 'intra_format "none"', 'both to "fp8_e4m3"']),
        (
            {"gradients": {**SHARED, "inter_format": "int4"}},
            ['gradients.scales"', 'inter_format "int4"', 'both to "fp8_e4m3"', 'scales to "block"'],
        ),
        (
            {"gradients": {**SHARED, "inter_format": "fp8_e5m2"}},
            ['gradients.scales"', "one FP8 format on both hops", 'inter_format "fp8_e5m2"'],
        ),
        ({"recipe": "zeropp", "gradients": {"scales": "tensor"}}, ['gradients.scales"', 'intra_format "int8"']),
        ({"gradients": {**SHARED, "hadamard": True}}, ['gradients.hadamard"', "remove it", 'scales to "block"']),
        ({"gradients": {**SHARED, "rounding": "stochastic"}}, ['gradients.rounding"', 'scales to "block"']),
        ({"gradients": {**SHARED, "error_feedback": True}}, ['gradients.error_feedback"', 'scales to "block"']),
        ({"gradients": {**SHARED, "block_size": 64}}, ['gradients.block_size"', 'scales to "block"']),
        (
            {"gradients": {**SHARED, "store_format": "fp8_e5m2"}},
            ['gradients.store_format"', '"fp8_e5m2" differs', '"fp8_e4m3"', "use that one or none"],
        ),
        ({"gradients": {"scale_policy": "pre"}}, ['gradients.scale_policy"', 'set "scales": "tensor" or remove it']),
        ({"gradients": {"amax_history": 4}}, ['gradients.amax_history"', 'set "scales": "tensor" or remove it']),
        ({"gradients": {"reduction": "nccl"}}, ['gradients.reduction"', '"scales": "tensor"', '"two_hop"']),
        *[
            (
                {"optimizer": {f"{name}_format": "fp9"}},
                [f'optimizer.{name}_format"', 'did you mean "fp', "fp32, bf16, fp16, fp8_e4m3, fp8_e5m2"],
            )
            for name in ("master", "exp_avg", "exp_avg_sq")
        ],
        ({"optimizer": {"master_format": "int8"}}, ['optimizer.master_format"', "'int8'"]),
        *[
            ({"optimizer": {**FP8_MOMENT, "block_size": size}}, [f'optimizer.block_size": {size}', "16, 32, 64"])
            for size in (8, 48, 2048)
        ],
        ({"optimizer": {**FP8_MOMENT, "block_size": 64}}, ['optimizer.block_size"', 'set "scales": "block"']),
        (
            {"optimizer": {"exp_avg_format": "fp16", "expand_range": True}},
            ['optimizer.expand_range"', 'exp_avg_format is "fp16"', "store a moment in fp8_e4m3"],
        ),
        ({"optimizer": {"expand_range": True}}, ['optimizer.expand_range"', "remove expand_range"]),
        ({"optimizer": {"rounding": "stochastic"}}, ['optimizer.rounding"', "all states are fp32", "remove it"]),
        ({"optimizer": {"scales": "block"}}, ['optimizer.scales"', "all states are fp32", "remove it"]),
        ({"partition": "whole_tensor"}, ['partition": "whole_tensor"', "gradients.intra_format", "fp8_e4m3"]),
        (
            {"recipe": "zeropp", "partition": "whole_tensor", "gradients": {"error_feedback": True}},
            ['partition": "whole_tensor"', "gradients.error_feedback", "remove one"],
        ),
        (
            {"recipe": "fp8-lm", "gradients": {"reduction": "nccl"}},
            ['partition": "whole_tensor"', "nccl", 'use "two_hop"'],
        ),
        ({"partition_split": "none"}, ['partition_split"', '"partition": "whole_tensor"', "remove it"]),
    ],
)
def test_impossible_with_states_and_shared_scales(section, words):
    message = refusal(section)
    assert f'"{SECTION}.' in message and all(word in message for word in words), message


def test_states_and_shared_scales_that_are_possible():
    config = resolved({"gradients": {**SHARED, "scale_policy": "post", "amax_history": 3}})
    assert not config.gradients.hadamard and config.gradients.store_format == "none" and config.quantizes_gradients
    assert not config.stores_states_in_low_precision and config.gradients.amax_history == 3
    fields = {**FP8_MOMENT, "scales": "block", "block_size": 64, "rounding": "stochastic", "expand_range": True}
    config = resolved({"optimizer": fields})
    assert config.stores_states_in_low_precision and config.quantizes and not config.quantizes_gradients
    config = resolved({"recipe": "zeropp", "gradients": {"store_format": "fp8_e4m3"}})
    assert config.gradients.scales == "block" and config.gradients.store_format == "fp8_e4m3"
    # A recipe's formats can be replaced one by one, as the paper's ablation does.
    config = resolved({"recipe": "fp8-lm-o2", "optimizer": {"master_format": "fp8_e4m3"}})
    assert config.optimizer.exp_avg_sq_format == "fp16" and config.optimizer.master_format == "fp8_e4m3"


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"optimizer": FP8_MOMENT}, "zeropp_fp8.optimizer"),
        ({"recipe": "fp8-lm-o1"}, "zeropp_fp8.gradients.store_format"),
        ({"recipe": "fp8-lm-o2"}, "zeropp_fp8.optimizer"),
    ],
)
def test_states_in_low_precision_and_offload(section, field):
    message = refusal(section, {"offload_optimizer": {"device": "cpu"}})
    assert '"zero_optimization.offload_optimizer"' in message and f'"{field}"' in message
    assert "remove one of the two" in message
    assert resolved(section, {"offload_optimizer": {"device": "none"}}) == resolved(section)


@pytest.mark.parametrize("key", ["offload_param", "offload_optimizer"])
def test_whole_tensors_and_offload(key):
    section = {"recipe": "zeropp", "partition": "whole_tensor"}
    message = refusal(section, {key: {"device": "cpu"}})
    assert f'"zero_optimization.{key}"' in message and 'partition": "whole_tensor"' in message
    assert "remove one of the two" in message
    assert resolved(section, {key: {"device": "none"}}) == resolved(section)


def test_activations_on_the_wire_and_autotp():
    section = {"activations": {"wire_format": "fp8"}}
    message = refusal(section, tensor_parallel={"autotp_size": 2})
    assert '"zeropp_fp8.activations.wire_format"' in message and '"tensor_parallel.autotp_size"' in message
    assert 'set it to "none"' in message
    assert resolved(section, tensor_parallel={"autotp_size": 1}).activations.wire_format == "fp8"
    resolved({"activations": {"wire_format": "detect"}}, tensor_parallel={"autotp_size": 2})


def test_mx_formats_fix_blocks_and_scaling_where_nothing_was_asked():
    config = resolved({"weights": {"format": "mxfp6_e3m2"}, "compute": {"format": "mxfp4"}})
    assert (config.weights.block_size, config.weights.hadamard, config.compute.scaling) == (32, False, "mx")
    # The other hop has blocks of its own, and a rotation.
    gradients = resolved({"gradients": {"intra_format": "mxfp8_e4m3", "inter_format": "int4"}}).gradients
    assert (gradients.block_size, gradients.hadamard) == (128, True)
    recipe = resolved({"recipe": "mxfp8", "compute": {"format": "fp8"}})
    assert recipe.compute.scaling == "delayed" and recipe.weights.format == "mxfp8_e4m3"


def test_fp16_with_low_precision_compute():
    message = refusal({"compute": {"format": "fp8"}}, fp16={"enabled": True})
    assert '"zeropp_fp8.compute.format"' in message and '"zeropp_fp8.compute.allow_fp16"' in message
    assert resolved({"compute": {"format": "fp8", "allow_fp16": True}}, fp16={"enabled": True}).quantizes


@pytest.mark.parametrize(
    ("zero", "others", "words"),
    [
        ({"stage": 0}, {}, ['"zero_optimization.stage" is 0', "set it to 3"]),
        ({"stage": 2}, {}, ['"zero_optimization.stage" is 2', "set it to 3"]),
        ({"stage": None}, {}, ['"zero_optimization.stage" is null', "set it to 3"]),
        ({"stage": "3"}, {}, ['"zero_optimization.stage" is "3"', "set it to 3"]),
        ({"offload_param": {"device": "nvme"}}, {}, ['"zero_optimization.offload_param.device"', 'supports "cpu"']),
        (
            {"offload_optimizer": {"device": "nvme"}},
            {},
            ['"zero_optimization.offload_optimizer.device"', 'supports "cpu"'],
        ),
        ({"zenflow": {"topk_ratio": 0.1}}, {}, ['"zero_optimization.zenflow"', "remove one of the two"]),
        ({"zenflow": {}}, {}, ['"zero_optimization.zenflow"', "remove one of the two"]),
        (
            {"offload_optimizer": {"device": "cpu", "super_offload": True}},
            {},
            ['"zero_optimization.offload_optimizer.super_offload"', "remove one of the two"],
        ),
        ({}, {"compile": {"deepcompile": True}}, ['"compile.deepcompile"', "remove one of the two"]),
        ({}, {"hybrid_engine": {"enabled": True}}, ['"hybrid_engine.enabled"', "remove one of the two"]),
        (
            {"use_all_reduce_for_fetch_params": True},
            {},
            ['"zero_optimization.use_all_reduce_for_fetch_params"', "remove one of the two"],
        ),
        ({"mics_shard_size": 2}, {}, ['"zero_optimization.mics_shard_size"', "remove one of the two"]),
        ({"reduce_scatter": False}, {}, ['"zero_optimization.reduce_scatter": false', "set it to true"]),
        ({}, {"prescale_gradients": True}, ['"prescale_gradients"', "remove them"]),
        ({}, {"gradient_predivide_factor": 2.0}, ['"gradient_predivide_factor"', "remove them"]),
    ],
)
@pytest.mark.parametrize("in_tree", [False, True], ids=["section", "keys"])
def test_impossible_with_the_rest_of_the_ds_config(in_tree, zero, others, words):
    section, keys = (None, {"zero_quantized_gradients": True}) if in_tree else ({"recipe": "zeropp"}, {})
    message = refusal(section, {**keys, **zero}, **others)
    assert all(word in message for word in words), message


def test_missing_stage():
    with pytest.raises(ConfigError, match=r'"zero_optimization\.stage" is null'):
        resolve({SECTION: {}})


def test_hybrid_engine_class():
    with pytest.raises(ConfigError, match=r'"hybrid_engine\.enabled".*remove one of the two'):
        resolve(ds_config({"recipe": "zeropp"}), hybrid_engine=True)


@pytest.mark.parametrize(
    ("zero", "others"),
    [
        ({"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "none", "super_offload": False}}, {}),
        ({"offload_param": None, "zenflow": None, "mics_shard_size": -1, "reduce_scatter": True}, {}),
        ({}, {"compile": {"deepcompile": False}, "hybrid_engine": {"enabled": False}}),
        ({}, {"prescale_gradients": False, "gradient_predivide_factor": 1.0}),
    ],
)
def test_harmless_values_of_the_same_keys_are_accepted(zero, others):
    assert resolved({"recipe": "zeropp"}, zero, **others) == resolved({"recipe": "zeropp"})


@pytest.mark.parametrize("others", [{"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}])
def test_rules_of_quantized_gradients_need_quantized_gradients(others):
    section = {"weights": {"format": "int8"}}
    assert resolved(section, {"reduce_scatter": False}, **others) == resolved(section)


# --- topology ---------------------------------------------------------------------------------------------------

VARIABLES = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)


def test_ranks_per_node_from_the_section_wins():
    config = resolved({"topology": {"ranks_per_node": 2}})
    assert find_ranks_per_node(config, 8, dict.fromkeys(VARIABLES, "4")) == (2, "zeropp_fp8.topology.ranks_per_node")


@pytest.mark.parametrize("first", range(len(VARIABLES)))
def test_ranks_per_node_from_the_environment_in_order(first):
    env = {name: str(index + 1) for index, name in enumerate(VARIABLES) if index >= first}
    assert find_ranks_per_node(resolved({}), 8, env) == (first + 1, VARIABLES[first])


@pytest.mark.parametrize("unusable", ["", "0", "two", "-1", "2(x3)"])
def test_unusable_variables_are_passed_over(unusable):
    env = {"LOCAL_WORLD_SIZE": unusable, "LOCAL_SIZE": "2"}
    assert find_ranks_per_node(resolved({}), 8, env) == (2, "LOCAL_SIZE")


def test_one_rank_needs_no_variable():
    assert find_ranks_per_node(resolved({}), 1, {}) == (1, "one rank")


def test_nothing_says_the_ranks_of_a_node():
    with pytest.raises(ConfigError) as error:
        find_ranks_per_node(resolved({}), 4, {})
    message = str(error.value)
    assert '"zeropp_fp8.topology.ranks_per_node"' in message and "give the number of ranks on each node" in message
    assert all(name in message for name in VARIABLES)


def test_more_ranks_a_node_than_ranks():
    config = resolved({"topology": {"ranks_per_node": 8}})
    with pytest.raises(ConfigError, match=r'"zeropp_fp8\.topology\.ranks_per_node": 8 is more than .* 4 ranks'):
        find_ranks_per_node(config, 4, {})
    # The launcher counts all ranks of a node, the data-parallel group may be smaller.
    number, source = find_ranks_per_node(resolved({}), 4, {"LOCAL_WORLD_SIZE": "8"})
    assert number == 4 and "LOCAL_WORLD_SIZE" in source


@pytest.mark.parametrize(("world", "ranks_per_node"), [(4, 3), (6, 4), (1, 2), (7, 2)])
def test_world_that_is_no_multiple_of_a_node(world, ranks_per_node):
    with pytest.raises(ConfigError) as error:
        check_topology(resolved({}), world, ranks_per_node)
    message = str(error.value)
    assert '"zeropp_fp8.topology.ranks_per_node"' in message
    assert f"{world} ranks" in message and f"set ranks_per_node to a divisor of {world}" in message


@pytest.mark.parametrize("zero", [{"zero_hpz_partition_size": 3}, None])
@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_secondary_scope_that_does_not_divide_a_node(zero, ranks_per_node):
    config = resolved(None if zero else {"secondary": {"scope": 3}}, zero)
    with pytest.raises(ConfigError) as error:
        check_topology(config, 8, ranks_per_node)
    message = str(error.value)
    assert "zero_optimization.zero_hpz_partition_size" in message and f"{SECTION}.secondary.scope" in message
    assert f"use a divisor of {ranks_per_node}" in message


@pytest.mark.parametrize(
    ("scope", "ranks"), [("none", None), ("node", 4), ("rank", 1), (1, 1), (2, 2), (4, 4)], ids=str
)
def test_secondary_ranks(scope, ranks):
    config = resolved({"secondary": {"scope": scope}})
    check_topology(config, 8, 4)
    assert secondary_ranks(config, 4) == ranks


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
