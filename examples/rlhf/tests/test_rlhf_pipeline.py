"""The pipeline of the RLHF examples without training: settings, the plan, the folder, stages run by stand-ins."""

import copy
import dataclasses
import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import pipeline
import pytest
import torch
from common.arguments import FieldParser, PipelineArguments, PPOArguments
from common.tasks import KINDS as TASKS
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import device
from pipeline import Stage, check_folder, command_line, merged, plan, read_settings, run

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def bf16(monkeypatch):
    """As on a GPU, whatever this processor can do."""
    monkeypatch.setattr(pipeline, "computes_in_bf16", lambda accelerator: True)


def arguments_of(**given):
    return PipelineArguments(**({"out": "runs/x"} | given))


def planned(options=None, ranks=2, **given):
    return plan(arguments_of(**given), read_settings(None, []) | (options or {}), "cpu", ranks)


def options_of(stages):
    return {stage.name: stage.options for stage in stages}


# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_of_a_file_and_of_the_command_line(tmp_path):
    path = tmp_path / "settings.json"
    path.write_text('{"sft": {"steps": 5, "lr": 0.1}, "ds_config": {"bf16": {"enabled": false}}}')
    changes = [
        "sft.steps=7",
        "ppo.lr=1e-5",
        "ppo.reward_functions=a.py:f",
        'grpo.reward_functions=["gsm8k", "format"]',
        "sft.schedule=cosine",
        "sft.chat=true",
        "sft.epochs=null",
        "ppo.whiten_advantages=false",
        "dpo.eval_data=x=y.jsonl",
        "make_data.letters=5",
        "ds_config.zero_optimization.overlap_comm=false",
        "reward.ds_config.train_micro_batch_size_per_gpu=3",
    ]
    assert read_settings(str(path), changes) == {
        "sft": {"steps": 7, "lr": 0.1, "schedule": "cosine", "chat": True},
        "ds_config": {"bf16": {"enabled": False}, "zero_optimization": {"overlap_comm": False}},
        "ppo": {"lr": 1e-5, "reward_functions": ["a.py:f"], "whiten_advantages": False},
        "grpo": {"reward_functions": ["gsm8k", "format"]},
        "dpo": {"eval_data": ["x=y.jsonl"]},
        "make_data": {"letters": 5},
        "reward": {"ds_config": {"train_micro_batch_size_per_gpu": 3}},
    }
    assert read_settings(None, []) == {}


@pytest.mark.parametrize(
    "change, said",
    [
        ("sft.steps", "--set sft.steps: write STAGE.OPTION=VALUE"),
        ("steps=3", "--set steps=3: write STAGE.OPTION=VALUE"),
        ("sft.steps.more=3", "--set sft.steps.more=3: steps is 5, which has no parts"),
        ("stf.steps=3", "settings of stf: give options by name, of one of make_data, ds_config, sft, reward, dpo, ppo"),
        ("sft.step=3", "settings of sft: step: sft.py has no such option, or the pipeline gives it (out, models, deep"),
        ("sft.max-tokens=3", "settings of sft: max-tokens: sft.py has no such option"),
        ("ppo.out=runs/y", "settings of ppo: out: ppo.py has no such option, or the pipeline gives it (out"),
        ("evaluate.models=a", "settings of evaluate: models: evaluate.py has no such option, or"),
    ],
)
def test_settings_that_are_none(change, said, tmp_path):
    path = tmp_path / "settings.json"
    path.write_text('{"sft": {"steps": 5}}')
    with pytest.raises(ValueError) as raised:
        read_settings(str(path), [change])
    assert str(raised.value).startswith(said)


def test_a_settings_file_that_is_none(tmp_path):
    path = tmp_path / "settings.json"
    path.write_text("{steps}")
    with pytest.raises(ValueError, match=r"--settings .*settings.json is no JSON: Expecting"):
        read_settings(str(path), [])
    path.write_text('{"sft": 5}')
    with pytest.raises(ValueError, match="settings of sft: give options by name"):
        read_settings(str(path), [])
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"--settings .*settings.json: give an object, options by stage"):
        read_settings(str(path), [])
    with pytest.raises(FileNotFoundError):
        read_settings(str(tmp_path / "none.json"), [])


CONFIGS = st.recursive(
    st.integers(0, 3), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
).filter(lambda value: isinstance(value, dict))


def leaves(config, path=()):
    """{path: value} of what is no dict, or an empty one."""
    found = {}
    for key, value in config.items():
        found |= leaves(value, (*path, key)) if isinstance(value, dict) and value else {(*path, key): value}
    return found


@settings(derandomize=True, max_examples=200)
@given(CONFIGS, CONFIGS)
def test_merged(config, changes):
    before = copy.deepcopy((config, changes))
    new = merged(config, changes)
    assert (config, changes) == before
    assert merged(config, {}) == config and merged({}, changes) == changes and merged(new, changes) == new
    found, changed = leaves(new), leaves(changes)
    assert all(found[path] == value for path, value in changed.items() if value != {})
    for path, value in leaves(config).items():  # what no change lies on, above or below stays
        if not any(path[: len(other)] == other[: len(path)] for other in changed):
            assert found[path] == value


def test_options_on_a_command_line_are_read_as_they_were():
    options = {
        "model": "m",
        "out": "o o",
        "deepspeed_config": "c",
        "data": ["a", "b"],
        "eval_data": [],
        "lr": 1e-05,
        "kl_target": 0.5,
        "chat": True,
        "resume": False,
        "whiten_advantages": False,
        "reward_functions": ["gsm8k", "my file.py:f"],
        "reward_weights": [1.0, -0.5],
        "lora_rank": 0,
        "schedule": "cosine",
    }
    words = command_line(options)
    assert words[:4] == ["--model", "m", "--out", "o o"] and "--eval-data" not in words
    assert all(isinstance(word, str) for word in words)
    (read,) = FieldParser(PPOArguments).parse_args_into_dataclasses(words)
    assert read == PPOArguments(**options)


def test_ds_config(tmp_path, monkeypatch):
    zeropp = json.loads((ROOT / "ds_configs" / "zeropp.json").read_text())
    changes = {
        "ds_config": {"train_micro_batch_size_per_gpu": 7, "zero_optimization": {"overlap_comm": False}},
        "ppo": {"ds_config": {"train_micro_batch_size_per_gpu": 2}},
    }
    stages = {stage.name: stage.ds_config for stage in planned(changes, ranks=4, nodes=2)}
    assert stages["data"] is None and set(stages) == {"data", "sft", "reward", "ppo", "evaluate"}
    expected = copy.deepcopy(zeropp)
    expected["train_micro_batch_size_per_gpu"], expected["zero_optimization"]["overlap_comm"] = 7, False
    expected["zeropp_fp8"] |= {"topology": {"ranks_per_node": 2}, "report": {"every": 0}}
    assert stages["sft"] == stages["evaluate"] == expected
    assert stages["ppo"] == expected | {"train_micro_batch_size_per_gpu": 2}

    monkeypatch.setattr(pipeline, "computes_in_bf16", lambda accelerator: accelerator != "cpu")
    stock = {stage.name: stage.ds_config for stage in planned(recipe="stock")}["sft"]
    assert stock == json.loads((ROOT / "ds_configs" / "stock.json").read_text()) | {"bf16": {"enabled": False}}
    own = tmp_path / "own.json"
    own.write_text('{"zero_optimization": {"stage": 3}}')
    assert planned(recipe=str(own))[1].ds_config == {
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": False},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
    }


# -- the plan ---------------------------------------------------------------------------------------------------------


def test_the_plan_of_sft_reward_ppo():
    stages = planned(seed=3)
    assert [(stage.name, stage.script) for stage in stages] == [
        ("data", "make_data.py"),
        *((name, f"{name}.py") for name in ("sft", "reward", "ppo", "evaluate")),
    ]
    assert options_of(stages) == {
        "data": {"out": "runs/x/data", "seed": 3, "model": "small"},
        "sft": {"out": "runs/x/sft", "model": "runs/x/data/small", "data": ["runs/x/data/sft.jsonl"], "seed": 3},
        "reward": {"out": "runs/x/reward", "model": "runs/x/sft", "data": ["runs/x/data/preferences.jsonl"], "seed": 3},
        "ppo": {
            "out": "runs/x/ppo",
            "model": "runs/x/sft",
            "data": ["runs/x/data/tasks_train.jsonl"],
            "seed": 3,
            "eval_data": ["runs/x/data/tasks_test.jsonl"],
            "reward_model": "runs/x/reward",
            "reward_functions": ["exact_match"],
            "reward_weights": [0.0],
        },
        "evaluate": {
            "out": "runs/x/evaluate",
            "models": ["runs/x/sft", "runs/x/ppo"],
            "data": ["runs/x/data/tasks_test.jsonl"],
            "reward_functions": ["exact_match"],
        },
    }
    assert {stage.name: stage.after for stage in stages} == {
        "data": [],
        "sft": ["data"],
        "reward": ["data", "sft"],
        "ppo": ["data", "sft", "reward"],
        "evaluate": ["data", "sft", "ppo"],
    }


def test_each_policy_begins_where_the_one_before_ended():
    stages = planned(stages=["sft", "dpo", "reward", "grpo", "ppo"], metric="gsm8k")
    options, after = options_of(stages), {stage.name: stage.after for stage in stages}
    starts = {name: options[name]["model"] for name in ("dpo", "reward", "grpo", "ppo")}
    assert starts == {"dpo": "runs/x/sft", "reward": "runs/x/dpo", "grpo": "runs/x/dpo", "ppo": "runs/x/grpo"}
    assert after["ppo"] == ["data", "grpo", "reward"] and after["evaluate"] == ["data", "sft", "dpo", "grpo", "ppo"]
    assert options["evaluate"]["models"] == [f"runs/x/{name}" for name in ("sft", "dpo", "grpo", "ppo")]
    assert options["evaluate"]["reward_functions"] == options["ppo"]["reward_functions"] == ["gsm8k"]
    assert "eval_data" not in options["dpo"] and options["dpo"]["data"] == ["runs/x/data/preferences.jsonl"]


def test_the_metric_is_the_reward_where_there_is_no_other():
    options = options_of(planned(stages=["sft", "grpo"]))["grpo"]
    assert "reward_model" not in options and options["reward_weights"] == [1.0]


OWN = "format"


@pytest.mark.parametrize(
    "own, reward_model, functions, weights",
    [
        ({}, None, ["exact_match"], [1.0]),
        ({}, "runs/reward", ["exact_match"], [0.0]),
        ({"reward_weights": [0.5]}, "runs/reward", ["exact_match"], [0.5]),
        ({"reward_functions": [OWN]}, None, [OWN, "exact_match"], [1.0, 0.0]),
        ({"reward_functions": [OWN], "reward_weights": [2.0]}, "r", [OWN, "exact_match"], [2.0, 0.0]),
        ({"reward_functions": [OWN], "reward_weights": [2.0, 3.0]}, None, [OWN, "exact_match"], [2.0, 3.0]),
        ({"reward_functions": ["exact_match", OWN]}, "r", ["exact_match", OWN], [1.0, 1.0]),
        ({"reward_functions": ["exact_match"], "reward_weights": [3.0]}, None, ["exact_match"], [3.0]),
    ],
)
def test_rewards(own, reward_model, functions, weights):
    given = copy.deepcopy(own)
    assert pipeline.rewards_of(own, reward_model, "exact_match") == {
        "reward_functions": functions,
        "reward_weights": weights,
    }
    assert own == given
    if reward_model is not None:  # given in the settings, without a stage that trains one
        own = own | {"reward_model": reward_model}
    options = options_of(planned({"grpo": own}, stages=["sft", "grpo"]))["grpo"]
    assert (options["reward_functions"], options["reward_weights"]) == (functions, weights)


def test_an_own_model_and_own_data(tmp_path):
    for name in set(pipeline.FILES.values()):
        (tmp_path / name).write_text("")
    stages = planned(model="someone/model", data=str(tmp_path), stages=["ppo"])
    assert [stage.name for stage in stages] == ["ppo", "evaluate"] and stages[0].after == []
    assert stages[0].options["model"] == "someone/model"
    assert stages[0].options["data"] == [str(tmp_path / "tasks_train.jsonl")]
    assert stages[1].options["models"] == ["someone/model", "runs/x/ppo"]
    # What is not given is made: the data, or the model.
    data, sft, *_ = planned(model="someone/model")
    assert data.options == {"out": "runs/x/data", "seed": 0} and sft.options["model"] == "someone/model"
    assert sft.options["data"] == ["runs/x/data/sft.jsonl"] and sft.after == ["data"]
    data, sft, *_ = planned({"make_data": {"model": None, "letters": None}})  # as if nothing was given
    assert data.options["model"] == "small" and sft.options["model"] == "runs/x/data/small"
    options = {"make_data": {"model": "tiny", "out": str(tmp_path / "made"), "text_characters": 0, "chat": False}}
    data, sft, *_ = planned(options, data=str(tmp_path))
    assert data.options == {"out": str(tmp_path / "made"), "seed": 0, "model": "tiny", "text_characters": 0}
    assert sft.options["model"] == str(tmp_path / "made" / "tiny") and sft.options["data"][0] == str(
        tmp_path / "sft.jsonl"
    )


def test_options_of_a_stage_are_those_of_the_settings():
    options = {"sft": {"lr": 0.1, "model": "other", "seed": 9, "ds_config": {"steps_per_print": 3}}}
    sft = planned(options)[1]
    assert sft.options == {
        "out": "runs/x/sft",
        "model": "other",
        "data": ["runs/x/data/sft.jsonl"],
        "seed": 9,
        "lr": 0.1,
    }
    assert sft.ds_config["steps_per_print"] == 3


def test_policies_are_evaluated_as_they_were_trained():
    options = {"sft": {"chat": True, "max_tokens": 99}, "ppo": {"max_new_tokens": 5, "lr": 0.1, "bad_rows": "refuse"}}
    evaluated = options_of(planned(options))["evaluate"]
    assert (evaluated["chat"], evaluated["max_new_tokens"], evaluated["bad_rows"]) == (True, 5, "refuse")
    assert "lr" not in evaluated and "max_tokens" not in evaluated
    evaluated = options_of(planned(options | {"evaluate": {"max_new_tokens": 6}}))["evaluate"]
    assert evaluated["max_new_tokens"] == 6 and evaluated["chat"]


def test_the_settings_of_the_demo():
    """They make at least 500 held-out prompts, and every option in them is one."""
    demo = read_settings(str(ROOT / "examples" / "rlhf" / "demo.json"), [])
    stages = plan(arguments_of(nodes=2), demo, "cpu", 2)
    assert [stage.name for stage in stages] == ["data", "sft", "reward", "ppo", "evaluate"]
    assert demo["make_data"].get("test", 1000) >= 500 and set(demo["make_data"].get("kinds", TASKS)) <= set(TASKS)
    assert all(stage.ds_config["zeropp_fp8"]["topology"] == {"ranks_per_node": 1} for stage in stages[1:])


@pytest.mark.parametrize(
    "said, options, given",
    [
        ("--stages reward: give each once, and one of sft, dpo, ppo, grpo at least", {}, {"stages": ["reward"]}),
        ("--stages sft sft: give each once", {}, {"stages": ["sft", "sft"]}),
        ("--model a/ppo: policies are told apart by their last names", {}, {"model": "a/ppo", "stages": ["ppo"]}),
        ("--recipe zerop: neither a file nor one of fp8-lm, fp8-lm-o1, fp8-lm-o2,", {}, {"recipe": "zerop"}),
        ("--data nowhere has no sft.jsonl; name the files as make_data.py does, or give", {}, {"data": "nowhere"}),
        ("settings of sft: argument --steps: ten: give a whole number of at least 0", {"sft": {"steps": "ten"}}, {}),
        ("settings of data: argument --train: -1: give a whole number of", {"make_data": {"train": -1}}, {}),
        ("settings of data: argument --kinds: invalid choice: 'x'", {"make_data": {"kinds": ["x"]}}, {}),
        ("settings of sft: argument --schedule: invalid choice: 'up'", {"sft": {"schedule": "up"}}, {}),
        ("--rollout_batch 6 does not divide into minibatches of 4", {"ppo": {"rollout_batch": 6}}, {}),
        ("--reward_weights has 3 numbers for 1 --rew", {"ppo": {"reward_weights": [1.0, 2.0, 3.0]}}, {}),
        ("reward function 'f1'", {}, {"metric": "f1", "stages": ["sft"]}),
        (
            "settings of grpo: argument --group_size/--group-size: 1: give a whole number of at least 2",
            {"grpo": {"group_size": 1}},
            {"stages": ["sft", "grpo"]},
        ),
        (
            "settings of dpo: argument --beta: -1.0: give a finite number above 0",
            {"dpo": {"beta": -1.0}},
            {"stages": ["sft", "dpo"]},
        ),
        (
            "settings of ppo: argument --reward_weights/--reward-weights: nan: give a finite number",
            {"ppo": {"reward_weights": [float("nan")]}},
            {},
        ),
        (
            'the ds_config of sft: set "zero_optimization.stage" to 3',
            {"ds_config": {"zero_optimization": {"stage": 2}}},
            {"recipe": "stock"},
        ),
        ('"zero_optimization.stage" is 2; the plugin', {"ds_config": {"zero_optimization": {"stage": 2}}}, {}),
    ],
)
def test_what_could_not_be_run_is_refused_before_anything_is(said, options, given):
    with pytest.raises(ValueError) as raised:
        planned(options, **given)
    assert str(raised.value).startswith(said)


def test_own_files_of_a_stage_instead_of_the_data_folder(tmp_path):
    for name in ("preferences.jsonl", "tasks_train.jsonl", "tasks_test.jsonl"):
        (tmp_path / name).write_text("")
    options = options_of(planned({"sft": {"data": ["Dahoas/rm-static"]}}, data=str(tmp_path)))
    assert options["sft"]["data"] == ["Dahoas/rm-static"]
    (tmp_path / "tasks_test.jsonl").unlink()
    with pytest.raises(ValueError, match=r"has no tasks_test\.jsonl"):
        planned({"sft": {"data": ["Dahoas/rm-static"]}}, data=str(tmp_path))


# -- the folder -------------------------------------------------------------------------------------------------------


@pytest.fixture
def earlier(tmp_path):
    """A folder with what an earlier run of sft and reward left, a folder of somebody else's, and a summary."""
    for name in ("sft", "reward"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stage.json").write_text("{}")
    (tmp_path / "ppo").mkdir()
    for name in ("ppo/notes.txt", "summary.json", "summary.png"):
        (tmp_path / name).write_text("")
    return tmp_path


STAGES = [Stage(name, f"{name}.py", {}) for name in ("sft", "ppo", "evaluate")]


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_an_earlier_run_is_not_touched_unasked(earlier):
    before = files_in(earlier)
    said = r"sft: of an earlier run; --resume to go on with it, --replace to remove it, or give another --out"
    with pytest.raises(ValueError, match=said):
        check_folder(arguments_of(out=str(earlier)), STAGES)
    with pytest.raises(ValueError, match=r"--resume keeps .* and --replace removes them; give one of them"):
        check_folder(arguments_of(out=str(earlier), resume=True, replace=True), STAGES)
    assert files_in(earlier) == before


def test_resume_keeps_and_replace_removes(earlier):
    check_folder(arguments_of(out=str(earlier), resume=True), STAGES)
    kept = ["ppo/notes.txt", "reward/stage.json", "sft/stage.json", "summary.json", "summary.png"]
    assert files_in(earlier) == kept
    check_folder(arguments_of(out=str(earlier), replace=True), STAGES)
    # Only stages of this run, and only folders that a pipeline wrote.
    assert files_in(earlier) == ["ppo/notes.txt", "reward/stage.json"]


def test_a_new_folder(tmp_path):
    (tmp_path / "summary.json").write_text("of something else")
    check_folder(arguments_of(out=str(tmp_path)), STAGES)
    assert files_in(tmp_path) == ["summary.json"]
    check_folder(arguments_of(out=str(tmp_path / "a" / "b"), replace=True), STAGES)
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("given", [{"model": "sft"}, {"data": "sft"}, {"model": "sft/average"}])
def test_what_is_read_is_not_written_over(given, earlier):
    given = {name: str(earlier / path) for name, path in given.items()}
    with pytest.raises(ValueError, match=r"sft.* is read, and .*sft is written; give another --out"):
        check_folder(arguments_of(out=str(earlier), replace=True, **given), STAGES)
    assert "sft/stage.json" in files_in(earlier)


# -- running stages ---------------------------------------------------------------------------------------------------

STAND_IN = """
import sys
from pathlib import Path

folder = Path(sys.argv[sys.argv.index("--out") + 1])
with (folder.parent / "calls").open("a") as calls:
    calls.write(" ".join([folder.name, *sys.argv[1:]]) + "\\n")
if (folder.parent / "fails").exists():
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "latest").write_text("step1")
    sys.exit("a stage that fails")
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A script that writes down how it was called; it is what `launch` runs too."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(
        pipeline, "launch", lambda name, script, words, accelerator, ranks: pipeline.alone(name, script, words)
    )
    return str(script)


def calls_in(folder):
    """The first words of each call since the last time: the stage, and whether --resume was given."""
    calls = [line.split() for line in (folder / "calls").read_text().splitlines()]
    (folder / "calls").write_text("")
    return [words[0] + " --resume" * ("--resume" in words) for words in calls]


def test_a_stage_is_run_once(stand_in, tmp_path):
    config = {"train_micro_batch_size_per_gpu": 2, "x": [1, None, 0.5]}
    stage = Stage("sft", stand_in, {"out": str(tmp_path / "sft"), "lr": 1e-5, "data": ["a", "b"]}, config)
    record = run(stage, tmp_path, "cpu", 2, {})
    folder, ds_config = tmp_path / "sft", tmp_path / "sft" / "ds_config.json"
    assert json.loads(ds_config.read_text()) == config
    words = ["--out", str(folder), "--lr", "1e-05", "--data", "a", "b", "--deepspeed-config", str(ds_config)]
    assert (tmp_path / "calls").read_text() == " ".join(["sft", *words]) + "\n"
    assert record == json.loads((folder / "stage.json").read_text())
    assert record["command"] == [stand_in, *words] and record["seconds"] >= 0 and record["ended"].endswith("+00:00")
    assert calls_in(tmp_path) == ["sft"]

    assert run(stage, tmp_path, "cpu", 2, {}) == record and calls_in(tmp_path) == []
    changed = {
        r"--lr 1e-05, now it is 0.1": dataclasses.replace(stage, options=stage.options | {"lr": 0.1}),
        r"--epochs None, now it is 2": dataclasses.replace(stage, options=stage.options | {"epochs": 2}),
        r"--lr 1e-05, now it is None": dataclasses.replace(stage, options={"out": stage.options["out"]}),
        r"the ds_config {.*}, now it is {}": dataclasses.replace(stage, ds_config={}),
    }
    for said, other in changed.items():
        with pytest.raises(ValueError, match=rf"--resume: stage sft was run with {said}; give what it began with, or"):
            run(other, tmp_path, "cpu", 2, {})
    with pytest.raises(ValueError, match="the number of ranks 2, now it is 4"):
        run(stage, tmp_path, "cpu", 4, {})
    with pytest.raises(ValueError, match="the accelerator cpu, now it is cuda"):
        run(stage, tmp_path, "cuda", 2, {})
    assert calls_in(tmp_path) == [] and run(stage, tmp_path, "cpu", 2, {}) == record
    shutil.rmtree(folder)
    assert run(stage, tmp_path, "cpu", 4, {})["ended"] > record["ended"] and calls_in(tmp_path) == ["sft"]


def test_a_stage_without_the_launcher(stand_in, tmp_path):
    stage = Stage("data", stand_in, {"out": str(tmp_path / "data"), "model": "tiny"})
    record = run(stage, tmp_path, "cpu", 2, {})
    assert record["command"] == [stand_in, "--out", str(tmp_path / "data"), "--model", "tiny"]
    assert files_in(tmp_path / "data") == ["stage.json"]
    assert run(stage, tmp_path, "cuda", 4, {}) == record  # it has no ranks


def test_a_stage_that_was_stopped(stand_in, tmp_path):
    """With a checkpoint it is resumed, and its script compares settings; without one it begins again."""
    stage = Stage("ppo", stand_in, {"out": str(tmp_path / "ppo"), "lr": 0.1}, {})
    (tmp_path / "fails").touch()
    with pytest.raises(SystemExit, match=r"stand_in\.py failed with exit status 1; its error is above"):
        run(stage, tmp_path, "cpu", 2, {})
    assert json.loads((tmp_path / "ppo" / "stage.json").read_text())["ended"] is None
    assert calls_in(tmp_path) == ["ppo"]
    (tmp_path / "fails").unlink()
    record = run(stage, tmp_path, "cpu", 2, {})
    assert calls_in(tmp_path) == ["ppo --resume"] and "--resume" in record["command"]

    shutil.rmtree(tmp_path / "ppo" / "checkpoints")
    (tmp_path / "ppo" / "stage.json").write_text(json.dumps(record | {"ended": None}))
    other = dataclasses.replace(stage, options=stage.options | {"lr": 0.2})
    assert run(other, tmp_path, "cpu", 2, {})["settings"]["--lr"] == 0.2 and calls_in(tmp_path) == ["ppo"]


def test_a_record_that_could_not_be_written(stand_in, tmp_path, monkeypatch):
    """The disk is full when a stage has ended: the record of its beginning stays, and --resume reads it."""
    stage, write = Stage("ppo", stand_in, {"out": str(tmp_path / "ppo")}, {}), Path.write_text

    def half(path, text):
        full = '"ended": null' not in text and "stage" in path.name
        write(path, text[:20] if full else text)
        if full:
            raise OSError("no space left")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="no space left"):
        patched.setattr(Path, "write_text", half)
        run(stage, tmp_path, "cpu", 2, {})
    assert json.loads((tmp_path / "ppo" / "stage.json").read_text())["ended"] is None
    assert run(stage, tmp_path, "cpu", 2, {})["ended"] is not None and calls_in(tmp_path) == ["ppo", "ppo"]


def test_what_was_made_from_another_run_is_made_again(stand_in, tmp_path, capfd):
    """Also where it has a checkpoint, and where it was stopped."""
    stage = Stage("ppo", stand_in, {"out": str(tmp_path / "ppo")}, {}, after=["sft", "reward"])
    first = {"sft": "1", "reward": "1", "other": "1"}
    record = run(stage, tmp_path, "cpu", 2, first)
    assert record["after"] == {"sft": "1", "reward": "1"}
    assert run(stage, tmp_path, "cpu", 2, first | {"other": "2"}) == record and calls_in(tmp_path) == ["ppo"]
    for ended in (record["ended"], None):
        (tmp_path / "ppo" / "stage.json").write_text(json.dumps(record | {"ended": ended}))
        (tmp_path / "ppo" / "checkpoints").mkdir()
        (tmp_path / "ppo" / "checkpoints" / "latest").write_text("step1")
        again = run(stage, tmp_path, "cpu", 2, first | {"reward": "2"})
        assert calls_in(tmp_path) == ["ppo"] and files_in(tmp_path / "ppo") == ["ds_config.json", "stage.json"]
        assert again["after"] == {"sft": "1", "reward": "2"}
        assert "== ppo: again from the beginning, because reward was run again" in capfd.readouterr().out


# -- the whole, with stand-ins ----------------------------------------------------------------------------------------


@pytest.fixture
def pretended(tmp_path, monkeypatch, capfd):
    """pipeline.main(*argv) with stages that write made logs and answers; returns (stages that ran, what was said)."""
    ran = []

    def write(name, script, words, *rest):
        folder = Path(words[words.index("--out") + 1])
        ran.append(name + " --resume" * ("--resume" in words))
        if (tmp_path / "fails").exists() and (tmp_path / "fails").read_text() == name:
            raise SystemExit(f"{name} failed")
        names = words[words.index("--models") + 1 : words.index("--data")] if "--models" in words else []
        for policy in map(Path, names):
            rows = [{"prompt": str(i), "exact_match": float(i < 4 + 3 * (policy.name == "ppo"))} for i in range(10)]
            folder.joinpath(f"{policy.name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        folder.joinpath("log.jsonl").write_text('{"step": 1, "memory_gb": 0.5, "reward": 1.0}\n')

    monkeypatch.setattr(pipeline, "launch", write)
    monkeypatch.setattr(pipeline, "alone", write)
    monkeypatch.setattr(pipeline, "device", lambda multiple_of, ranks: ("cpu", ranks or 4))

    def main(*argv):
        monkeypatch.setattr(sys, "argv", ["pipeline.py", "--out", str(tmp_path / "out"), *argv])
        ran.clear()
        said = None
        try:
            pipeline.main()
        except SystemExit as error:
            said = capfd.readouterr().err.strip() if error.code == 2 else error.code
        return list(ran), said

    return main


EVERYTHING = ["data", "sft", "reward", "ppo", "evaluate"]


def test_a_run_its_summary_and_what_is_run_again(pretended, tmp_path, capfd):
    out = tmp_path / "out"
    assert pretended("--ranks", "2", "--nodes", "2", "--set", "sft.steps=3") == (EVERYTHING, None)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["sft"]["exact_match"], summary["sft"]["n_eval"]) == (0.4, 10)
    assert (summary["ppo"]["exact_match"], summary["ppo"]["n_eval"]) == (0.7, 10)
    assert summary["difference"]["exact_match"] == pytest.approx(0.3) and summary["difference"]["interval"][0] > -0.1
    assert (summary["ranks"], summary["nodes"], list(summary["seconds"])) == (2, 2, EVERYTHING)
    assert summary["commands"]["sft"].startswith("sft.py --out") and "--steps 3" in summary["commands"]["sft"]
    assert summary["commands"]["sft"].endswith(f"--deepspeed-config {out / 'sft' / 'ds_config.json'}")
    assert summary["ds_configs"]["ppo"]["zeropp_fp8"]["topology"] == {"ranks_per_node": 1}
    assert set(summary["logs"]) == {"sft", "reward", "ppo"} and summary["versions"]["torch"] == version("torch")
    assert (out / "summary.png").stat().st_size > 10_000
    said = capfd.readouterr().out
    assert "pipeline: sft, reward, ppo; recipe zeropp; 2 ranks as 2 node(s) on this machine's CPU" in said
    assert "ppo - sft: +30.0 points" in said

    again = ["--ranks", "2", "--nodes", "2", "--set", "sft.steps=3", "--resume"]
    assert pretended(*again) == ([], None)
    second = json.loads((out / "summary.json").read_text())
    assert all(second[key] == summary[key] for key in summary if key not in ("this_call_seconds", "command"))
    shutil.rmtree(out / "reward")
    assert pretended(*again) == (["reward", "ppo", "evaluate"], None)
    shutil.rmtree(out / "data")
    assert pretended(*again) == (EVERYTHING, None)
    ran, said = pretended("--ranks", "2", "--nodes", "2", "--set", "sft.steps=4", "--resume")
    assert ran == [] and said.startswith("pipeline: --resume: stage sft was run with --steps 3, now it is 4; give what")
    assert pretended("--replace", "--stages", "sft")[0] == ["data", "sft", "evaluate"]
    assert "difference" not in json.loads((out / "summary.json").read_text())


def test_a_stage_that_fails_ends_the_run(pretended, tmp_path):
    """Then --resume goes on with it, from its checkpoint if it left one."""
    out, fails = tmp_path / "out", tmp_path / "fails"
    fails.write_text("reward")
    assert pretended() == (["data", "sft", "reward"], "reward failed")
    assert not (out / "summary.json").exists() and not (out / "ppo").exists()
    ran, said = pretended()
    assert ran == [] and said.startswith(
        f"pipeline: {out / 'data'}, {out / 'sft'}, {out / 'reward'}: of an earlier run"
    )
    (out / "reward" / "checkpoints").mkdir()
    (out / "reward" / "checkpoints" / "latest").write_text("step1")
    fails.unlink()
    assert pretended("--resume") == (["reward --resume", "ppo", "evaluate"], None)


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--nodes", "3"], "pipeline: 4 ranks do not make 3 nodes of as many each; give --ranks"),
        (["--nodes", "0"], "pipeline: argument --nodes: 0: give a whole number of at least 1"),
        (["--ranks", "-1"], "pipeline: argument --ranks: -1: give a whole number of at least 0"),
        (["--seed", "-1"], "pipeline: argument --seed: -1: give a whole number from 0 to 4294967295"),
        (["--settings", "nowhere.json"], "pipeline: [Errno 2] No such file or directory: 'nowhere.json'"),
        (["--metric", "no_such_module:f", "--stages", "sft"], "pipeline: No module named 'no_such_module'"),
        (["--set", "sft.steps"], "pipeline: --set sft.steps: write STAGE.OPTION=VALUE"),
    ],
)
def test_errors_are_one_line(argv, said, pretended):
    assert pretended(*argv) == ([], said)


# -- where it runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gpus, multiple_of, ranks, chosen",
    [
        (0, 1, 0, ("cpu", 4)),
        (0, 2, 2, ("cpu", 2)),
        (1, 1, 0, ("cuda", 1)),
        (1, 2, 0, ("cpu", 4)),
        (1, 2, 2, ("cpu", 2)),
        (1, 1, 1, ("cuda", 1)),
        (2, 2, 2, ("cuda", 2)),
        (3, 2, 0, ("cuda", 2)),
        (8, 2, 0, ("cuda", 4)),
        (8, 2, 8, ("cuda", 8)),
        (8, 2, 2, ("cuda", 2)),
    ],
)
def test_gpus_where_there_are_enough(gpus, multiple_of, ranks, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert device(multiple_of, ranks) == chosen
