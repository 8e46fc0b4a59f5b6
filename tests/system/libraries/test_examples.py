"""The example script under real launchers, and the data order it promises. Each launch costs about ten seconds."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import example_jobs
import numpy as np
import pytest
import torch
from hang_guard import HANG
from ranks import run_two

from tests.places import ROOT, TESTS

PRETRAIN = ROOT / "examples" / "pretrain"
SCRIPTS = Path(sysconfig.get_paths()["scripts"])
RECIPES = ("stock", "lossless", "zeropp", "zeropp-4bit", "mxfp8")

# Loaded from its file: on sys.path, the models.py beside it would hide tests/models.py.
_spec = importlib.util.spec_from_file_location("pretrain_data", PRETRAIN / "data.py")
pretrain_data = sys.modules["pretrain_data"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pretrain_data)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run(command):
    """Run a launcher to its end and return (exit status, output); nothing it started outlives it."""
    env = {
        **os.environ,
        "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=HANG)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"not done in {HANG} s: {command}\n{process.communicate()[0][-6000:]}") from None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def launched(command):
    status, output = run(command)
    assert status == 0, f"exit status {status}: {command}\n{output[-6000:]}"
    return output


def deepspeed_command(*arguments):
    launcher = [sys.executable, str(SCRIPTS / "deepspeed"), "--quiet", "--num_accelerators", "2"]
    return [*launcher, "--master_port", free_port(), *map(str, arguments)]


def entries(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def losses(log):
    return {entry["step"]: entry["loss"] for entry in entries(log) if "loss" in entry}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of 25 small text files."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(25):
        body = "".join(f"def function_{i}_{j}(x, y={j}):\n    return x * {j} + y\n\n" for j in range(40))
        (folder / f"part{i:02}.py").write_text(body)
    return folder


@pytest.fixture(scope="module")
def hugging_face_model(tmp_path_factory, text):
    """A folder as save_pretrained() writes it: a tiny Llama and a tokenizer."""
    from models import llama
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train([str(path) for path in sorted(text.iterdir())], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    model = llama(layers=2, hidden=32, vocab=320, heads=2)
    with torch.no_grad():
        model.lm_head.weight *= 40  # a loss that no freshly made model has
    model.save_pretrained(folder)
    return folder


def loss_of_first_step(model_folder, text):
    """The loss of transformers itself on the sequences of step 0: 2 ranks x micro-batch 4."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    encode = pretrain_data.tokenizer_tokens(AutoTokenizer.from_pretrained(model_folder))
    training, _ = pretrain_data.split_tokens(pretrain_data.read_documents([str(text)]), encode)
    batch = pretrain_data.Sequences(training, length=64, seed=0).training_batch(0, 8)
    with torch.no_grad():
        return float(AutoModelForCausalLM.from_pretrained(model_folder)(input_ids=batch, labels=batch).loss)


@pytest.fixture(scope="module")
def train_command(text):
    def command(folder, name, recipe, steps, *more, model="llama-tiny"):
        given = ["--model", model, "--data", text, "--steps", steps, "--sequence-length", 64, "--eval-batches", 1]
        written = ["--loss-log", folder / f"{name}.jsonl", "--summary", folder / f"{name}.json"]
        config = ["--deepspeed_config", ROOT / "ds_configs" / f"{recipe}.json"]
        return [str(part) for part in (PRETRAIN / "train.py", *config, *given, *written, *more)]

    return command


def several_runs(folder, commands):
    """The command that runs commands (of one script) one after the other; their output is in folder / NAME.RANK."""
    ((script, *_), *_) = commands.values()
    runs = [
        {"arguments": arguments, "port": free_port(), "log": str(folder / name)}
        for name, (_, *arguments) in commands.items()
    ]
    imports = ["transformers.models.llama.modeling_llama", "zeropp_fp8.plugin", "zeropp_fp8.zero.stage3"]
    (folder / "runs.json").write_text(json.dumps({"imports": imports, "runs": runs}))
    return [str(part) for part in (Path(__file__).with_name("several_runs.py"), script, folder / "runs.json")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, train_command, hugging_face_model):
    """The folder of a run under `torchrun`; and, all under one `deepspeed`, its last steps again and each ds_config.

    A launcher and the imports of its ranks take ten seconds.
    """
    folder = tmp_path_factory.mktemp("runs")
    checkpoint = folder / "checkpoint"
    settings = ("zeropp", 5, "--save", checkpoint, "--save-every", 3)
    whole = train_command(folder, "whole", *settings, "--eval-every", 4, model=hugging_face_model)
    launched([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *whole])
    # As after an interruption: the checkpoint of step 3 is the latest, and the log goes on into a line of step 6.
    assert (checkpoint / "latest").read_text() == "step5"
    (checkpoint / "latest").write_text("step3")
    shutil.rmtree(checkpoint / "step5")
    written = (folder / "whole.jsonl").read_text().splitlines(keepends=True)
    (folder / "interrupted.jsonl").write_text("".join(written) + '{"step": 6, "lo')
    resumed = train_command(folder, "interrupted", "zeropp", 5, "--resume", checkpoint, model=hugging_face_model)
    # Not the tiny model: none of its linear layers has the 64 features from which on layers compute in MX.
    commands = {recipe: train_command(folder, recipe, recipe, 3, model="llama-small") for recipe in RECIPES}
    launched(deepspeed_command(*several_runs(folder, {**commands, "interrupted": resumed})))
    return folder


@pytest.fixture(scope="module")
def results(runs):
    """{recipe: figures} of a short run with each ds_config."""
    return {
        recipe: json.loads((runs / f"{recipe}.json").read_text())
        | {"output": (runs / f"{recipe}.0").read_text(), "losses": losses(runs / f"{recipe}.jsonl")}
        for recipe in RECIPES
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_ds_config_trains_under_the_deepspeed_launcher(recipe, results):
    figures, stock = results[recipe], results["stock"]
    assert list(figures["losses"]) == [1, 2, 3] and figures["world_size"] == 2
    assert figures["loss_start"] == pytest.approx(np.log(256), rel=0.02)  # random weights, 256 bytes
    assert figures["held_out_loss"] == pytest.approx(stock["held_out_loss"], rel=0.02)
    report = figures["wire_report"]
    if recipe == "stock":
        assert report is None and "zeropp_fp8: stock DeepSpeed" in figures["output"]
    else:
        assert f"zeropp_fp8: recipe {recipe}; 1 node(s) x 2 rank(s)" in figures["output"]
        assert report["steps"] == 3 and report["per_step"]["gradients"]["intra"] > 0
        assert report["per_step"]["gradients"]["inter"] == 0  # one node


def test_lossless_has_the_losses_of_stock(results):
    assert results["lossless"]["losses"] == pytest.approx(results["stock"]["losses"], rel=1e-5)


def test_resumed_run_equals_an_uninterrupted_one(runs, hugging_face_model, text):
    """5 steps under `torchrun`, and the last 2 of them again under `deepspeed`, on a model folder of Hugging Face."""
    interrupted, whole = entries(runs / "interrupted.jsonl"), entries(runs / "whole.jsonl")
    assert [entry["step"] for entry in whole if "loss" in entry] == [1, 2, 3, 4, 5]
    for key in ("step", "loss", "lr"):
        assert [entry[key] for entry in interrupted if "loss" in entry] == [
            entry[key] for entry in whole if "loss" in entry
        ]
    assert [entry["step"] for entry in whole if "held_out_loss" in entry] == [4, 5]
    assert interrupted[-1] == whole[-1] and "held_out_loss" in whole[-1]
    expected = loss_of_first_step(hugging_face_model, text)
    assert expected > 1.1 * np.log(320) and whole[0]["loss"] == pytest.approx(expected, rel=0.02)


def test_one_process_saves_and_refuses_to_resume_another_run(tmp_path, train_command):
    """Without a launcher; every --save-every steps a checkpoint; a resumed run must have the same settings."""
    checkpoint = tmp_path / "checkpoint"
    command = train_command(tmp_path, "alone", "zeropp", 2, "--save", checkpoint, "--save-every", 1)
    other_seed = [*command, "--resume", str(checkpoint), "--seed", "3"]
    status, output = run([sys.executable, *several_runs(tmp_path, {"first": command, "resumed": other_seed})])
    assert status != 0 and "run 1 failed" in output
    refused = (tmp_path / "resumed.0").read_text().splitlines()
    assert f"train: --resume {checkpoint}: --seed was 0, is 3 now" in refused
    assert not any("one rank: nothing is sent" in line for line in refused)  # no engine was made
    assert "one rank: nothing is sent" in (tmp_path / "first.0").read_text()
    assert sorted(p.name for p in checkpoint.iterdir() if p.is_dir()) == ["step1", "step2"]
    assert json.loads((tmp_path / "alone.json").read_text())["world_size"] == 1


IN_TREE_DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {
        "stage": 3,
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": 2,
        "zero_quantized_gradients": True,
    },
}


def test_a_script_with_an_in_tree_ds_config_until_a_rank_fails(tmp_path):
    """`deepspeed --module zeropp_fp8.run SCRIPT` with the four keys of DeepSpeed's own ZeRO++.

    The script knows nothing of the plugin. In the last step rank 1 raises between forward and backward; rank 0, which
    waits for it, is ended by the launcher. In a launch of its own that took 12 s more.
    """
    path = tmp_path / "in_tree.json"
    path.write_text(json.dumps(IN_TREE_DS_CONFIG))
    text = (TESTS / "system/unmodified_script.py").read_text()
    raising = "    if step == 19 and engine.global_rank == 1:\n        raise RuntimeError('rank 1 gives up')\n"
    backward = "    engine.backward(loss)\n"
    assert text.count(backward) == 1
    script = tmp_path / "failing.py"
    script.write_text(text.replace(backward, raising + backward))
    command = deepspeed_command("--module", "zeropp_fp8.run", script, "--deepspeed", "--deepspeed_config", path)
    status, output = run(command)
    assert status != 0 and "rank 1 gives up" in output
    assert "recipe none (lossless plus the ZeRO++ keys); 1 node(s) x 2 rank(s)" in output
    assert "int8 (block 256)" in output and "one node: every shard is in it already" in output
    for rank in (0, 1):
        seen = [float(loss) for loss in re.findall(rf"rank {rank} step \d+ loss (\d\.\d{{4}})", output)]
        assert len(seen) == 19 and np.mean(seen[-5:]) < 0.8 * np.mean(seen[:5])


# -- the data, in this process ---------------------------------------------------------------------------------------


def test_standard_library_is_several_megabytes_without_tests():
    files = pretrain_data.find_files("stdlib")
    assert files == sorted(files) and sum(path.stat().st_size for path in files) > 3e6
    assert not [path for path in files if path.suffix != ".py" or {"test", "site-packages"} & set(path.parts[-4:-1])]


def test_held_out_documents_are_every_twentieth(text):
    documents = pretrain_data.read_documents([str(text)])
    training, held_out = pretrain_data.split_tokens(documents, pretrain_data.byte_tokens)
    assert bytes(held_out.numpy()) == documents[19] + b"\0"
    assert len(training) + len(held_out) == sum(len(document) + 1 for document in documents)
    training, held_out = pretrain_data.split_tokens(documents[:1], pretrain_data.byte_tokens)
    assert bytes(torch.cat([training, held_out]).numpy()) == documents[0] + b"\0"
    assert len(held_out) == (len(documents[0]) + 1) // 20


def test_order_is_a_function_of_seed_and_position():
    """Each epoch holds every sequence once; positions can be asked for in any order; another seed, another order."""
    tokens = torch.arange(10 * 4 + 3)
    sequences = pretrain_data.Sequences(tokens, length=4, seed=1)
    two_epochs = sequences.training_batch(0, 20)
    assert two_epochs.dtype == torch.int64 and two_epochs.shape == (20, 4)
    for epoch in (two_epochs[:10], two_epochs[10:]):
        assert torch.equal(epoch[epoch[:, 0].argsort()], tokens[:40].view(10, 4))
    assert not torch.equal(two_epochs[:10], two_epochs[10:])
    again = pretrain_data.Sequences(tokens, length=4, seed=1)
    for position in (16, 8, 0):
        assert torch.equal(again.training_batch(position, 4), two_epochs[position : position + 4])
    other = pretrain_data.Sequences(tokens, length=4, seed=2)
    assert not torch.equal(other.training_batch(0, 10), two_epochs[:10])


def test_evaluation_batches_cover_the_stream_evenly():
    sequences = pretrain_data.Sequences(torch.arange(100), length=5)
    starts = torch.cat([sequences.evaluation_batch(i, of=4, size=2) for i in range(4)])[:, 0] // 5
    assert starts.tolist() == [0, 2, 5, 7, 10, 12, 15, 17]


def test_text_column_of_a_hugging_face_dataset():
    datasets = pytest.importorskip("datasets", reason="the extra `examples` installs datasets")
    rows = {"number": [1, 2], "title": ["a", "b"], "text": ["one", "two"]}
    assert pretrain_data.documents_of_dataset(datasets.Dataset.from_dict(rows)) == ["one", "two"]
    del rows["text"]
    assert pretrain_data.documents_of_dataset(datasets.Dataset.from_dict(rows)) == ["a", "b"]
    with pytest.raises(ValueError, match="no column of strings; its columns are number"):
        pretrain_data.documents_of_dataset(datasets.Dataset.from_dict({"number": [1]}))


def test_clear_errors_for_data_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        pretrain_data.read_documents([str(tmp_path / "missing.txt")])
    with pytest.raises(FileNotFoundError, match="no file there ends in"):
        pretrain_data.read_documents([str(tmp_path)])
    with pytest.raises(ValueError, match="not enough for one sequence of 64"):
        pretrain_data.Sequences(torch.arange(10), length=64)


def test_settings_that_cannot_be_written_end_every_rank(tmp_path, train_command):
    """Without a launcher, which would end the other rank: rank 0 alone writes them, and rank 1 must not wait for it."""
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "run.json.new").mkdir(parents=True)
    argv = train_command(tmp_path, "refused", "zeropp", 1, "--save", checkpoint)
    own, others = run_two(example_jobs.what_a_script_raises, argv=argv)
    assert own.startswith("IsADirectoryError")
    assert "run.json failed on rank 0: IsADirectoryError" in others
