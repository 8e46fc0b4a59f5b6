"""The frozen store in the flows of users: loading, PEFT, merging, Trainer, Accelerate and bad input."""

import frozen_flow_jobs as jobs
import pytest
import torch
from frozen_jobs import frozen
from models import llama
from ranks import run_ranks

from zeropp_fp8.config.patterns import matches

LINEAR = [f"model.layers.{i}.self_attn.{n}_proj.weight" for i in (0, 1) for n in "qkvo"] + [
    f"model.layers.{i}.mlp.{n}_proj.weight" for i in (0, 1) for n in ("gate", "up", "down")
]


@pytest.mark.parametrize(
    "pattern, named",
    [
        ("q_proj", True),
        ("layers.0", True),
        ("model.layers.0.self_attn.q_proj", True),
        ("layers.?.self_attn", True),
        ("*attn*", True),
        ("layers.00", False),
        ("layer", False),
        ("layers.0.q_proj", False),
        ("proj", False),
        ("1", False),
    ],
)
@pytest.mark.parametrize("around", ["", "base_model.model.", "module."])
def test_patterns_name_runs_of_parts(pattern, named, around):
    assert matches(f"{around}model.layers.0.self_attn.q_proj", [pattern]) == named
    assert not matches(f"{around}model.layers.0.self_attn.q_proj", [])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small sharded safetensors checkpoint."""
    folder = tmp_path_factory.mktemp("small")
    llama().to(torch.bfloat16).save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return str(folder)


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory):
    """67 MB in 16 bits, 8 of them a decoder layer."""
    folder = tmp_path_factory.mktemp("large")
    llama(layers=8, hidden=512, intermediate=2048).to(torch.bfloat16).save_pretrained(folder, max_shard_size="10MB")
    return str(folder)


@pytest.mark.parametrize("world, share", [(1, 0.55), (2, 0.35)])
def test_no_rank_holds_the_model_in_16_bits(large_checkpoint, world, share):
    """Of the model's bytes in 16 bits; int4 codes are 0.27 of them, and a decoder layer is 0.125."""
    store = {"format": "int4", "block_size": 64}
    for peak, rests, stored in run_ranks(
        jobs.memory_of_loading, world=world, ranks_per_node=1, folder=large_checkpoint, fields=store
    ):
        assert stored == 56 and rests < 0.3 / world
        assert rests < peak < share


def test_the_meter_sees_a_model_in_16_bits(large_checkpoint):
    """Nothing is frozen while the checkpoint streams in: "frozen" stores when the engine is made."""
    late = {"format": "int4", "block_size": 64, "modules": "frozen"}
    peak, rests, stored = run_ranks(
        jobs.memory_of_loading, world=1, ranks_per_node=1, folder=large_checkpoint, fields=late
    )[0]
    assert stored == 56 and rests < 0.3 and peak > 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_checkpoint_streams_into_the_store(checkpoint, dtype):
    fields = frozen("int4", skip_modules=["lm_head", "score", "layers.1.mlp", "k_proj"])
    kept = [n for n in LINEAR if "k_proj" not in n and "layers.1.mlp" not in n]
    for log in run_ranks(jobs.loaded, world=2, folder=checkpoint, dtype=dtype, fields=fields):
        assert log["stored while loading"] == sorted(kept)
        assert log["equal to encoding"] and log["others are exact"]
        third = [n.replace(".0.", ".2.") for n in kept if ".0." in n]
        assert log["stored of a classifier"] == sorted(kept + third)
        assert log["what no checkpoint has"] == pytest.approx((0.02, 0.02), rel=0.1)  # transformers initializes it
        streamed, whole, with_adapters = log["streamed"], log["whole"], log["made with adapters"]
        assert jobs.same(streamed["codes"], whole["codes"])
        assert streamed["losses"] == whole["losses"]
        assert sorted(with_adapters["codes"]) == sorted(kept)
        for kind in (streamed, whole, with_adapters):
            assert kind["unchanged"] and kind["dtypes"] == {jobs.DTYPES[dtype]}
            assert {"default", "embed_tokens", "norm", "lm_head", "k_proj"} <= set(kind["not stored"])


TARGETED = sorted(n for n in LINEAR if n.split(".")[-2] in ("q_proj", "v_proj", "down_proj"))
ON_CPU = {"zero_optimization": {"offload_param": {"device": "cpu"}}}


@pytest.mark.parametrize(
    "case",
    [
        {"fields": frozen("int8")},
        {
            "fields": frozen("nf4", block_size=64, double_quantize=True),
            "dtype": "bf16",
            "gather_granularity": "module",
            "overrides": ON_CPU,
        },
        {
            "fields": frozen("int4"),
            "safe_merge": True,
            "gather_granularity": "parameter",
            "secondary": {"scope": "node"},
        },
        {"fields": frozen("mxfp6_e2m3"), "use_dora": True},
    ],
    ids=["int8", "double-quantized nf4 on the host", "safe merge", "DoRA"],
)
def test_merged_adapters_come_out_bit_for_bit(case):
    for log in run_ranks(jobs.merge_and_unmerge, world=2, **case):
        assert log["shows what codes decode to"] and log["parameter by parameter"]
        assert log.get("merged", True) and log["changed by merging"] == TARGETED
        assert log["after one context"] == log["after layers"] == (True, True)
        assert set(log["codes changed"]) == set(TARGETED)
        assert log["requantized"] and log["merged stays"]
        unmerged, merged = log["losses around"]
        assert merged == pytest.approx(unmerged, abs=0.02) and merged != unmerged
        assert log["after two contexts"] == log["training goes on"] == (True, True)


def test_merge_and_unload(tmp_path):
    for log in run_ranks(jobs.merge_and_unload, world=2, fields=frozen("int4"), folder=str(tmp_path)):
        assert log["codes stay"] and log["saved"] and not log["adapters left"]
        in_plain_torch, in_the_engine = log["goes on evaluating"]
        assert in_the_engine == pytest.approx(in_plain_torch, rel=1e-6)
        assert log["nothing comes back"] and log["copies left"] == 0
        assert log["merged before"] == (True, 0, True)


def test_several_adapters(checkpoint, tmp_path):
    logs = run_ranks(jobs.several_adapters, world=2, folder=checkpoint, adapter_folder=str(tmp_path))
    for log in logs:
        assert log["stored"] == sorted(LINEAR)
        assert log["loaded adapter"] == [(torch.bfloat16, torch.bfloat16, False)]
        assert log["unchanged"]
    assert logs[0]["loaded is as saved"]


KEPT_LIVE = {
    "zero_optimization": {
        "stage3_prefetch_bucket_size": 10**6,
        "stage3_max_live_parameters": 10**7,
        "stage3_max_reuse_distance": 10**7,
    }
}


@pytest.mark.parametrize(
    "case",
    [
        {"fields": frozen("int8")},
        {"fields": frozen("int4", double_quantize=True), "secondary": {"scope": "node"}},
        {"fields": frozen("nf4"), "overrides": KEPT_LIVE},
    ],
    ids=["dropped", "node's copy", "kept gathered"],
)
def test_bad_input_loses_nothing(case):
    key = "base_model.model.model.layers.1.self_attn.k_proj.weight rests as "
    for log in run_ranks(jobs.bad_input, world=2, **case):
        for message in log["trained"]:
            assert (
                message.startswith(f"RuntimeError: {key}")
                and "cannot be trained; set requires_grad to False" in message
            )
        for message in (*log["written"], *log["written in a context"], *log["written while it runs"]):
            assert message.startswith(f"RuntimeError: {key}") and "was written in place, which would be lost" in message
        for step in ("frozen again", "written once", "context over", "hook removed", "nothing written"):
            assert log[step] == (True, True), step
        assert log["one written"] == ["model.layers.1.self_attn.k_proj.weight"] and log["requantized"]
        assert log["a part written"] and log["goes on"] == 1


@pytest.mark.parametrize("overrides", [None, KEPT_LIVE], ids=["dropped", "kept gathered"])
def test_merges_that_do_not_reach_the_codes(overrides):
    query = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    for log in run_ranks(jobs.merges_that_do_not_reach_the_codes, world=2, fields=frozen("int8"), overrides=overrides):
        said = log["merged for nothing"]
        assert f"RuntimeError: an adapter counts as merged into {query}, but its codes do not hold it" in said
        said = log["unmerged for nothing"]
        assert f"RuntimeError: the codes of {query} still hold an adapter that counts as unmerged" in said
        assert f"RuntimeError: an adapter is merged into {query} on some ranks only" in log["merged on one rank"]
        for step in ("unmerged in a context like it", "taken out", "nothing merged"):
            assert log[step] == (True, True), step


def test_engines_that_do_not_fit_are_refused():
    logs = run_ranks(jobs.refused_engines, world=2, fields=frozen("int8"), other=frozen("int4"))
    for log in logs:
        section, query = '"zeropp_fp8.frozen"', "model.layers.0.self_attn.q_proj"
        assert log["trained"].startswith(
            f"ConfigError: {section}: {query}.weight is to be trained, but was stored as int8"
        )
        assert "freeze it (PEFT does)" in log["trained"]
        assert "was stored as int8 (block 16) codes" in log["other format"]
        assert "this engine asks for int4 (block 16)" in log["other format"]
        assert "this engine asks for none" in log["no format"]
        assert "rests as codes of the frozen store, which stock DeepSpeed would take for numbers" in log["stock"]
        assert 'v_proj.weight is to be trained, and "frozen.modules" names it' in log["trained by name"]
        assert log["after all"] == (True, True, True)
        assert log["stored of a trained model"] == (0, 1) and log["stored of a skipped model"] == 0
        assert log["stored for evaluation"] == 14


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_trainer(checkpoint, tmp_path, dtype):
    fields = frozen("nf4", block_size=64, double_quantize=True)
    for log in run_ranks(
        jobs.with_trainer, world=2, folder=checkpoint, output=str(tmp_path), dtype=dtype, fields=fields
    ):
        assert log["stored"] == sorted(LINEAR) and log["unchanged"]
        assert sum(log["losses"][-3:]) < sum(log["losses"][:3])
        assert log["adapter as saved"]
        on_all, on_one = log["loss after training"]
        assert on_all < log["losses"][0] and log["loss after loading"] == on_one


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_accelerate(checkpoint, tmp_path, dtype):
    for log in run_ranks(
        jobs.with_accelerate, world=2, folder=checkpoint, output=str(tmp_path), dtype=dtype, fields=frozen("int4")
    ):
        assert log["stored"] == sorted(LINEAR) and log["unchanged"]
        assert sum(log["losses"][-3:]) < sum(log["losses"][:3])
        assert log["adapter as saved"]


NAMED = [n for n in LINEAR if "q_proj" in n or "layers.1.mlp" in n]
ODD = [f"body.layers.{i}.weight" for i in range(3)]
CONV = [
    f"transformer.h.{i}.{n}.weight" for i in (0, 1) for n in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
]
INT4, INT8 = frozen("int4"), frozen("int8")
LAYER_0 = [n for n in LINEAR if ".layers.0." in n]
SETTINGS = {  # keyword arguments of the job, and what is stored
    "odd shapes": ({"model": "odd", "fields": frozen("int4", block_size=32)}, ODD),
    "odd shapes, double": ({"model": "odd", "fields": frozen("nf4", block_size=64, double_quantize=True)}, ODD),
    "odd shapes under zero.Init": (
        {"model": "odd", "fields": {**INT8, "skip_modules": ["head"]}, "zero_init": True},
        ODD,
    ),
    "Conv1D": ({"model": "gpt2", "fields": INT8}, CONV),
    "Conv1D under zero.Init": ({"model": "gpt2", "fields": frozen("mxfp8_e4m3"), "zero_init": True}, CONV),
    "tied, with biases": ({"model": "tied", "fields": INT4, "zero_init": True}, LINEAR),
    "tied, nothing skipped": ({"model": "tied", "fields": {**INT4, "skip_modules": []}}, LINEAR),
    "nothing skipped": ({"fields": {**INT4, "skip_modules": []}, "zero_init": True}, ["lm_head.weight", *LINEAR]),
    "reentrant": ({"fields": INT8, "checkpointing": "reentrant"}, LINEAR),
    "non-reentrant": ({"fields": INT8, "checkpointing": "non-reentrant", "secondary": {"scope": "rank"}}, LINEAR),
    "by module": ({"fields": INT4, "gather_granularity": "module", "zero_init": True}, LINEAR),
    "by parameter": ({"fields": INT4, "gather_granularity": "parameter"}, LINEAR),
    "on the host": ({"fields": INT4, "overrides": ON_CPU, "zero_init": True}, LINEAR),
    "named": ({"fields": {**INT4, "modules": ["q_proj", "layers.1.mlp.*"]}, "zero_init": True}, NAMED),
    "named, after": ({"fields": {**INT4, "modules": ["q_proj", "layers.1.mlp.*"]}}, NAMED),
    "frozen by then": ({"fields": {**INT4, "modules": "frozen"}, "zero_init": True}, LINEAR),
    "a layer skipped": ({"fields": {**INT4, "skip_modules": ["layers.1", "lm_head"]}, "zero_init": True}, LAYER_0),
    "a layer skipped, after": ({"fields": {**INT4, "skip_modules": ["layers.1", "lm_head"]}}, LAYER_0),
}


def check_settings(names, world):
    cases = {name: SETTINGS[name][0] for name in names}
    for log in run_ranks(jobs.all_against_rounded, world=world, ranks_per_node=1, cases=cases):
        for name in names:
            assert log[name]["stored"] == sorted(SETTINGS[name][1]), name
            assert log[name]["equal"], (name, log[name]["losses"])


def test_models_and_settings():
    check_settings(SETTINGS, world=2)


@pytest.mark.parametrize("world", [1, 3, 6])
def test_models_on_other_numbers_of_ranks(world):
    """With six ranks there are more of them than granules in most of the odd layers."""
    check_settings(["odd shapes under zero.Init", "odd shapes, double", "Conv1D under zero.Init"], world)
