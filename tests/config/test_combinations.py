"""Which values of the `zeropp_fp8` section go together, and with the rest of the ds_config; what each refusal says."""

import json
import re

import pytest
from config_cases import BF16, ds_config, refusal, resolved, values
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from zeropp_fp8.config import SECTION, WIRE_FORMATS, ConfigError, PluginConfig, resolve
from zeropp_fp8.config.rules import BLOCKS, broken
from zeropp_fp8.config.sections import DOUBLE_QUANTIZED_NAMES, ELSEWHERE, FROZEN_FORMATS
from zeropp_fp8.formats import make_format

FORMAT_FIELDS = ("weights.format", "gradients.intra_format", "gradients.inter_format", "frozen.format")
FORMATS = [(f, name) for f in FORMAT_FIELDS for name in (FROZEN_FORMATS if f == "frozen.format" else WIRE_FORMATS)]


@pytest.mark.parametrize("field", FORMAT_FIELDS)
@pytest.mark.parametrize("name", [*ELSEWHERE, "int2", "int9", "INT8", "fp8"])
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


@pytest.mark.parametrize(("field", "name"), FORMATS)
def test_format_that_is_there(field, name):
    group, key = field.split(".")
    assert values(resolved({group: {key: name}}), field) == name


@pytest.mark.parametrize("option", [False, True])
@pytest.mark.parametrize("block_size", [2, 32, 34])
@pytest.mark.parametrize(("field", "name"), [(field, name) for field, name in FORMATS if name != "none"])
def test_blocks_that_no_rule_refuses_can_be_made(field, name, block_size, option):
    """With the rotation, or where weights are frozen with scales of 8 bits."""
    group, key = field.split(".")
    given = {"block_size": block_size, "double_quantize" if group == "frozen" else "hadamard": option}
    try:
        part = getattr(resolved({group: {key: name, **given}}), group)
    except ConfigError:
        return
    make_format(name, **{key: getattr(part, key) for key in given})


@pytest.mark.parametrize("field", FORMAT_FIELDS)
def test_codes_fill_whole_bytes(field):
    """Of a format that is not there: no even block size is wrong for those that are, but for MX, which fix it."""
    group, key = field.split(".")
    config = PluginConfig()
    for name, given, multiple, use in (("int3", 12, 8, 16), ("int6", 34, 4, 36), ("int5", 4, 8, 8)):
        part = getattr(config, group).model_copy(update={key: name, "block_size": given, "hadamard": False})
        assert list(broken(BLOCKS, config.model_copy(update={group: part}))) == [
            f'"{SECTION}.{group}.block_size": {given} must be a multiple of {multiple} with "{name}"; use {use}'
        ]
        part = part.model_copy(update={"block_size": use})
        assert not list(broken(BLOCKS, config.model_copy(update={group: part})))


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
        ({"weights": {"block_size": 33}}, ['"zeropp_fp8.weights.block_size"', "33", "a multiple of 2"]),
        (
            {"gradients": {"block_size": 33, "hadamard": False}},
            ['"zeropp_fp8.gradients.block_size"', "33", "a multiple of 2"],
        ),
        ({"frozen": {"format": "fp8_e5m2"}}, ['"zeropp_fp8.frozen.format"', "fp8_e5m2", ", ".join(FROZEN_FORMATS)]),
        ({"frozen": {"format": "int4", "block_size": 33}}, ['"zeropp_fp8.frozen.block_size"', "33", "a multiple of 2"]),
        (
            {"gradients": {"error_feedback": True}},
            ['"zeropp_fp8.gradients.error_feedback"', 'set "gradients.inter_format"', "or error_feedback to false"],
        ),
        (
            {"secondary": {"memory_gb": 8}},
            ['"zeropp_fp8.secondary.memory_gb"', "there is none", '"secondary.scope": "node"', 'or this to "all"'],
        ),
        (
            {"recipe": "zeropp-pcie", "secondary": {"scope": "none"}},
            ['"zeropp_fp8.secondary.memory_gb"', '"secondary.scope": "node"'],
        ),
        *(
            ({"recipe": "zeropp-exact", **fields}, ['"zeropp_fp8.weights.difference"', *words])
            for fields, words in (
                ({"secondary": {"scope": "none"}}, ["there is none", 'set "secondary.scope" to "node"']),
                ({"weights": {"format": "int4"}}, ['"weights.format": "int4"', 'set that to "none", "int8" or']),
                ({"weights": {"format": "mxfp8_e4m3"}}, ['"weights.format": "mxfp8_e4m3"', 'set that to "none"']),
                (
                    {"weights": {"format": "fp8_e4m3"}, "compute": {"format": "fp8"}},
                    ["without scales", 'set "partition": "whole_tensor"'],
                ),
                (
                    {"weights": {"difference": "int4"}},
                    ['"int4" is not allowed', "it takes one of auto, detect, none, exact"],
                ),
                ({"weights": {"difference": {"format": "int4"}}}, ["it takes one of auto, detect, none, exact"]),
            )
        ),
        ({"compute": {"format": {"weights": "mxfp4"}}}, ['"zeropp_fp8.compute.format.activations" is missing']),
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
        (
            {"frozen": {"format": "int8", "scales": "tensor"}},
            ['"zeropp_fp8.frozen.scales": "tensor"', '"format": "int8"', "fp8_e4m3", '"block"'],
        ),
        ({"frozen": {"scales": "tensor"}}, ['"zeropp_fp8.frozen.scales": "tensor"', '"format": "none"']),
        (
            {"frozen": {"format": "fp8_e4m3", "scales": "tensor", "block_size": 128}},
            ['"zeropp_fp8.frozen.block_size" belongs to scales of blocks', "or this to 64"],
        ),
        (
            {"frozen": {"format": "fp8_e4m3", "scales": "tensor", "double_quantize": True}},
            ['"zeropp_fp8.frozen.double_quantize" belongs to scales of blocks', "or this to false"],
        ),
        ({"frozen": {"modules": ["q_proj"]}}, ['"zeropp_fp8.frozen.modules"', '"int4"', 'or this to "all-linear"']),
        ({"frozen": {"double_quantize": True}}, ['"zeropp_fp8.frozen.double_quantize"', "there are no scales"]),
        (
            {"frozen": {"format": "mxfp4", "double_quantize": True}},
            ['"zeropp_fp8.frozen.double_quantize"', "mxfp4", "8 bits already", ", ".join(DOUBLE_QUANTIZED_NAMES)],
        ),
    ],
)
def test_impossible_within_the_section(section, words):
    message = refusal(section, **BF16)
    assert all(word in message for word in words) and "\n" not in message, message


def test_exact_differences_are_of_16_bits_or_codes():
    section = {"recipe": "zeropp-exact"}
    for keys in ({}, {"bf16": {"enabled": False}}, {"fp16": {}}):
        message = refusal(section, **keys)
        assert message.startswith('"zeropp_fp8.weights.difference"')
        assert 'set "bf16.enabled" or "fp16.enabled" to true, "weights.format" to "int8", or this to "none"' in message
        assert resolved({**section, "weights": {"format": "int8"}}, **keys).weights.difference == "exact"
    for name in ("bf16", "bfloat16", "fp16"):
        assert resolved(section, **{name: {"enabled": True}}).weights.difference == "exact"


@pytest.mark.parametrize(
    ("section", "found"),
    [
        *(
            ({"recipe": recipe}, "exact")
            for recipe in ("zeropp", "zeropp-exact", "zeropp-pcie", "fp8-lm-zeropp", "qlora")
        ),
        *(({"recipe": recipe}, "none") for recipe in ("lossless", "zeropp-4bit", "mxfp8", "fp8-lm")),
        ({"secondary": {"scope": "node"}}, "exact"),
        ({"recipe": "zeropp", "secondary": {"scope": "none"}}, "none"),
        ({"recipe": "zeropp", "weights": {"format": "int4"}}, "none"),
        ({"recipe": "zeropp", "weights": {"difference": "none"}}, "none"),
        ({"recipe": "fp8-lm-zeropp", "partition": "slice"}, "none"),
        ({"recipe": "fp8-lm-zeropp", "weights": {"difference": "exact"}}, "exact"),
    ],
)
@pytest.mark.parametrize("word", [None, "auto", "detect"])
def test_differences_cross_wherever_they_can(section, found, word):
    """And the configuration says whether they do: no field of it is "auto"."""
    weights = section.get("weights", {})
    given = {**section, "weights": {"difference": word, **weights}} if word else section
    assert resolved(given, **BF16).weights.difference == found


def test_differences_of_fp32_are_those_of_codes():
    assert resolved({"secondary": {"scope": "node"}}).weights.difference == "none"
    assert resolved({"recipe": "zeropp"}).weights.difference == "exact"


SHARED = {"intra_format": "fp8_e4m3", "inter_format": "fp8_e4m3", "scales": "tensor"}
FP8_MOMENT = {"exp_avg_format": "fp8_e4m3"}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"gradients": {"store_format": "int8"}}, ['gradients.store_format"', '"int8"', "fp8_e4m3, fp8_e5m2"]),
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
        ({"gradients": {**SHARED, "error_feedback": True}}, ['gradients.error_feedback"', 'scales to "block"']),
        ({"gradients": {**SHARED, "block_size": 64}}, ['gradients.block_size"', 'scales to "block"']),
        (
            {"gradients": {**SHARED, "store_format": "fp8_e5m2"}},
            ['gradients.store_format"', '"fp8_e5m2" differs', '"fp8_e4m3"', "use that one or none"],
        ),
        *[
            (
                {"optimizer": {f"{name}_format": "fp9"}},
                [f'optimizer.{name}_format"', 'did you mean "fp', "fp32, bf16, fp16, fp8_e4m3, fp8_e5m2"],
            )
            for name in ("master", "exp_avg", "exp_avg_sq")
        ],
        ({"optimizer": {"master_format": "int8"}}, ['optimizer.master_format"', '"int8"']),
        ({"optimizer": {"scales": "block"}}, ['optimizer.scales"', "states in low precision", 'or this to "tensor"']),
        (
            {"recipe": "zeropp", "partition": "whole_tensor", "gradients": {"error_feedback": True}},
            ['partition": "whole_tensor"', "gradients.error_feedback", "set that to false"],
        ),
        ({"partition_split": "none"}, ['partition_split"', '"partition": "whole_tensor"', 'or this to "balance"']),
        (
            {"compile": "blocks", "gather_granularity": "module"},
            ['compile": "blocks"', '"gather_granularity": "module"', 'use "block"'],
        ),
        *[
            ({"experts": {"gather": "used"}, name: value}, ['experts.gather": "used"', f'"{name}": "{value}"', '"all"'])
            for name, value in (("partition", "whole_tensor"), ("compile", "blocks"))
        ],
    ],
)
def test_impossible_with_states_and_shared_scales(section, words):
    message = refusal(section)
    assert f'"{SECTION}.' in message and all(word in message for word in words), message


def test_states_and_shared_scales_that_are_possible():
    config = resolved({"gradients": SHARED})
    assert not config.gradients.hadamard and config.gradients.store_format == "none" and config.quantizes_gradients
    assert not config.stores_states_in_low_precision
    fields = {**FP8_MOMENT, "scales": "block"}
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


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"recipe": "zeropp", "partition": "whole_tensor"}, "offload_param"),
        ({"recipe": "zeropp", "partition": "whole_tensor"}, "offload_optimizer"),
        ({"recipe": "fp8-lm-o1"}, "offload_optimizer"),
        ({"recipe": "zeropp"}, "use_all_reduce_for_fetch_params"),
    ],
)
def test_rules_see_keys_under_their_other_names(section, key):
    """Which DeepSpeed's own model of them says to be the same."""
    name, value = {
        "offload_param": ("cpu_offload_param", {"device": "cpu"}),
        "offload_optimizer": ("cpu_offload", {"device": "cpu"}),
        "use_all_reduce_for_fetch_params": ("stage3_use_all_reduce_for_fetch_params", True),
    }[key]
    own, other = (DeepSpeedZeroConfig(stage=3, **keys) for keys in ({key: value}, {name: True}))
    assert getattr(own, key) == getattr(other, key)
    assert refusal(section, {name: True}) == refusal(section, {key: value})
    assert resolved(section, {name: False}) == resolved(section)


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


@pytest.mark.parametrize(
    "fields, keys, named",
    [
        ({"frozen": {"format": "int4"}}, {}, '"zeropp_fp8.frozen.format"'),
        ({"compute": {"format": "fp8"}}, {}, '"zeropp_fp8.compute.format"'),
        ({"recipe": "fp8-lm-o2", "compute": {"format": "none"}}, {}, '"zeropp_fp8.optimizer"'),
        ({"recipe": "fp8-lm-o1", "compute": {"format": "none"}}, {}, '"zeropp_fp8.gradients.scales"'),
        ({"recipe": "zeropp", "partition": "whole_tensor"}, {}, '"zeropp_fp8.partition"'),
        ({"recipe": "zeropp", "experts": {"gather": "used"}}, {}, '"zeropp_fp8.experts.gather"'),
        ({"recipe": "zeropp", "compile": "blocks"}, {}, '"zeropp_fp8.compile"'),
        ({"recipe": "zeropp"}, {"tensor_parallel": {"autotp_size": 2}}, '"tensor_parallel.autotp_size"'),
        (
            {"recipe": "zeropp", "activations": {"wire_format": "fp8"}},
            {"expert_parallel": {"enabled": True, "comm_backend": "deepep"}},
            '"zeropp_fp8.activations.wire_format" with that "comm_backend"',
        ),
    ],
)
def test_unknown_to_experts_that_are_dealt_out(fields, keys, named):
    message = refusal(fields, **{"expert_parallel": {"enabled": True}, **keys})
    assert f'"expert_parallel.enabled" (AutoEP) deals experts out, which {named} does not know' in message, message
    assert "remove one of the two" in message


@pytest.mark.parametrize("recipe", ["lossless", "zeropp", "zeropp-4bit", "zeropp-exact"])
def test_known_to_experts_that_are_dealt_out(recipe):
    section = {"recipe": recipe, "activations": {"wire_format": "fp8"}}
    resolved(section, expert_parallel={"enabled": True}, bf16={"enabled": True})


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


@pytest.mark.parametrize(
    "section",
    [
        {"recipe": "zeropp", "weights": {"format": "mxfp8_e4m3"}},
        {"recipe": "zeropp-4bit", "weights": {"format": "mxfp4"}},
        {"recipe": "zeropp", "gradients": {"intra_format": "mxfp8_e4m3", "inter_format": "mxfp4"}},
        {"recipe": "qlora", "frozen": {"format": "mxfp4"}},
    ],
)
def test_formats_fix_what_a_recipe_has(section):
    """A format that is set by hand brings its blocks, whatever goes with the recipe's own format."""
    (part,) = section.keys() - {"recipe"}
    config = resolved(section)
    assert getattr(config, part).block_size == 32
    assert not any(getattr(getattr(config, part), name, False) for name in ("hadamard", "double_quantize"))


@pytest.mark.parametrize(
    ("section", "remedy"),
    [
        ({"recipe": "zeropp-pcie", "secondary": {"scope": "none"}}, {"secondary": {"memory_gb": "all"}}),
        ({"recipe": "zeropp-exact", "secondary": {"scope": "none"}}, {"weights": {"difference": "none"}}),
        ({"recipe": "zeropp-pcie", "gradients": {"inter_format": "none"}}, {"gradients": {"error_feedback": False}}),
        ({"recipe": "zeropp-pcie", "partition": "whole_tensor"}, {"gradients": {"error_feedback": False}}),
    ],
)
def test_the_remedy_for_what_a_recipe_has(section, remedy):
    """A value to set: there is no key to remove, as the recipe has it."""
    message = refusal(section, **BF16)
    ((part, values),) = remedy.items()
    ((key, value),) = values.items()
    assert f"{part}.{key}" in message and json.dumps(value) in message
    merged = {**section, part: {**section.get(part, {}), **values}}
    assert resolved(merged, **BF16)
