"""The RLHF examples' scripts as a whole, on gloo ranks: stopped and resumed, each recipe, stock DeepSpeed, refusals."""

import json
import math
import shutil
from pathlib import Path

import pytest
import rlhf_jobs as jobs
import torch
from ranks import run_ranks
from rlhf_starts import folder_of, make_starts, write
from safetensors.torch import load_file
from thinning import thinned


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    make_starts(root)
    return root


ON = {
    "qlora": {"model": "adapter", "reward_model": "scorer_adapter"},
    "zeropp": {"model": "base", "reward_model": "scorer"},
    "fp8-lm": {"model": "base", "reward_model": "scorer"},
}
PPO = [
    *("--rollout_batch", "8", "--iterations", "2", "--ppo_epochs", "2", "--max_new_tokens", "6"),
    *("--max_prompt_tokens", "9"),
    *("--lr", "1e-3", "--schedule", "cosine", "--warmup", "2", "--reward_functions", "exact_match", "format"),
    *("--reward_weights", "1", "0.1", "--missing_eos_penalty", "0.5", "--kl_target", "0.5", "--kl_horizon", "50"),
    *("--entropy_coefficient", "0.01", "--whiten_rewards", "--ema_decay", "0.5", "--pretraining_coefficient", "0.1"),
    *("--pretraining_tokens", "12", "--eval_batch", "4", "--sample_every", "1", "--save_every", "1"),
]  # fmt: skip


def run_script(name, config, folder, *argvs, world=2):
    """Return what jobs.script returns, a rank each."""
    return run_ranks(jobs.script, world=world, name=name, config=config, folder=str(folder), argvs=argvs)


def ppo_argv(made, model, reward_model, *more):
    rows = ["--data", "prompts.jsonl", "--eval_data", "prompts.jsonl", "--pretraining_data", "text.jsonl"]
    rows = [str(made / word) if word.endswith("jsonl") else word for word in rows]
    return [*rows, "--model", str(made / model), "--reward_model", str(made / reward_model), *PPO, *more]


def files_of(folder):
    """Contents of what a run leaves for others, checkpoints and times aside."""
    weights = {path.relative_to(folder): load_file(path) for path in folder.glob("**/*.safetensors")}
    texts = {path.name: path.read_text() for path in (*folder.glob("eval_*.jsonl"), folder / "samples.jsonl")}
    return {name: w for name, w in weights.items() if "checkpoints" not in name.parts}, texts


@pytest.mark.parametrize("recipe", ON)
def test_a_run_that_is_stopped_and_resumed(recipe, made, tmp_path):
    """Two iterations, and the second of them again from the first one's checkpoint: the same numbers, bit for bit."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    # In bf16: the master weights of fp8-lm, in fp16 with a scale, round an fp32 model before its first step.
    overrides = {"bf16": {"enabled": True}} if recipe == "fp8-lm" else None
    argv, config = ppo_argv(made, **ON[recipe]), jobs.config_of(recipe, overrides)
    of_ranks = run_script("ppo", config, whole, argv)
    _, log, said = of_ranks[0]
    assert [raised for raised, _, _ in of_ranks] == [[None], [None]]
    assert sorted(log) == [0, 1, 2] and "eval_exact_match" in log[0] and "eval_format" in log[2]
    wanted = {
        "reward",
        "reward_std",
        "reward_reward_model",
        "kl",
        "entropy",
        "clip_fraction",
        "policy_loss",
        "value_loss",
    }
    wanted |= {"response_tokens", "ended", "pretraining_loss", "kl_coefficient", "lr"}
    assert wanted <= set(log[1]) and all(math.isfinite(log[step][name]) for step in (1, 2) for name in wanted)
    assert log[1]["kl"] == 0 != log[2]["kl"]
    assert 0 < log[1]["ended"] < 1 and log[1]["kl_coefficient"] != log[2]["kl_coefficient"]
    assert said.count("zeropp_fp8: generation") == 1 and "nvalidat" not in said

    shutil.copytree(whole, stopped)
    shutil.rmtree(stopped / "checkpoints" / "step2")
    (stopped / "checkpoints" / "latest").write_text("step1")
    for path in (*stopped.glob("**/*.safetensors"), stopped / "eval_step2.jsonl"):
        path.unlink()
    assert run_script("ppo", config, stopped, [*argv, "--resume"])[0][:2] == ([None], log)
    (weights, texts), (weights_again, texts_again) = files_of(whole), files_of(stopped)
    assert texts == texts_again and weights.keys() == weights_again.keys() and len(weights) == 2
    for name, tensors in weights.items():
        assert all(torch.equal(tensor, weights_again[name][key]) for key, tensor in tensors.items()), name


def test_ppo_learns(made, tmp_path):
    """A model that writes bytes at random learns to write small letters: 26 of 264 tokens."""
    function = tmp_path / "letters.py"
    function.write_text(
        "def small(completions):\n"
        "    return [sum(c.islower() for c in text) / max(1, len(text)) for text in completions]\n"
    )
    argv = [
        *("--model", str(made / "base"), "--data", str(made / "prompts.jsonl"), "--max_prompt_tokens", "9"),
        *("--reward_functions", f"{function}:small", "--rollout_batch", "16", "--iterations", "12"),
        *("--ppo_epochs", "2", "--max_new_tokens", "6", "--lr", "5e-3", "--kl_coefficient", "0.01"),
    ]  # fmt: skip
    config = jobs.config_of("zeropp", {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1})
    (raised,), log, _ = run_script("ppo", config, tmp_path, argv)[0]
    rewards = [log[step]["reward"] for step in sorted(log)]
    assert raised is None and sum(rewards[:2]) / 2 < 0.25 and sum(rewards[-2:]) / 2 > 0.5
    assert log[12]["kl"] > 1 and log[12]["entropy"] < log[1]["entropy"] - 0.5


def test_stock_deepspeed_and_refusals(made, tmp_path):
    """Without the plugin's section. What cannot be run is refused before models are loaded."""
    argv, config = ppo_argv(made, "adapter", "scorer_adapter", "--lora_rank", "4"), jobs.config_of(None)
    new = ["--out", str(tmp_path / "new")]
    for (*raised, at_last), log, _ in run_script("ppo", config, tmp_path, [*argv, "--resume"], argv):
        assert len(raised) == 1 and "FileNotFoundError: --resume: no checkpoint in" in raised[0]
        assert at_last is None and log[1]["kl"] == 0 != log[2]["kl"]
    refused = {
        "holds checkpoints of an earlier run: --resume to go on with it, or give another folder": [],
        "ValueError: --resume: --clip was 0.2, is 0.1 now; give what the run began with": ["--resume", "--clip", "0.1"],
        "--max_prompt_tokens and --max_new_tokens make 209 tokens, but the model has 128": ["--max_new_tokens", "200"],
        "no 'answer', which the reward function needs": [*new, "--data", str(made / "sft.jsonl")],
        "--pretraining_tokens make 500 tokens, but the model has 128 positions": [
            *(*new, "--pretraining_tokens", "500", "--pretraining_coefficient", "1"),
            *("--pretraining_data", str(made / "text.jsonl")),
        ],
        "have more than 2 tokens": [*new, "--max_prompt_tokens", "2"],
        "is a LlamaForCausalLM, which has no score; train it with reward.py": [
            *new,
            "--reward_model",
            argv[argv.index("--model") + 1].replace("adapter", "base"),
        ],
    }
    for raised, _, _ in run_script("ppo", config, tmp_path, *([*argv, *more] for more in refused.values())):
        for said, wanted in zip(raised, refused):
            assert wanted in said


@pytest.mark.parametrize("name", ["sft", "reward"])
def test_held_out_losses_do_not_depend_on_the_batch(name, made, tmp_path):
    """Five rows of several lengths in batches of 1 and of 4, which the second rank has less of."""
    rows = [{"prompt": f"{i}=", "completion": "z" * 3**i} for i in range(4)] + [{"prompt": "4=", "completion": "yx"}]
    if name == "reward":
        rows = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "no"} for row in rows]
    write(tmp_path / "rows.jsonl", rows)
    data, found = str(tmp_path / "rows.jsonl"), []
    argv = ["--model", str(made / "base"), "--data", data, "--eval_data", data, "--steps", "1", "--lr", "0"]
    for size in (1, 4):
        config = jobs.config_of(None, {"train_micro_batch_size_per_gpu": size})
        (raised, log, _), _ = run_script(name, config, folder_of(tmp_path, str(size)), [*argv, "--max_tokens", "64"])
        assert raised == [None]
        found.append({key: value for key, value in log[1].items() if key.startswith("eval_")})
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize("name, recipe", thinned(["sft", "reward"], ["qlora", "zeropp"]))
def test_supervised_stages(name, recipe, made, tmp_path):
    """Four steps; the last two again from a checkpoint; the next stage loads what they leave."""
    rows = str(made / ("sft.jsonl" if name == "sft" else "pairs.jsonl"))
    argv = [
        *("--model", str(made / "base"), "--data", rows, "--eval_data", rows, "--steps", "4", "--lr", "3e-3"),
        *("--max_tokens", "16", "--save_every", "2", "--eval_every", "2", "--lora_dropout", "0.2"),
    ]  # fmt: skip
    argv += ["--sample_every", "2", "--sample_tokens", "5"] if name == "sft" else []
    config, whole, stopped = jobs.config_of(recipe), tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()

    raised, log, _ = run_script(name, config, whole, argv)[0]
    assert raised == [None] and sorted(log) == [1, 2, 3, 4]
    loss = f"eval_{name}_loss"
    assert log[4][loss] < log[2][loss] < (6.5 if name == "sft" else 2)
    shutil.copytree(whole, stopped)
    shutil.rmtree(stopped / "checkpoints" / "step4")
    (stopped / "checkpoints" / "latest").write_text("step2")
    (model,) = (path.name for path in stopped.glob("*.safetensors"))
    (stopped / model).unlink()
    assert run_script(name, config, stopped, [*argv, "--resume"])[0][:2] == ([None], log)
    samples = [json.loads(line) for line in (whole / "samples.jsonl").read_text().splitlines()]
    assert (whole / "samples.jsonl").read_text() == (stopped / "samples.jsonl").read_text()
    prompts = [json.loads(line)["prompt"] for line in Path(rows).read_text().splitlines()[:4]]
    asked = [(step, prompt) for step in (2, 4) for prompt in prompts] if name == "sft" else []
    assert [(row["step"], row["prompt"]) for row in samples] == asked
    assert all("reward" not in row and len(row["completion"]) <= 5 for row in samples)
    first, second = load_file(whole / model), load_file(stopped / model)
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    from common.models import find_start

    assert find_start(str(whole)).adapter == (str(whole) if recipe == "qlora" else None)
    if name == "reward":
        assert any("score" in key for key in first)
