"""Options of the examples: what is refused, by which line, before anything is loaded or started."""

import ast
import json
import os
import subprocess
import sys
from dataclasses import fields, is_dataclass

import dpo
import evaluate
import grpo
import make_data
import options
import ppo
import pytest
import reward
import sft
import torch.distributed as dist
from common import arguments
from common.arguments import FieldParser, PipelineArguments, PPOArguments
from common.state import Checkpoints
from hang_guard import HANG
from options import finite, kept, new_file, new_folder, whole

from tests.places import ROOT

KINDS = [kind for kind in vars(arguments).values() if is_dataclass(kind)]


# -- types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read, text, value",
    [
        (whole(0), "0", 0),
        (whole(-1), "-1", -1),
        (whole(2, 26), "26", 26),
        (finite(), "-1e-3", -1e-3),
        (finite(least=0, most=1), "1", 1.0),
        (finite(above=0), "1e-9", 1e-9),
        (kept, "3", 3),
        (kept, "-1", options.ALL),
        (kept, "all", options.ALL),
        (options.generator_seed, "4294967295", 2**32 - 1),
    ],
)
def test_taken(read, text, value):
    assert read(text) == value


@pytest.mark.parametrize(
    "read, text, said",
    [
        (whole(1), "0", "0: give a whole number of at least 1"),
        (whole(0), "1.5", "1.5: give a whole number of at least 0"),
        (whole(0), "nan", "nan: give a whole number of at least 0"),
        (whole(2, 26), "27", "27: give a whole number from 2 to 26"),
        (finite(), "inf", "inf: give a finite number"),
        (finite(), "x", "x: give a finite number"),
        (finite(above=0), "0", "0: give a finite number above 0"),
        (finite(least=0), "nan", "nan: give a finite number of at least 0"),
        (finite(least=0, most=1), "1.1", "1.1: give a finite number of at least 0 and of at most 1"),
        (finite(least=0, below=0.5), "0.5", "0.5: give a finite number of at least 0 and below 0.5"),
        (kept, "0", "0: give a whole number of at least 1, or all (or -1)"),
        (kept, "-2", "-2: give a whole number of at least 1, or all (or -1)"),
        (options.generator_seed, str(2**32), "4294967296: give a whole number from 0 to 4294967295"),
    ],
)
def test_refused(read, text, said):
    with pytest.raises(options.ArgumentTypeError) as raised:
        read(text)
    assert str(raised.value) == said


def test_places_that_can_and_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert new_folder(str(tmp_path)) == str(tmp_path) and new_file(f"{tmp_path}/file") == f"{tmp_path}/file"
    assert new_folder(f"{tmp_path}/a/b") == f"{tmp_path}/a/b" and new_file("a/b") == "a/b"
    for read, path, said in (
        (new_folder, "file", f"give a folder; {tmp_path}/file is a file"),
        (new_folder, "file/below", f"give a folder; {tmp_path}/file is a file"),
        (new_file, "", "give a file; this is a folder"),
        (new_file, "file/below", f"give a folder; {tmp_path}/file is a file"),
    ):
        with pytest.raises(options.ArgumentTypeError) as raised:
            read(str(tmp_path / path))
        assert str(raised.value).endswith(said)
    assert not (tmp_path / "a").exists()


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_one_rank_says_it(rank, monkeypatch, capsys):
    """The others give the launcher time to end them."""
    waited = []
    monkeypatch.setattr(options.time, "sleep", waited.append)
    monkeypatch.setattr(sys, "argv", ["folder/script.py"])
    monkeypatch.setenv("RANK", rank) if rank else monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as stopped, options.refusals():
        raise FileNotFoundError("two\n  lines")
    assert stopped.value.code == 2 and capsys.readouterr().err == "script: two lines\n"
    assert waited == ([options.PATIENCE] if rank == "1" else [])


def test_other_errors_keep_their_traceback():
    with pytest.raises(KeyError), options.refusals():
        raise KeyError("a mistake of the script itself")


# -- command lines of dataclasses -------------------------------------------------------------------------------------

NUMBERS = [
    (kind, each.name)
    for kind in KINDS
    for each in fields(kind)
    if ("int" in str(each.type) or "float" in str(each.type)) and each.name != "local_rank"
]
ANY_SIGN = {"reward_weights", "reward_model_weight"}


def refusal(capsys, call):
    """The one line that a call says before it ends with status 2."""
    with pytest.raises(SystemExit) as stopped:
        call()
    said = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and len(said) == 1, said
    return said[0]


@pytest.mark.parametrize("kind, name", NUMBERS, ids=[f"{kind.__name__}.{name}" for kind, name in NUMBERS])
def test_no_number_goes_unchecked(kind, name, capsys):
    parser = FieldParser(kind)
    for text in ("nan", "x", "1e400", *(() if name in ANY_SIGN else ("-2",))):
        said = refusal(capsys, lambda text=text: parser.parse_args([f"--{name}", text]))
        assert f"argument --{name}" in said and f": {text}: give a " in said
    (default,) = (each.default for each in fields(kind) if each.name == name)
    if isinstance(default, (int, float)):
        read = parser.parse_known_args([f"--{name}", str(default), *needed(kind)])[0]
        assert getattr(read, name) == default


def needed(kind):
    """The options without which there is nothing to read."""
    return [word for action in FieldParser(kind)._actions if action.required for word in (f"--{action.dest}", "x")]


@pytest.mark.parametrize(
    "words, said",
    [
        ("--reward_weights 1 nan", "nan: give a finite number"),
        ("--lam nan", "nan: give a finite number of at least 0 and of at most 1"),
        ("--iterations 0", "0: give a whole number of at least 1"),
        ("--top_p 2", "2: give a finite number of at most 1 and above 0"),
        ("--clip -1", "-1: give a finite number above 0"),
        ("--log_every 0", "0: give a whole number of at least 1"),
        ("--eval_batch 0", "0: give a whole number of at least 1"),
        ("--ppo_epochs 0", "0: give a whole number of at least 1"),
        ("--keep_checkpoints 0", "0: give a whole number of at least 1, or all (or -1)"),
        ("--frozen_format int5", "invalid choice: 'int5'"),
        ("--no_such_option 3", "not used by the HfArgumentParser: ['--no_such_option', '3']"),
        ("--out /dev/null", "/dev/null: give a folder; /dev/null is a file"),
    ],
)  # fmt: skip
def test_options_of_ppo(words, said, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ppo.py", *needed(PPOArguments), *words.split()])
    assert said in refusal(capsys, ppo.main)


def test_all_checkpoints_can_be_kept(tmp_path, monkeypatch):
    for keep, left in (("-1", "1234"), ("all", "1234"), ("2", "34"), ("9", "1234")):
        checkpoints = Checkpoints.__new__(Checkpoints)
        monkeypatch.setattr(sys, "argv", ["ppo.py", *needed(PPOArguments), "--keep_checkpoints", keep])
        checkpoints._folder, checkpoints._keep = tmp_path / keep, arguments.parse(PPOArguments, "").keep_checkpoints
        for step in range(1, 6):
            (tmp_path / keep / f"step{step}").mkdir(parents=True)
        checkpoints._remove_old(4)  # number 5 is of a run that was stopped while it saved
        assert sorted(path.name for path in (tmp_path / keep).iterdir()) == [f"step{step}" for step in left]
    (text,) = (each.metadata["help"] for each in fields(PPOArguments) if each.name == "keep_checkpoints")
    assert "all or -1: all of them" in text


# -- scripts ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run(script, words): the line with which it refuses."""
    path = tmp_path / "ds_config.json"
    path.write_text('{"zero_optimization": {"stage": 3}}')

    def main(script, *words, model="nowhere/at-all"):
        models = "--models" if script is evaluate else "--model"
        given = ["--deepspeed_config", str(path), models, model, "--out", str(tmp_path / "out"), "--data", "no.jsonl"]
        if script in (ppo, grpo, evaluate):
            given += ["--reward_functions", "exact_match"]
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *given, *words])
        said = refusal(capsys, script.main)
        assert not dist.is_initialized() and not (tmp_path / "out").exists()
        return said

    return main


SCRIPTS = pytest.mark.parametrize("script", [sft, reward, dpo, ppo, grpo, evaluate], ids=lambda script: script.__name__)


@SCRIPTS
def test_a_model_that_is_not_there(script, run, tmp_path):
    said = f"{script.__name__}: --model{'s' * (script is evaluate)}"
    why = "neither a folder with a model nor a name of one that can be loaded"
    for model in ("nowhere/at-all", str(tmp_path / "nowhere")):
        assert run(script, model=model).startswith(f"{said} {model}: {why}")
    (tmp_path / "empty").mkdir()
    assert "no model there (neither config.json nor" in run(script, model=str(tmp_path / "empty"))


@SCRIPTS
@pytest.mark.parametrize(
    "text, said",
    [
        (None, "is neither a file nor base64 of JSON"),
        ("{", "ds_config.json': Bad key name"),
        ("[]", "ds_config.json' holds a list; it must be an object"),
        ('{"zero_optimization": {"stage": 2}}', 'ds_config.json: set "zero_optimization.stage" to 3'),
        ('{"zero_optimization": {"stage": 3}, "zeropp_fp8": {"recipe": "x"}}', 'there is no recipe "x"'),
    ],
)
def test_a_ds_config_that_is_none(script, text, said, run, tmp_path):
    (tmp_path / "ds_config.json").unlink()
    if text is not None:
        (tmp_path / "ds_config.json").write_text(text)
    assert said in run(script)


@pytest.mark.parametrize(
    "script, words, said",
    [
        (sft, "--steps -1", "sft: argument --steps: -1: give a whole number of at least 0"),
        (dpo, "--beta nan", "dpo: argument --beta: nan: give a finite number above 0"),
        (dpo, "--label_smoothing 0.1 --loss ipo", "dpo: --label_smoothing 0.1 has no meaning with --loss ipo"),
        (ppo, "--rollout_batch 0", "--rollout-batch: 0: give a whole number of at least 1"),
        (grpo, "--rollout_batch 9", "grpo: --rollout_batch 9 is not made of groups of --group_size 8"),
        (grpo, "--reward_weights 1 2", "grpo: --reward_weights has 2 numbers for 1 --reward_functions"),
        (evaluate, "--reward_functions no.py:f", "evaluate: reward function: no such file"),
    ],
)
def test_options_that_are_refused(script, words, said, run):
    assert said in run(script, *words.split())


@pytest.mark.parametrize(
    "words, said",
    [
        ("--train 0", "argument --train: 0: give a whole number of at least 1"),
        ("--test -1", "argument --test: -1: give a whole number of at least 1"),
        ("--sft-wrong nan", "argument --sft-wrong: nan: give a finite number of at least 0 and of at most 1"),
        ("--letters 27", "argument --letters: 27: give a whole number from 2 to 26"),
        ("--seed x", "argument --seed: x: give a whole number from 0"),
        ("--text-characters -1", "argument --text-characters: -1: give a whole number of at least 0"),
        ("--out /dev/null", "argument --out: /dev/null: give a folder"),
    ],
)
def test_options_of_make_data(words, said, capsys):
    assert said in refusal(capsys, lambda: make_data.command_line().parse_args(words.split()))


PRETRAIN = {
    "train": [
        ("--steps 0", "argument --steps: 0: give a whole number of at least 1"),
        ("--eval-batches -1", "argument --eval-batches: -1: give a whole number of at least 0"),
        ("--eval-every -1", "argument --eval-every: -1: give a whole number of at least 0"),
        ("--save-every -1", "argument --save-every: -1: give a whole number of at least 0"),
        ("--sequence-length 0", "argument --sequence-length: 0: give a whole number of at least 2"),
        ("--lr nan", "argument --lr: nan: give a finite number of at least 0"),
        ("--weight-decay -1", "argument --weight-decay: -1: give a finite number of at least 0"),
        ("--warmup -1", "argument --warmup: -1: give a whole number of at least 0"),
        ("--seed -1", "argument --seed: -1: give a whole number from 0"),
        ("--save /dev/null", "argument --save: /dev/null: give a folder; /dev/null is a file"),
        ("--summary /", "argument --summary: /: give a file; this is a folder"),
        ("--loss-log /dev/null/x", "argument --loss-log: /dev/null: give a folder"),
        ("--save-every 1", "--save-every needs --save DIR"),
        ("--resume /nowhere", "--resume /nowhere: no checkpoint there"),
        ("--model nowhere/at-all", "--model nowhere/at-all: neither a folder with a model nor a name of one"),
        ("--data ./nowhere", "--data ./nowhere: no such file or folder"),
        ("--deepspeed_config nowhere.json", "'nowhere.json' is neither a file nor base64 of JSON"),
    ],
    "demo": [
        ("--steps 0", "argument --steps: 0: give a whole number of at least 1"),
        ("--micro-batch 0", "argument --micro-batch: 0: give a whole number of at least 1"),
        ("--sequence-length 1", "argument --sequence-length: 1: give a whole number of at least 2"),
        ("--lr inf", "argument --lr: inf: give a finite number of at least 0"),
        ("--seed 1.5", "argument --seed: 1.5: give a whole number from 0"),
        ("--out /dev/null", "argument --out: /dev/null: give a folder"),
        ("--model nowhere/at-all", "--model nowhere/at-all: neither a folder with a model nor a name of one"),
        ("--data ./nowhere", "--data ./nowhere: no such file or folder"),
    ],
}  # fmt: skip
MAIN = """
import contextlib, importlib, io, json, sys

for name, given, words in json.loads(sys.argv[1]):
    main = importlib.import_module(name).main
    for more in words:
        sys.argv = [f"{name}.py", *given, *more.split()]
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                main()
        except SystemExit as stopped:
            print(json.dumps([name, stopped.code, said.getvalue()]))
"""


@pytest.fixture(scope="module")
def refused():
    """[script, exit status, what it said] of each line of words, of both scripts.

    In a process of their own: on sys.path their models.py would hide tests/models.py.
    """
    config = ["--deepspeed_config", str(ROOT / "ds_configs" / "zeropp.json")]
    asked = [(name, config if name == "train" else [], [words for words, _ in PRETRAIN[name]]) for name in PRETRAIN]
    folders = os.pathsep.join(map(str, (ROOT, ROOT / "examples" / "pretrain", ROOT / "examples")))
    done = subprocess.run(
        [sys.executable, "-c", MAIN, json.dumps(asked)],
        env={**os.environ, "PYTHONPATH": folders},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


@pytest.mark.parametrize("script", PRETRAIN)
def test_options_of_pretraining(refused, script):
    lines = [(status, line) for name, status, line in refused if name == script]
    assert len(lines) == len(PRETRAIN[script])
    for (status, line), (_, said) in zip(lines, PRETRAIN[script]):
        assert status == 2 and line.startswith(f"{script}: ") and said in line and line.count("\n") == 1


COMMANDS = [
    path
    for folder in ("examples", "benchmarks", "tests/upstream")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ".add_argument(" in path.read_text()
]


def unchecked(source):
    """The options of a script whose numbers may be anything."""
    return [
        call.args[0].value
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument"
        for given in call.keywords
        if given.arg == "type" and getattr(given.value, "id", "") in ("int", "float")
    ]


@pytest.mark.parametrize("path", COMMANDS, ids=[path.name for path in COMMANDS])
def test_no_script_takes_just_any_number(path):
    assert set(unchecked(path.read_text())) <= {"--local_rank"}


def test_the_check_finds_such_an_option():
    source = "p.add_argument('--a', type=int)\np.add_argument('--b', type=whole(1))\np.add_argument('--c', type=float)"
    assert unchecked(source) == ["--a", "--c"] and len(COMMANDS) > 20


def test_several_values_in_a_word():
    assert options.several(options.several(whole(1), "x"))("4x8,2x2") == "4x8,2x2"
    for text, said in (("4x8,", ": give a whole"), ("4x0", "0: give a whole"), ("4xa", "a: give a whole")):
        with pytest.raises(options.ArgumentTypeError, match=said):
            options.several(options.several(whole(1), "x"))(text)


def test_options_of_the_pipeline_are_numbers_of_it():
    """Its other numbers are options of the stages, which it reads as their scripts do."""
    assert {name for kind, name in NUMBERS if kind is PipelineArguments} == {"ranks", "nodes", "seed"}
