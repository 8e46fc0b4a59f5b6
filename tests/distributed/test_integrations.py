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

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "examples/integrations"
ON_CPU = ["--use_cpu", "--bf16", "False", "--max_steps", "4", "--report_to", "none", "--logging_steps", "1"]
ON_CPU += ["--disable_tqdm", "True", "--learning_rate", "1e-3", "--per_device_train_batch_size", "4"]
SHORTER = {
    "trainer": ON_CPU,
    "accelerate_loop": [],
    "trl_sft": ON_CPU,
    "trl_dpo": ON_CPU,
    "trl_grpo": [*ON_CPU, "--num_generations", "4", "--max_completion_length", "8", "--beta", "0.1"],
}


def commands():
    """{script: (environment, words from the script on)} of the page; and the command that makes the data."""
    page = (ROOT / "docs/integrations.md").read_text()
    blocks = [body for language, body in re.findall(r"^```(\w*)\n(.*?)^```", page, flags=re.S | re.M) if not language]
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    data, *others = (shlex.split(line) for line in lines)
    found = {}
    for words in others:
        start = next(n for n, word in enumerate(words) if word.endswith(".py"))
        assert Path(words[start]).parent == Path(FOLDER)
        accelerated = environment_of(words) if words[0] == "accelerate" else {}
        found[Path(words[start]).stem] = accelerated, words[start:]
    return found, data


def environment_of(words):
    """What `accelerate launch` tells its processes of the YAML."""
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
    scripts = {path.stem for path in (ROOT / FOLDER).glob("*.py")}
    assert set(found) == scripts == set(SHORTER)
    for script in scripts:
        text = (ROOT / FOLDER / f"{script}.py").read_text()
        assert "zeropp" not in text and "deepspeed" not in text


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """{script: (what it ended with, what rank 0 printed, folder)}."""
    pytest.importorskip("trl", reason="TRL is not installed (extra `rlhf`)")
    folder = tmp_path_factory.mktemp("integrations")
    found, data = commands()
    make_data(data[1:], folder)
    given = {
        script: (environment, [in_folder(word, folder) for word in words] + SHORTER[script])
        for script, (environment, words) in found.items()
    }
    return run_two(jobs.run_scripts, commands=given, env={"HF_HOME": str(folder)})[0], folder


def in_folder(word, folder):
    return str(folder / word) if word.startswith("runs/") else str(ROOT / word) if word.startswith(FOLDER) else word


def make_data(words, folder):
    argv = [in_folder(word, folder) for word in words] + ["--train", "200", "--test", "8", "--text-characters", "60000"]
    with mock.patch.object(sys, "argv", argv):
        runpy.run_path(str(ROOT / argv[0]), run_name="__main__")


@pytest.mark.parametrize("script", SHORTER)
def test_script(ended, script):
    """It runs as it is, with the plugin, and leaves a trained model that loads."""
    from transformers import AutoModelForCausalLM

    (said, printed), folder = ended[0][script], ended[1]
    assert not said, f"{said[-3000:]}\n{printed[-3000:]}"
    engines = 2 if script in ("trl_dpo", "trl_grpo") else 1
    assert printed.count("zeropp_fp8: recipe zeropp; 2 node(s) x 1 rank(s)") == engines
    seen, steps = jobs.losses(printed), 4
    if script == "accelerate_loop":  # all of the text, in batches of 4 on 2 ranks
        steps = -(-len((folder / "runs/data/text.jsonl").read_text().splitlines()) // 8)
    assert len(seen) == steps and all(map(math.isfinite, seen)) and len(set(seen)) > 1
    if script == "trl_dpo":
        assert seen[0] == pytest.approx(math.log(2), abs=1e-4), "a margin of 0"
    if script == "trl_grpo":
        assert "zeropp_fp8: generation: all weights stay on each rank" in printed
    out = folder / "runs" / {"accelerate_loop": "accelerate"}.get(script, script.removeprefix("trl_"))
    start, trained = (AutoModelForCausalLM.from_pretrained(path) for path in (folder / "runs/data/tiny", out))
    changes = [(a - b).abs().max().item() for a, b in zip(start.parameters(), trained.parameters())]
    assert 0 < max(changes) < 0.1
