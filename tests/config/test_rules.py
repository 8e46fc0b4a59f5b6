"""Every fault of a ds_config at once, in check and at start: with its key, numbered, in a plain line, none twice."""

import copy
import math
import re
from functools import reduce

import pytest
from config_cases import BF16, ds_config
from hypothesis import given, settings
from hypothesis import strategies as st

from zeropp_fp8.config import RECIPES, SECTION, ConfigError, resolve
from zeropp_fp8.config.rules import FIELDS, broken
from zeropp_fp8.config.words import numbered, shown
from zeropp_fp8.doctor.check import check
from zeropp_fp8.plugin.stock import MADE, checked, look

BASE = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "none"}},
    "another_plugin": {"gradient_cliping": "false?"},
    SECTION: {"recipe": "zeropp"},
}
# The path of a key, a value that it cannot have, and the key that is named where that is another one. No two of them
# break one rule together.
FAULTS = [
    ("optimizer.params.lr", -1e-4),
    ("optimizer.params.betas", [0.9, 1.5]),
    ("optimizer.params.eps", "1e-8"),
    ("optimizer.params.weight_decay", None),
    ("optimizer.params.wieght_decay", 0.1),
    ("optimizer.params.amsgrad", "yes"),
    ("scheduler.params.warmup_num_steps", 0),
    ("scheduler.params.warmup_mni_lr", 0),
    ("gradient_clipping", "abc"),
    ("gradient_clipping", -1),
    ("gradient_clipping", None),
    ("gradient_cliping", 1.0),
    ("steps_per_print", "often"),
    ("steps_per_print", 0),
    ("train_micro_batch_size_per_gpu", "8"),
    ("train_micro_batch_size_per_gpu", 0),
    ("gradient_accumulation_steps", 1.5),
    ("train_batch_size", True),
    ("communication_data_type", "fp8"),
    ("communication_data_type", 5),
    ("nebula", {"enabled": False}),
    ("dump_state", "false"),
    ("bf16.enabled", "false"),
    ("bf16.enabeld", False),
    ("fp16.loss_scale", -1),
    ("wandb.projct", "x"),
    ("tensorboard", "logs"),
    ("flops_profiler.profile_step", "third"),
    ("flops_profiler.modul_depth", 1),
    ("activation_checkpointing", True),
    ("hybrid_engine.max_out_tokens", 0),
    ("checkpoint.tag_validation", "Perhaps"),
    ("zero_optimization.reduce_scatter", "false"),
    ("zero_optimization.overlap_comm", "perhaps"),
    ("zero_optimization.stage3_prefech_bucket_size", 5),
    ("zero_optimization.stage3_max_live_parameters", -1),
    ("zero_optimization.reduce_bucket_size", "5e8"),
    ("zero_optimization.offload_param.device", "nvme"),
    ("zero_optimization.offload_param.device", "gpu"),
    ("zero_optimization.offload_param.pin_memory", []),
    ("zero_optimization.offload_optimizer.device", "nvme"),
    ("zero_optimization.zero_hpz_partition_size", 1),
    ("zero_optimization.zero_quantized_gradients", "true"),
    ("zero_optimization.zero_hpz_partition_size", 0),
    (f"{SECTION}.weights.format", "int9"),
    (f"{SECTION}.weights.blocksize", 64),
    (f"{SECTION}.weights.difference", "int4"),
    (f"{SECTION}.weights.difference", {"format": "int4", "block_size": 64}),
    (f"{SECTION}.gradients.intra_format", "int5"),
    (f"{SECTION}.gradients.inter_format", "fp32"),
    (f"{SECTION}.gradients.scales", "rows"),
    (f"{SECTION}.compute.format", "fp9"),
    (f"{SECTION}.compute.min_features", 0),
    (f"{SECTION}.frozen.format", "nf5"),
    (f"{SECTION}.frozen.scales", False),
    (f"{SECTION}.optimizer.scales", "block"),
    (f"{SECTION}.optimizer.block_size", 128),
    (f"{SECTION}.seed", 1),
    (f"{SECTION}.report.every", "100"),
    (f"{SECTION}.partition_split", "none"),
    (f"{SECTION}.gather_granularity", "layer"),
    (f"{SECTION}.compiled", "blocks"),
]
NOT_PLAIN = re.compile(r"Config\b|Config'|https?://|[Pp]ydantic|False|None|True|instance of|Traceback|<class|\[type=")


def with_faults(faults):
    """(a ds_config with them, the keys that have to be named)."""
    config = copy.deepcopy(BASE)
    for path, value in faults:
        *parents, last = path.split(".")
        owner = reduce(lambda part, key: part.setdefault(key, {}), parents, config)
        owner[last] = value
    return config, [path for path, _ in faults]


def lines_of(config):
    return [each.text for each in check(config).problems if each.serious]


def test_there_is_none_in_the_base():
    assert lines_of(BASE) == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[0]}={fault[1]}")
def test_one(fault):
    config, (key,) = with_faults([fault])
    (line,) = lines_of(config)
    assert line.startswith(f'"{key}"') and not NOT_PLAIN.search(line) and len(line) < 260, line
    assert shown(fault[1]) in line or "key" in line or "no parameter" in line or "does nothing" in line or ";" in line


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(FAULTS), min_size=2, max_size=12, unique_by=lambda fault: fault[0]))
def test_several(faults):
    paths = [path for path, _ in faults]
    inside = {path for path in paths if any(path.startswith(f"{other}.") for other in paths)}
    config, keys = with_faults([fault for fault in faults if fault[0] not in inside])
    lines = lines_of(config)
    assert sorted(line.split('"')[1] for line in lines) == sorted(keys), numbered(lines)
    assert not any(NOT_PLAIN.search(line) or len(line) >= 260 for line in lines)
    with pytest.raises(ConfigError) as refused:  # what an engine calls
        checked(config, made=MADE)
    assert str(refused.value) == numbered(lines)
    if len(lines) > 1:
        assert re.findall(r"^  (\d+)\. ", str(refused.value), re.M) == [str(n) for n in range(1, len(lines) + 1)]


def test_what_follows_from_a_fault_is_none():
    """A rule that would read a field that is refused, or misspelt, says nothing."""
    section = {"gradients": {"inter_fromat": "int4", "error_feedback": True}, "weights": {"format": "int9"}}
    zero = {"zero_quantized_weights": True}
    assert [line.split('"')[1] for line in lines_of(ds_config(section, zero, train_micro_batch_size_per_gpu=1))] == [
        f"{SECTION}.weights.format",
        f"{SECTION}.gradients.inter_fromat",
    ]
    section = {"recipe": "zerop", "numerics": {"watch": "fall_back"}, "partition": "whole_tensor", "enabled": 1}
    assert [line.split('"')[1] for line in lines_of(ds_config(section, train_micro_batch_size_per_gpu=1))] == [
        f"{SECTION}.recipe",
        f"{SECTION}.enabled",
    ]


def test_what_a_script_hands_over_is_not_looked_at():
    """But where the engine is not made for another reason, all is named that the file has."""
    config, _ = with_faults([("optimizer.params.lr", -1), ("scheduler.params.warmup_num_steps", 0)])
    assert checked(config, made=()) is not None
    assert len(look(config, made=("scheduler",)).lines) == 2
    assert len(look({**config, "gradient_clipping": "x"}, made=()).lines) == 3


def test_fields_of_one_kind_are_named_one_by_one():
    shared = {"intra_format": "fp8_e4m3", "inter_format": "fp8_e4m3", "scales": "tensor"}
    wrong = {"hadamard": True, "error_feedback": True, "block_size": 64}
    with pytest.raises(ConfigError) as refused:
        resolve(ds_config({"gradients": {**shared, **wrong}}))
    assert [line.split('"')[1] for line in refused.value.faults] == [f"{SECTION}.gradients.{name}" for name in wrong]


def test_stock_jobs_are_not_looked_at():
    config, _ = with_faults([("gradient_clipping", "x")])
    del config[SECTION]
    assert checked(config) is None


def test_all_of_a_kind():
    """Two offloads, three formats, keys that contradict, a batch size in text."""
    config, keys = with_faults([fault for fault in FAULTS if fault[1] == "nvme" or fault[0].endswith("format")])
    assert sorted(line.split('"')[1] for line in lines_of(config)) == sorted(keys) and len(keys) == 7
    contradicting = {"zero_quantized_weights": False, "zero_quantized_gradients": False, "zero_hpz_partition_size": 1}
    with pytest.raises(ConfigError) as refused:
        resolve(ds_config({"recipe": "zeropp"}, contradicting))
    named = [line.split('"')[1] for line in refused.value.faults]
    assert sorted(named) == sorted(f"zero_optimization.{key}" for key in contradicting)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_recipe_breaks_a_rule(recipe):
    assert list(broken(FIELDS, resolve(ds_config({"recipe": recipe}, **BF16)))) == []


SECTIONS = [
    "optimizer",
    "optimizer.type",
    "optimizer.params",
    "scheduler",
    "scheduler.type",
    "scheduler.params",
    "fp16.enabled",
    "fp16.loss_scale",
    "bf16",
    "zero_optimization",
    "zero_optimization.stage",
    "zero_optimization.leaf_module",
    "zero_optimization.zenflow",
    "tensorboard",
    "wandb",
    "zero_optimization.offload_optimizer",
    "zero_optimization.mics_shard_size",
    "zero_optimization.compute_grad_norm",
    "csv_monitor",
    "flops_profiler",
    "activation_checkpointing",
    "comms_logger",
    "hybrid_engine",
    "checkpoint",
    "checkpoint.writer",
    "data_types",
    "aio.use_gds",
    "torch_autocast.enabled",
    "torch_autocast.dtype",
    "data_efficiency.data_sampling.curriculum_learning",
    "weight_quantization",
    "compile",
    "timers.throughput",
    "tensor_parallel.dtype",
    "expert_parallel.enabled",
    "pipeline",
    "elasticity",
    "log_level",
    "train_batch_size",
    "gradient_allreduce_op",
    "sequence_parallel_size",
    "zeropp_fp8",
    "zeropp_fp8.weights",
    "zeropp_fp8.enabled",
    "zeropp_fp8.compute.format",
    "zeropp_fp8.compute.high_precision_gemms",
    "zeropp_fp8.frozen.modules",
    "zeropp_fp8.secondary.scope",
    "zeropp_fp8.recipe",
]
JUNK = [None, True, 0, -1, 2.5, "x", "3", [], {}, [1, "a"], {"a": 1}, {"enabled": "x"}, math.nan, math.inf, "a" * 500]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(SECTIONS), st.sampled_from(JUNK)), min_size=1, max_size=5))
def test_junk(changes):
    """Whatever stands anywhere, check comes to an end, and says what it says plainly."""
    config = copy.deepcopy(BASE)
    for path, value in changes:
        owner = config
        *parents, last = path.split(".")
        for key in parents:
            owner[key] = owner[key] if isinstance(owner.get(key), dict) else {}
            owner = owner[key]
        owner[last] = copy.deepcopy(value)
    lines = lines_of(config)
    assert not any(NOT_PLAIN.search(line) or "\n" in line or len(line) > 330 for line in lines), numbered(lines)
    assert len({line.split('"')[1] if '"' in line else line for line in lines}) == len(lines)


def test_an_object_in_place_of_a_name():
    """Of a field that takes either, what is said is about the key inside."""
    section = {"compute": {"format": {"weights": "fp9", "activations": "fp8_e4m3"}, "high_precision_gemms": ["out"]}}
    with pytest.raises(ConfigError) as refused:
        resolve(ds_config(section))
    named = [line.split('"')[1] for line in refused.value.faults]
    assert named == [f"{SECTION}.compute.format.weights", f"{SECTION}.compute.high_precision_gemms"]
