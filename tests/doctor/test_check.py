"""A ds_config without a job: what is refused, what it resolves to, what changes nothing, what it costs."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import create_autospec

import deepspeed
import pytest
import torch
import transformers
from config_cases import BF16, ds_config
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from tests.places import ROOT
from zeropp_fp8.__main__ import main as command
from zeropp_fp8.config import RECIPES, SECTION, ConfigError, resolve
from zeropp_fp8.doctor.check import check, cost_of, differing, parse
from zeropp_fp8.doctor.problems import exit_status
from zeropp_fp8.plan import H200, METHODS, Cluster, Job, Model, estimate, method_of
from zeropp_fp8.plan.__main__ import main as plan_main
from zeropp_fp8.plan.hugging_face import model_of
from zeropp_fp8.plugin.auto import FILLED, as_if_filled, auto_keys
from zeropp_fp8.zero.states.compressed import checked_update

FOLDER = ROOT / "ds_configs"
BATCH = {"train_micro_batch_size_per_gpu": 1}


def checked(section=None, zero=None, ranks=None, ranks_per_node=None, **others):
    return check(ds_config(section, zero, **{**BATCH, **others}), ranks, ranks_per_node)


def texts(found, serious=True):
    return [each.text for each in found.problems if each.serious == serious]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_every_ds_config_of_the_repository(path, capsys):
    with pytest.raises(SystemExit) as ended:
        command(["check", str(path), "--ranks", "16", "--ranks-per-node", "8"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and text.endswith("no problem found\n")
    assert ("nothing in it asks for the plugin" in text) == (path.stem == "stock")
    recipe = "zeropp" if path.stem == "muon" else path.stem
    assert recipe == "stock" or f"recipe      {recipe}\n" in text
    stock = "refuses it" if path.stem == "muon" else "would run it"  # its Muon takes no reduce-scatter
    assert f"stock       DeepSpeed {stock}" in text and "changes nothing" not in text


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_recipe_is_the_method_that_the_plan_has_of_it(recipe):
    """A recipe that is resolved, with what defaults complete, counts as the one that is read by itself."""
    assert method_of(resolve(ds_config({"recipe": recipe}, **BF16))) == METHODS[recipe]


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ({"compile": "blocks"}, {"compiled": True}),
        ({"gradients": {"accumulate_in": "world"}}, {"sums_in_node": False}),
        (
            {"secondary": {"scope": "none"}},
            {
                **{"secondary_bytes": 0, "later_from_secondary": False, "backward_gather": "two-level"},
                "difference_of": None,
            },
        ),
        ({"secondary": {"scope": "rank"}}, {"backward_gather": "rank"}),
        ({"secondary": {"memory_gb": 1.5}}, {"copies": 1.5e9}),
        ({"secondary": {"memory_gb": "detect"}}, {"copies": "auto"}),
        ({"gradients": {"error_feedback": True}}, {"residual_bytes": 1 + 2 / 128}),
        ({"frozen": {"format": "int8"}}, {"stored_bytes": 1 + 2 / 64}),
        ({"compute": {"format": "fp8"}}, {"cast_bytes": 4.0, "fp8_products": True}),
    ],
)
def test_a_field_set_by_hand_changes_the_method(section, changes):
    own = method_of(resolve(ds_config({"recipe": "zeropp", **section})))
    assert own == replace(METHODS["zeropp"], **changes)


def test_fields_are_those_that_differ():
    config = resolve(ds_config({"recipe": "zeropp", "weights": {"block_size": 128}}))
    fields = dict(differing(config))
    assert fields["weights.block_size"] == 128 and fields["weights.format"] == "int8"
    assert "gradients.hadamard" not in fields and "recipe" not in fields
    assert dict(differing(resolve(ds_config({})))) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"section": {"recipe": "zerop"}}, 'there is no recipe "zerop" (did you mean "zeropp"?)'),
        ({"section": {"weights": {"format": "int8", "blocks": 2}}}, '"zeropp_fp8.weights.blocks": unknown key'),
        ({"section": {"topology": {"ranks_per_node": "auto"}}}, '"zeropp_fp8.topology.ranks_per_node": '),
        ({"section": {}, "zero": {"stage": 2}}, "the plugin works with stage 3 only"),
        ({"section": {"recipe": "fp8-lm"}, "fp16": {"enabled": True}}, 'with "fp16.enabled"'),
        ({"section": {"topology": {"ranks_per_node": 3}}, "ranks": 4, "ranks_per_node": 2}, "leaves 3 + 1 of the 4"),
        ({"section": {"secondary": {"scope": 3}}, "ranks": 4, "ranks_per_node": 2}, "3 does not divide the 2 ranks"),
        (
            {"section": {"recipe": "fp8-lm"}, "optimizer": {"type": "Lion", "params": {}}},
            'are those of Adam, AdamW, FusedAdam, DeepSpeedCPUAdam, Muon, but "optimizer.type" is "Lion": use "AdamW"',
        ),
        (
            {"section": {}, "zero": {"reduce_bucket_size": "much"}},
            '"zero_optimization.reduce_bucket_size": "much" is not allowed; it takes a whole number above 0',
        ),
        ({"section": {}, "zero": {"no_such_key": 1}}, '"zero_optimization.no_such_key": unknown key'),
        *(
            ({"section": {}, "optimizer": {"type": kind, "params": {}}}, says)
            for kind, says in {
                "Adan": '"optimizer.type": neither DeepSpeed nor torch.optim has "Adan" (did you mean "Adam"?)',
                "OneBitAdam": '"optimizer.type" "OneBitAdam" does not go with ZeRO',
                "Muon": '"optimizer.type" "Muon" does not go with reduce-scatter; set "zeropp_fp8.partition"',
                "SGD": '"optimizer.type" "SGD" is untested with ZeRO; to use it set "zero_allow_untested_optimizer" to',
            }.items()
        ),
        ({"section": {}, "nebula": {}}, '"nebula": {} is refused by DeepSpeed: Nebula checkpointing has been removed'),
        (
            {"section": {}, "train_batch_size": 5, "gradient_accumulation_steps": 1, "ranks": 4},
            '"gradient_accumulation_steps": 1 cannot be on 4 ranks: "train_batch_size" is',
        ),
        ({"section": {}, "steps_per_print": "auto"}, '"steps_per_print" is "auto": give a value; neither'),
    ],
)
def test_what_start_would_refuse(given, message):
    found = checked(**given)
    assert len(texts(found)) == 1 and message in texts(found)[0]
    assert exit_status(found.problems) == 1


def test_every_problem_at_once():
    found = checked({"recipe": "zerop"}, {"no_such_key": 1}, steps_per_print="auto", gradient_clipping="auto")
    assert len(texts(found)) == 3 and found.auto == ["gradient_clipping"]


@pytest.mark.parametrize("kind", ["AdamW", "Adagrad", "SGD", "Muon"])
def test_optimizers_that_an_engine_makes(kind):
    zero = {"reduce_scatter": False} if kind == "Muon" else None
    found = checked({}, zero, optimizer={"type": kind}, zero_allow_untested_optimizer=kind == "SGD")
    assert texts(found) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "bettas": [0.9, 0.9]}}},
            '"optimizer.params.bettas" (did you mean "betas"?) is no parameter of "optimizer.type"; rename or remove',
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "bias_correction": True}}},
            '"optimizer.params.bias_correction" is no parameter of "optimizer.type"; rename or remove it',
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}}},
            '"optimizer.params.lr": "1e-4" is not allowed; it takes a number at least 0, without quotes',
        ),
        (
            {"optimizer": "AdamW"},
            '"optimizer": "AdamW" is not allowed; it takes an object, for example {"type": "AdamW"',
        ),
        (
            {"optimizer": {"type": "AdamW", "params": [1]}},
            '"optimizer.params": [1] is not allowed; it takes an object, as in {',
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": 5}},
            '"scheduler.params": 5 is not allowed; it takes an object, as in {',
        ),
        ({"bf16": True}, '"bf16": true is not allowed; it takes an object, for example {"enabled": true}'),
        (
            {"scheduler": {"type": "WarmupXX"}},
            '"scheduler.type" "WarmupXX" does not go with ZeRO (did you mean "WarmupLR"?), which',
        ),
        ({"scheduler": {"type": "StepLR", "params": {"step_size": 5}}}, '"scheduler.type" "StepLR" does not go with'),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_numsteps": 5}}},
            '"scheduler.params.warmup_numsteps" (did you mean "warmup_num_steps"?) is no parameter of "scheduler.type"',
        ),
        (
            {"scheduler": {"type": "WarmupLR"}},
            '"scheduler.params" is missing; add an object, as in {"type": "WarmupLR"',
        ),
        (  # the Trainer fills it in, and the scheduler has none
            {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_max_lr": "auto"}}},
            '"scheduler.params.warmup_max_lr" (did you mean "warmup_min_ratio"?) is no parameter of "scheduler.type"',
        ),
    ],
)
def test_what_deepspeed_would_raise_when_it_makes_an_optimizer_or_a_scheduler(given, message):
    (text,) = texts(checked({"recipe": "zeropp"}, **given))
    assert message in text


@pytest.mark.parametrize(
    "given",
    [
        {
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 1e-4, "torch_adam": True, "fused": True, "betas": [0.9, 0.9]},
            }
        },
        {"optimizer": {"type": "Adam", "params": {"lr": "auto", "adam_w_mode": True, "bias_correction": True}}},
        {
            "optimizer": {"type": "SGD", "params": {"nesterov": True, "momentum": 0.9}},
            "zero_allow_untested_optimizer": True,
        },
        {"optimizer": {"type": "Lion", "params": None}},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 5}}},
    ],
)
def test_optimizers_and_schedulers_that_deepspeed_makes(given):
    assert not texts(checked({"recipe": "zeropp"}, **given))


def test_schedulers_of_torch_refuse_a_zero_optimizer():
    """Which check is told by nothing but the type: stock's engine, with the optimizer that it has."""
    params = {"step_size": 5}
    config = SimpleNamespace(scheduler_name=lambda: "StepLR", scheduler_params=lambda: params)
    with pytest.raises(TypeError, match="is not an Optimizer"):
        DeepSpeedEngine._scheduler_from_config(config, create_autospec(DeepSpeedZeroOptimizer_Stage3, instance=True))


@pytest.mark.parametrize("batch", [2, 4, 8])
def test_ranks_that_share_sequences_count_as_one(batch):
    """DeepSpeed divides the ranks of the job by them, and multiplies micro-batches with what is left."""
    given = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "train_batch_size": batch}
    assert bool(texts(checked({}, sequence_parallel_size=2, ranks=4, **given))) == (batch != 4)
    assert bool(texts(checked({}, ranks=4, **given))) == (batch != 8)


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_options_of_adam_that_states_in_low_precision_do_not_support(option):
    """As the engine says it."""
    params = {"torch_adam": True, option: True}
    (text,) = texts(checked({"recipe": "fp8-lm"}, optimizer={"type": "AdamW", "params": params}))
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], **{option: True})
    with pytest.raises(ConfigError, match=option) as refused:
        checked_update(optimizer)
    assert text == str(refused.value)
    assert texts(checked({"recipe": "zeropp"}, optimizer={"type": "AdamW", "params": params})) == []


@pytest.mark.parametrize("kind", lr_schedules.VALID_LR_SCHEDULES)
def test_parameters_without_which_deepspeed_makes_no_scheduler(kind):
    """Stock's engine names in its error what check names, and makes the scheduler where check is silent."""

    def stock(params):
        parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
        config = SimpleNamespace(scheduler_name=lambda: kind, scheduler_params=lambda: params)
        DeepSpeedEngine._scheduler_from_config(config, torch.optim.AdamW([parameter], betas=(0.9, 0.9)))

    def said(params):
        return texts(checked({"recipe": "zeropp"}, scheduler={"type": kind, "params": params}))

    all_of_it = {"OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}}.get(kind, {"total_num_steps": 10})
    needed = {} if kind in ("LRRangeTest", "WarmupLR") else all_of_it
    stock(needed)
    assert said(needed) == []
    for name in needed:
        others = {key: value for key, value in needed.items() if key != name}
        with pytest.raises(TypeError, match=f"missing 1 required positional argument: '{name}'"):
            stock(others)
        (text,) = said(others)
        assert text == (f'"scheduler.type" "{kind}" needs "scheduler.params.{name}"; add what is missing')
        asked = said({**others, name: "auto"})  # not missing, whoever fills it in
        assert not any("needs" in text for text in asked) and (name == "total_num_steps") == (asked == [])
    if len(needed) > 1:
        (text,) = said({})
        assert all(f'"scheduler.params.{name}"' in text for name in needed)


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize(
    ("kind", "params", "wrong"),
    [
        ("AdamW", {"bias_correction": True, "fp32_optimizer_states": True}, None),
        ("AdamW", {"torch_adam": True, "adam_w_mode": True, "fp32_optimizer_states": True, "foreach": False}, None),
        ("Adam", {"fused": True}, "fused"),
        ("adam", {"momentum": 0.9}, "momentum"),
        ("Adagrad", {"eps": 1e-8, "weight_decay": 0.1}, None),
        ("Adagrad", {"betas": [0.9, 0.9]}, "betas"),
        ("Lion", {"betas": [0.9, 0.9], "weight_decay": 0.1}, None),
        ("Lion", {"eps": 1e-8}, "eps"),
        ("Lamb", {"max_coeff": 10.0, "min_coeff": 0.01}, None),
        ("Lamb", {"max_grad_norm": 1.0}, "max_grad_norm"),
        ("Lamb", {"nesterov": True}, "nesterov"),
        ("SGD", {"lr": 0.1, "nesterov": False}, None),
        ("SGD", {"betas": [0.9, 0.9]}, "betas"),
    ],
)
def test_parameters_with_which_deepspeed_makes_no_optimizer(kind, params, wrong, offloads, monkeypatch):
    """Stock's engine, of classes that check their arguments and build no kernel, raises just where check says so."""
    zero = {"offload_optimizer": {"device": "cpu" if offloads else "none"}}
    found = texts(checked({}, zero, optimizer={"type": kind, "params": params}, zero_allow_untested_optimizer=True))
    for module, name in (
        (deepspeed.ops.adagrad, "DeepSpeedCPUAdagrad"),
        (deepspeed.ops.adam, "DeepSpeedCPUAdam"),
        (deepspeed.ops.adam, "FusedAdam"),
        (deepspeed.ops.lamb, "FusedLamb"),
        (deepspeed.ops.lion, "DeepSpeedCPULion"),
        (deepspeed.ops.lion, "FusedLion"),
    ):
        monkeypatch.setattr(module, name, create_autospec(getattr(module, name)))
    config = create_autospec(DeepSpeedEngine, instance=True, zenflow=False)
    config.optimizer_params.return_value = params
    config.optimizer_name.return_value = kind if kind == "SGD" else kind.lower()
    config.zero_use_cpu_optimizer.return_value = offloads
    config.bf16_optimizer_states.return_value = False
    config.get_optimizer_configuration.side_effect = partial(DeepSpeedEngine.get_optimizer_configuration, config)
    parameters = [torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))]
    with pytest.raises((TypeError, ValueError), match=wrong) if wrong else nullcontext():
        DeepSpeedEngine._configure_basic_optimizer(config, parameters)
    assert [f'"optimizer.params.{wrong}" ' in text for text in found] == [True] * bool(wrong)


def test_a_section_among_the_keys_of_zero():
    """It is looked at all the same."""
    found = checked(None, {"stage": 3, SECTION: {"recipe": "zeropp", "fromat": 1}})
    moved, refused = texts(found)
    assert moved == f'"{SECTION}" is inside of "zero_optimization": move it to the top level of the ds_config'
    assert "fromat" in refused


def test_costs_without_ranks_are_of_the_plans_usual_ones(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(ds_config({"recipe": "zeropp"}, **BATCH)))
    said = []
    for ranks in ([], ["--ranks", "64", "--ranks-per-node", "8"]):
        with pytest.raises(SystemExit) as ended:
            command(["check", str(path), "--params", "7e9", *ranks])
        assert ended.value.code == 0
        said.append(capsys.readouterr().out.splitlines())
    assert "note: the step is that of 8 node(s) of 8 rank(s): give --ranks for yours" in said[0]
    assert (
        [line for line in said[0] if "(modelled)" in line] == [line for line in said[1] if "(modelled)" in line] != []
    )


def test_owners_need_a_later_deepspeed(monkeypatch):
    from deepspeed.runtime.zero import stage3

    monkeypatch.delattr(stage3.DeepSpeedZeroOptimizer_Stage3, "_get_param_partition_rank")
    assert "needs DeepSpeed 0.19.3 or later" in texts(checked({"recipe": "fp8-lm"}))[0]


def test_what_is_no_ds_config(tmp_path, capsys):
    twice = tmp_path / "twice.json"
    twice.write_text('{"bf16": {}, "bf16": {}}')
    nothing = "neither a file nor base64"
    for path, message in ((tmp_path / "none.json", nothing), ("", nothing), (twice, "duplicate keys")):
        with pytest.raises(SystemExit) as ended:
            command(["check", str(path)])
        text = capsys.readouterr().out
        assert ended.value.code == 1 and message in text and "1 problem(s):" in text


def auto(**section):
    """As Hugging Face's documentation shows one."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "scheduler": {
            "type": "WarmupLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
        },
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
        SECTION: section,
    }


def test_auto_values_are_accepted_and_named(tmp_path, capsys):
    """Where the Trainer fills them in; FP8 compute, which fp16 would exclude, included. Accelerate's stage too."""
    given = auto(recipe="fp8-lm")
    keys = set(auto_keys(given))
    assert len(keys) == 16 and keys < FILLED
    assert set(auto_keys(as_if_filled(given))) == {key for key in keys if ".params." in key}
    found = check(given, ranks=4)
    assert texts(found) == [] and texts(found, serious=False) == [] and set(found.auto) == keys
    given["zero_optimization"]["stage"] = "auto"
    path = tmp_path / "auto.json"
    path.write_text(json.dumps(given))
    with pytest.raises(SystemExit) as ended:
        command(["check", str(path)])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "filled in by the Trainer or Accelerate: bf16.enabled, fp16.enabled," in text
    assert "zero_optimization.stage" in text
    assert set(auto_keys(auto(secondary={"memory_gb": "auto"}))) == keys


def test_no_batch_size_at_all_is_refused():
    found = check({"zero_optimization": {"stage": 3}, SECTION: {}})
    assert any('"train_micro_batch_size_per_gpu" is missing' in text for text in texts(found))


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ({"weights": {"block_size": 64}}, ["weights.block_size"]),
        ({"gradients": {"block_size": 32}}, ["gradients.block_size"]),
        ({"compute": {"min_features": 8}}, ["compute.min_features"]),
        ({"frozen": {"block_size": 32}}, ["frozen.block_size"]),
        ({"numerics": {"watch": "stop", "spike": 5.0, "parts": 2}}, ["numerics.parts"]),
        ({"numerics": {"every": 9, "spike": 5.0, "parts": 2}}, ["numerics.spike"]),
        ({"compute": {"format": {"weights": "fp8_e4m3", "activations": "fp8_e4m3"}}}, []),
    ],
)
def test_fields_that_change_nothing(section, names):
    found = checked(section)
    assert texts(found) == []
    assert [text.partition('" changes')[0] for text in texts(found, False)] == [f'"{SECTION}.{name}' for name in names]


def test_keys_that_deepspeed_never_looks_at():
    """One that is almost a key of its own is a fault: it trains without what was asked for."""
    checkpoint = {"tag_validaton": "Fail", "mine": 1}
    found = checked(
        {"recipe": "zeropp"}, gradient_cliping=1.0, checkpoint=checkpoint, my_own={}, sequence_parallel_size=1
    )
    assert texts(found) == [
        '"gradient_cliping": DeepSpeed has no such key (did you mean "gradient_clipping"?); rename or remove it',
        '"checkpoint.tag_validaton": DeepSpeed has no such key (did you mean "tag_validation"?); rename or remove it',
    ]
    assert texts(found, False) == ['DeepSpeed never looks at "my_own": rename or remove it']


def test_what_stock_would_do():
    assert checked({}).stock == 'would run it, and ignore "zeropp_fp8"'
    keys = checked(None, {"zero_quantized_weights": True, "zero_quantized_gradients": False})
    assert keys.config.weights.format == "int8"
    assert keys.stock == "would run it; zero_quantized_weights would be its own, for which it needs CUDA and nvcc"
    assert checked({}, {"no_such_key": 1}).stock == "refuses it"


def test_the_environment_names_a_recipe(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("ZEROPP_FP8_RECIPE", "zeropp")
    with pytest.raises(SystemExit):
        command(["check", str(FOLDER / "stock.json")])
    assert "recipe      zeropp (from ZEROPP_FP8_RECIPE)" in capsys.readouterr().out


@pytest.mark.parametrize("zero", [{"stage": 2}, {}, None])
def test_other_stages_are_said_to_run_as_stock(zero):
    """A section would be refused there."""
    (said,) = texts(check({**BATCH, **({} if zero is None else {"zero_optimization": zero})}), serious=False)
    assert f'the plugin: stage {2 if zero else 0} runs as stock: set "zero_optimization.stage" to 3, and add "' in said


def test_costs_are_the_plans(tmp_path, capsys):
    """Accumulation and what stays gathered are the ds_config's; ranks of a node too, where it says them."""
    zero = {"stage3_max_live_parameters": 5e8, "stage3_max_reuse_distance": 3e8}
    section = {"recipe": "zeropp", "secondary": {"memory_gb": 1.5}}
    path, out = tmp_path / "ds_config.json", tmp_path / "found.json"
    path.write_text(json.dumps(ds_config(section, zero, **BATCH, **BF16, gradient_accumulation_steps=3)))
    words = ["check", str(path), "--params", "7e9", "--ranks", "16", "--ranks-per-node", "4", "--gbit", "25"]
    with pytest.raises(SystemExit) as ended:
        command([*words, "--json", str(out)])
    text = capsys.readouterr().out
    job = Job(Model.from_parameters(7e9), Cluster(4, 4, 25), 2048, micro_batches=3, kept_parameters=3e8)
    found = json.loads(out.read_text())
    for one, known in (
        (estimate(METHODS["stock"], job, H200), found["cost"][0]),
        (estimate(METHODS["zeropp"], replace(job, copies=1.5e9), H200), found["cost"][1]),
    ):
        sent = f"{one.inter_bytes / 1e9:.3f} +{one.intra_bytes / 1e9:.3f} +{one.memory.peak / 2**30:.2f}"
        assert re.search(rf"^{one.method} +{1e3 * one.step_s:.1f} .* {sent} ", text, flags=re.M)
        assert (known["step_s"], known["peak_bytes"]) == (one.step_s, one.memory.peak)
    assert ended.value.code == 0
    assert found["config"]["recipe"] == "zeropp" and len(found["cost"]) == 2 and found["problems"] == []

    with pytest.raises(SystemExit):
        command([*words, "--secondary-gb", "0.5", "--gpu-gb", "1", "--json", str(out)])
    found = json.loads(out.read_text())
    assert found["cost"][1]["step_s"] == estimate(METHODS["zeropp"], replace(job, copies=0.5e9), H200).step_s
    assert "note: a step does not fit into --gpu-gb 1" in capsys.readouterr().out

    offload = {"offload_optimizer": {"device": "cpu"}}
    path.write_text(json.dumps(ds_config({"recipe": "zeropp"}, offload, **BATCH)))
    with pytest.raises(SystemExit):
        command(words)
    text = capsys.readouterr().out
    assert "of weights and states on the GPU, without offload" in text
    assert 'of weights in 16 bits, and neither "bf16.enabled" nor "fp16.enabled" is true' in text

    path.write_text(json.dumps(ds_config({"recipe": "qlora"}, **BATCH)))
    with pytest.raises(SystemExit) as ended:
        command([*words, "--json", str(out)])
    text, found = capsys.readouterr().out, json.loads(out.read_text())
    assert ended.value.code == 2 and "recipe      qlora" in text and text.endswith("no problem found\n")
    assert (
        "\nnote: no estimate: qlora: its codes are of frozen weights; a full training has none: give --lora-rank"
        in text
    )
    assert "--methods" not in text and (found["job"], found["cost"]) == (None, [])


def said_of_costs(tmp_path, capsys, given, *words):
    """(lines, estimates, exit status) of a ds_config's cost."""
    path, out = tmp_path / "ds_config.json", tmp_path / "found.json"
    path.write_text(json.dumps(given))
    with pytest.raises(SystemExit) as ended:
        command(["check", str(path), "--params", "7e9", "--json", str(out), *words])
    return capsys.readouterr().out.splitlines(), json.loads(out.read_text())["cost"], ended.value.code


def test_copies_that_take_what_is_free_are_those_of_the_plan(tmp_path, capsys):
    """An engine bounds them by the GPU's memory: they fit, and the step is that of the plan."""
    given = ds_config({"recipe": "zeropp-pcie"}, {"stage3_max_live_parameters": 2e8}, **BATCH, **BF16)
    rates = ["--ranks", "4", "--gbit", "64", "--link-efficiency", "1"]
    lines, (_, own), _ = said_of_costs(tmp_path, capsys, given, *rates, "--gpu-gb", "52")
    plan_main(
        ["--params", "7e9", "--nodes", "1", "--ranks-per-node", "4", "--gpu-gb", "52", "--intra-gbs", "8", "--json"]
    )
    (planned,) = (one for one in json.loads(capsys.readouterr().out)["methods"] if one["method"] == "zeropp-pcie")
    assert own["step_s"] == pytest.approx(planned["step_s"], rel=5e-3)
    assert 0 < own["memory"]["secondary"] == planned["memory"]["secondary"] < 4e9
    assert not any("note:" in line for line in lines)
    lines, (_, whole), _ = said_of_costs(tmp_path, capsys, given, *rates)
    assert whole["memory"]["secondary"] > 7e9
    assert 'note: "secondary.memory_gb" is "auto", and copies count as without a bound: give --gpu-gb' in lines


@pytest.mark.parametrize(
    ("batch", "words", "steps", "assumed"),
    [
        ({"train_batch_size": 128}, ["--ranks", "8"], 16, False),
        ({"train_batch_size": 128}, [], 2, False),  # 8 x 8 ranks
        ({"train_batch_size": 128, "gradient_accumulation_steps": "auto"}, ["--ranks", "8"], 16, False),
        ({"train_batch_size": 128, "sequence_parallel_size": 2}, ["--ranks", "8"], 32, False),
        ({"gradient_accumulation_steps": 4}, ["--ranks", "8"], 4, False),
        ({}, ["--ranks", "8"], 1, False),
        ({"gradient_accumulation_steps": "auto"}, ["--ranks", "8"], 1, True),
        ({"train_batch_size": "auto"}, ["--ranks", "8"], 1, True),
        ({"gradient_accumulation_steps": "auto"}, ["--ranks", "8", "--micro-batches", "3"], 3, False),
    ],
)
def test_accumulation_is_what_an_engine_makes_of_the_batch_sizes(tmp_path, capsys, batch, words, steps, assumed):
    lines, _, _ = said_of_costs(tmp_path, capsys, ds_config({"recipe": "zeropp"}, **BATCH, **BF16, **batch), *words)
    assert json.loads((tmp_path / "found.json").read_text())["job"]["micro_batches"] == steps
    note = 'note: one micro-batch per step is assumed, which "auto" does not say: give --micro-batches'
    assert (note in lines) == assumed


def test_ranks_of_a_node_that_the_section_says_otherwise(tmp_path, capsys):
    given = ds_config({"recipe": "zeropp", "topology": {"ranks_per_node": 4}}, **BATCH, **BF16)
    words = ["--ranks", "16", "--ranks-per-node"]
    said = '"topology.ranks_per_node" is 4, which counts instead of --ranks-per-node: --gbit is what so many ranks send'
    for each, noted in (("8", True), ("4", False)):
        lines, _, _ = said_of_costs(tmp_path, capsys, given, *words, each)
        assert any("4 x 4 GPUs" in line for line in lines) and (f"note: {said} together" in lines) == noted


def test_costs_of_a_precision_that_the_trainer_fills_in(tmp_path, capsys):
    lines, _, _ = said_of_costs(tmp_path, capsys, auto(recipe="zeropp"), "--ranks", "8", "--micro-batches", "1")
    assert not any("note:" in line for line in lines)


@pytest.mark.parametrize("prefix", ["", "stage3_"])
def test_what_stays_gathered_by_either_name_of_a_key(tmp_path, capsys, prefix):
    zero = {f"{prefix}max_live_parameters": 3e8, f"{prefix}max_reuse_distance": 1e8}
    said_of_costs(tmp_path, capsys, ds_config({"recipe": "zeropp"}, zero, **BATCH, **BF16))
    assert json.loads((tmp_path / "found.json").read_text())["job"]["kept_parameters"] == 1e8


def test_costs_where_nothing_asks_for_the_plugin(tmp_path, capsys):
    lines, cost, status = said_of_costs(tmp_path, capsys, {**BATCH, **BF16, "zero_optimization": {"stage": 3}})
    assert (cost, status) == ([], 2)
    assert "note: no estimate: nothing in it asks for the plugin" in lines


def test_a_section_without_a_recipe_is_named_as_such(tmp_path, capsys):
    """It is not `lossless`, whatever it sets; and its fields say whether its LoRA is modelled."""
    given = ds_config({"weights": {"format": "int4"}, "gradients": {"inter_format": "int4"}}, **BATCH, **BF16)
    lines, (_, own), _ = said_of_costs(tmp_path, capsys, given, "--ranks", "8")
    assert own["method"] == "this ds_config" and any(line.startswith("this ds_config  ") for line in lines)
    assert said_of_costs(tmp_path, capsys, given, "--lora-rank", "8")[2] == 0
    for section in ({"compute": {"format": "fp8"}}, {"recipe": "zeropp", "compile": "blocks"}):
        given = ds_config(section, **BATCH, **BF16)
        lines, cost, status = said_of_costs(tmp_path, capsys, given, "--lora-rank", "8")
        name = section.get("recipe", "this ds_config")
        assert (cost, status) == ([], 2)
        assert any(line.startswith(f"note: no estimate: {name}: its LoRA is not modelled; that of") for line in lines)


def adam(rate, kind="AdamW"):
    return {"optimizer": {"type": kind, "params": {"lr": rate}}}


@pytest.mark.parametrize(
    ("recipe", "optimizer", "bits"),
    [
        ("zeropp-exact", adam(1e-3), "5.5"),
        ("zeropp-exact", adam(5e-4, "Adam"), "4.4"),
        ("zeropp-exact", adam(1), "5.5"),  # Hjson reads 1 as a whole number
        ("zeropp-exact", adam(2e-4), None),
        ("zeropp-exact", adam(1e-6), None),
        ("zeropp-exact", adam("auto"), None),
        ("zeropp-exact", adam(0.1, "Lion"), None),
        ("zeropp-exact", {"optimizer": {"type": "AdamW"}}, None),
        ("zeropp-exact", {}, None),
        ("zeropp", adam(1e-3), None),
        ({"recipe": "zeropp", "weights": {"difference": "exact"}}, adam(1e-3), None),
    ],
)
def test_learning_rates_at_which_most_bits_of_weights_change(recipe, optimizer, bits):
    found = checked(recipe if isinstance(recipe, dict) else {"recipe": recipe}, **BF16, **optimizer)
    assert texts(found) == []
    if bits is None:
        assert texts(found, False) == []
        return
    (said,) = texts(found, False)
    rate = f'"optimizer.params.lr": {optimizer["optimizer"]["params"]["lr"]:g} changes so much'
    assert said.startswith(f'{rate} that "{SECTION}.weights.difference": "exact" takes {bits} bits per weight')
    assert 'with "weights.format": "int8" it takes' in said


@pytest.mark.parametrize("between, warns", [("int4", True), ("int8", False), ("none", False)])
@pytest.mark.parametrize("kind", ["Muon", "AdamW"])
def test_muon_wants_more_than_4_bits_of_gradients(kind, between, warns):
    section = {"recipe": "zeropp", "partition": "whole_tensor", "gradients": {"inter_format": between}}
    said = texts(checked(section, **BF16, optimizer={"type": kind, "params": {"lr": 1e-5}}), False)
    warned = [text for text in said if text.startswith('"optimizer.type": "Muon" amplifies')]
    assert len(warned) == (warns and kind == "Muon")


@pytest.mark.parametrize(
    ("optimizer", "words", "rate"),
    [
        (adam(1e-6), [], 1e-6),
        (adam(1e-6), ["--lr", "1e-4"], 1e-4),
        ({}, ["--lr", "1e-4"], 1e-4),
        *((optimizer, [], 1e-5) for optimizer in ({}, adam("auto"), adam(0.1, "SGD"), {"optimizer": {"type": "Adam"}})),
    ],
)
def test_costs_are_at_the_learning_rate_of_the_ds_config(optimizer, words, rate):
    given = ds_config({"recipe": "zeropp-exact"}, **BF16, **optimizer)
    arguments = parse(["x.json", "--params", "7e9", "--ranks", "16", "--ranks-per-node", "8", *words])
    job, (_, own) = cost_of(resolve(given), given, arguments)
    assert job.learning_rate == rate
    assert own.inter_bytes == estimate(METHODS["zeropp-exact"], replace(job, learning_rate=rate), H200).inter_bytes


@pytest.mark.parametrize("names", [("bf16",), ("fp16",), ("bf16", "fp16")])
def test_a_precision_that_the_trainer_fills_in_counts_as_16_bits(names):
    assert texts(checked({"recipe": "zeropp-exact"}, **{name: {"enabled": "auto"} for name in names})) == []
    (refused,) = texts(checked({"recipe": "zeropp-exact"}))
    assert refused.startswith(f'"{SECTION}.weights.difference": "exact" is of weights in 16 bits')


def test_the_model_by_its_config(tmp_path, capsys):
    """Of transformers; its parameters are counted, not guessed from the name."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=512
    )
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        parameters = transformers.LlamaForCausalLM(config).num_parameters()
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(ds_config({"recipe": "zeropp"}, **BATCH)))
    job = Job(model_of(tmp_path), Cluster(2, 2, 25), 2048)
    assert job.model.parameters == parameters
    ranks = ["--ranks", "4", "--ranks-per-node", "2", "--gbit", "25"]
    with pytest.raises(SystemExit) as ended:
        command(["check", str(path), "--model", str(tmp_path), *ranks])
    one = estimate(METHODS["stock"], job, H200)
    assert ended.value.code == 0
    assert re.search(rf"^stock .* {one.inter_bytes / 1e9:.3f} ", capsys.readouterr().out, flags=re.M)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks-per-node", "2"], "--ranks-per-node needs --ranks"),
        (["--ranks", "4", "--ranks-per-node", "3"], "--ranks 4 is no multiple of --ranks-per-node 3: change"),
        (["--ranks", "0"], "--ranks: 0: give a whole number from 1 to 100000"),
        (["--model", "x", "--layers", "3", "--ranks", "2"], "--layers does not go with --model"),
        *(
            ([option, "8"], f"{option} is of a step's cost, and needs --params or --model")
            for option in ("--gpu-gb", "--lora-rank", "--hidden", "--gbit", "--tflops", "--micro-batches")
        ),
    ],
)
def test_wrong_options(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        command(["check", "x.json", *words])
    assert ended.value.code == 2 and message in capsys.readouterr().err
