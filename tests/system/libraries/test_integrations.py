"""examples/integrations with the libraries themselves: the commands of docs/integrations.md, on CPU ranks, shorter."""

import math
import re
import runpy
import shlex
import sys
from pathlib import Path
from unittest import mock

import integration_jobs as jobs
import pytest
from ranks import run_two
from safetensors.torch import load_file

from tests.places import ROOT

FOLDER = "examples/integrations"
ON_CPU = ["--use_cpu", "--bf16", "False", "--max_steps", "4", "--report_to", "none", "--logging_steps", "1"]
ON_CPU += ["--disable_tqdm", "True", "--learning_rate", "1e-3", "--per_device_train_batch_size", "4"]
LEARN = [*ON_CPU, "--max_steps", "20", "--learning_rate", "3e-3", "--per_device_train_batch_size", "16"]
HALF = [*ON_CPU, "--eval_steps", "2", "--save_steps", "2", "--per_device_train_batch_size", "2"]
# By the name of the folder where a command leaves its model.
SHORTER = {
    "trainer": HALF,
    "resumed": [*HALF, "--resume_from_checkpoint", "runs/trainer/checkpoint-2"],
    "enabled": [*ON_CPU, "--torch_compile_backend", "aot_eager"],
    "encoder": LEARN,
    "vision": LEARN,
    "seq2seq": LEARN,
    "accelerate": ["--cpu"],
    "student": [],
    "sft": ON_CPU,
    "lora": ON_CPU,
    "reward": ON_CPU,
    "dpo": ON_CPU,
    "grpo": [*ON_CPU, "--num_generations", "4", "--max_completion_length", "8", "--ref_model_sync_steps", "1"],
}
# Commands that are tried once more, switched on in another way than by their ds_config alone.
OTHER_WAYS = dict.fromkeys(("encoder", "accelerate", "sft", "lora", "grpo"), "run")
OTHER_WAYS |= dict.fromkeys(("vision", "seq2seq", "student", "reward", "dpo"), "enable")
LEARN_FROM_NOTHING = {
    "encoder": "AutoModelForSequenceClassification",
    "vision": "AutoModelForImageClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
}


def commands():
    """{name: (environment, what an interpreter is given)} of the page; and the command that makes the data."""
    page = (ROOT / "docs/integrations.md").read_text()
    blocks = [body for language, body in re.findall(r"^```(\w*)\n(.*?)^```", page, flags=re.S | re.M) if not language]
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    data, *others = (shlex.split(line) for line in lines)
    found = {}
    for words in others:
        environment = {}
        while "=" in words[0]:
            name, _, environment[name] = words.pop(0).partition("=")
        start = words.index("-m") if "-m" in words else next(n for n, word in enumerate(words) if word.endswith(".py"))
        if words[0] == "accelerate":
            environment |= environment_of(words)
        name = Path(words[words.index("--output_dir") + 1]).name
        assert name not in found
        found[name] = environment, words[start:]
    return found, data


def environment_of(words):
    """Return what `accelerate launch` tells its processes of the YAML."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    words = [str(ROOT / word) if word.startswith(FOLDER) else word for word in words]
    with mock.patch.object(launch, "deepspeed_launcher") as launcher:
        launch.launch_command(launch.launch_command_parser().parse_args(words[2:]))
    _, environment = prepare_deepspeed_cmd_env(*launcher.call_args.args)
    told = {name: value for name, value in environment.items() if name.startswith("ACCELERATE_")}
    config = told["ACCELERATE_DEEPSPEED_CONFIG_FILE"]
    return {**told, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(ROOT / config)}


def test_the_page_has_a_command_of_every_script():
    found, _ = commands()
    assert list(found) == list(SHORTER)
    scripts = {next(Path(word).stem for word in words if word.endswith(".py")) for _, words in found.values()}
    assert scripts == {path.stem for path in (ROOT / FOLDER).glob("*.py")}
    for script in scripts:
        text = (ROOT / FOLDER / f"{script}.py").read_text()
        assert text.count("\n") < 80
        assert ("zeropp" in text) == (script == "enable"), "a script knows nothing of the plugin"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """{name: (what it ended with, what rank 0 printed)}, folder."""
    pytest.importorskip("trl", reason="TRL is not installed (extra `rlhf`)")
    folder = tmp_path_factory.mktemp("integrations")
    found, data = commands()
    make_data(data[1:], folder)
    given = {
        name: (environment, [in_folder(word, folder) for word in words + SHORTER[name]])
        for name, (environment, words) in found.items()
    }
    for name, way in OTHER_WAYS.items():
        environment, words = given[name]
        words = [word.replace(str(folder / "runs" / name), str(folder / "again" / name)) for word in words]
        given[name, way] = environment | {"ZEROPP_FP8_AUTOLOAD": "0"}, [*jobs.WAYS[way], *words]
    return run_two(jobs.run_scripts, commands=given, env={"HF_HOME": str(folder)})[0], folder


def in_folder(word, folder):
    return str(folder / word) if word.startswith("runs/") else str(ROOT / word) if word.startswith(FOLDER) else word


def make_data(words, folder):
    argv = [in_folder(word, folder) for word in words] + ["--train", "200", "--test", "8", "--text-characters", "60000"]
    with mock.patch.object(sys, "argv", argv):
        runpy.run_path(str(ROOT / argv[0]), run_name="__main__")


@pytest.mark.parametrize("name", OTHER_WAYS)
def test_switched_on_in_another_way(ended, name):
    """By `-m zeropp_fp8.run`, or one line before the script, it trains the same."""
    runs, _ = ended
    said, printed = runs[name, OTHER_WAYS[name]]
    assert not said, f"{said[-3000:]}\n{printed[-3000:]}"
    once = runs[name][1]
    assert printed.count("zeropp_fp8: recipe zeropp") == once.count("zeropp_fp8: recipe zeropp") > 0
    assert jobs.losses(printed) == jobs.losses(once)


@pytest.mark.parametrize("name", SHORTER)
def test_command(ended, name):
    """It runs as it is, with the plugin, and leaves a trained model that loads."""
    import transformers

    runs, folder = ended
    said, printed = runs[name]
    assert not said, f"{said[-3000:]}\n{printed[-3000:]}"
    engines = 2 if name in ("dpo", "grpo") else 1
    assert printed.count("zeropp_fp8: recipe zeropp; 2 node(s) x 1 rank(s)") == engines
    assert printed.count("zeropp_fp8: recipe zeropp-4bit; 2 node(s) x 1 rank(s)") == (name == "student")
    seen, steps = jobs.losses(printed), int(dict(zip(SHORTER[name], SHORTER[name][1:])).get("--max_steps", 0))
    if name in ("accelerate", "student"):  # all of the text, in batches of 4 on 2 ranks
        steps = -(-len((folder / "runs/data/text.jsonl").read_text().splitlines()) // 8)
    if name == "resumed":
        steps = 2
        assert seen == jobs.losses(runs["trainer"][1])[2:]
    assert len(seen) == steps and all(map(math.isfinite, seen)) and len(set(seen)) > 1
    if name == "dpo":
        assert seen[0] == pytest.approx(math.log(2), abs=1e-4), "a margin of 0"
    if name == "grpo":
        assert "zeropp_fp8: generation: all weights stay on each rank" in printed
    out = folder / "runs" / name
    if name in LEARN_FROM_NOTHING:
        assert jobs.share_right(printed) > 0.9 and seen[-1] < seen[0]
        getattr(transformers, LEARN_FROM_NOTHING[name]).from_pretrained(out)
    elif name == "lora":
        trained = load_file(out / "adapter_model.safetensors")
        assert all(bool(value.any()) for key, value in trained.items() if "lora_B" in key) and len(trained) == 8
    else:
        start, trained = (transformers.AutoModel.from_pretrained(path) for path in (folder / "runs/data/tiny", out))
        changes = [(a - b).abs().max().item() for a, b in zip(start.parameters(), trained.parameters())]
        assert 0 < max(changes) < 0.1
