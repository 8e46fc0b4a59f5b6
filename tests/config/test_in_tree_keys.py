"""The four keys of DeepSpeed's own ZeRO++: what they ask for, alone and beside a `zeropp_fp8` section."""

import copy
import json

import pytest
from config_cases import BF16, DEFAULTS, ZEROPP, ds_config, refusal, resolved, values

from zeropp_fp8.config import (
    IN_TREE_KEYS,
    SECTION,
    ConfigError,
    check_topology,
    in_tree_keys,
    secondary_ranks,
    without_in_tree_keys,
)


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
        ({"recipe": "zeropp-exact"}, "zero_quantized_weights", True, "weights.format"),
        ({"gradients": {"intra_format": "int8"}}, "zero_quantized_gradients", False, "gradients.inter_format"),
        ({"secondary": {"scope": 2}}, "zero_hpz_partition_size", 4, "secondary.scope"),
        ({"secondary": {"scope": "none"}}, "zero_hpz_partition_size", 4, "secondary.scope"),
        ({"secondary": {"scope": "rank"}}, "zero_hpz_partition_size", 4, "secondary.scope"),
    ],
)
def test_a_key_that_contradicts_the_section_is_refused(section, key, value, field):
    message = refusal(section, {key: value}, **BF16)
    assert f'"zero_optimization.{key}": {json.dumps(value)} contradicts "{SECTION}.{field}"' in message
    assert "remove one of the two" in message
    assert ('(from recipe "' in message) == ("recipe" in section)


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ({"recipe": "zeropp"}, {"zero_quantized_weights": True, "zero_quantized_gradients": True}),
        ({"recipe": "zeropp-4bit"}, {"zero_quantized_weights": True}),
        ({"recipe": "zeropp-exact"}, {"zero_quantized_weights": False, "zero_quantized_gradients": True}),
        ({"recipe": "lossless"}, IN_TREE_KEYS),
        ({"secondary": {"scope": 4}}, {"zero_hpz_partition_size": 4}),
        ({"weights": {"format": "int4"}}, {"zero_quantized_weights": True}),
    ],
)
def test_a_key_that_agrees_with_the_section_changes_nothing(section, keys):
    assert resolved(section, keys, **BF16) == resolved(section, **BF16)


def ranks_that_share(hpz, ranks_per_node):
    """How many ranks share a secondary copy with recipe zeropp, whose scope is the node, and this hpZ size."""
    config = resolved({"recipe": "zeropp"}, {"zero_hpz_partition_size": hpz})
    check_topology(config, ranks_per_node)
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
    assert f'"zero_optimization.{key}": {json.dumps(value)} is not allowed' in message and json.dumps(value) in message


def test_deepspeed_does_not_see_the_four_keys():
    config = ds_config({"recipe": "zeropp"}, {**dict.fromkeys(IN_TREE_KEYS, 2), "overlap_comm": True}, bf16={})
    before = copy.deepcopy(config)
    assert in_tree_keys(config) == dict.fromkeys(IN_TREE_KEYS, 2)
    assert without_in_tree_keys(config) == ds_config({"recipe": "zeropp"}, {"overlap_comm": True}, bf16={})
    assert config == before
    assert without_in_tree_keys({"bf16": {}}) == {"bf16": {}}
