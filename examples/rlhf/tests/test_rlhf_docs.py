"""The names in docs/rlhf.md are there: options, scripts, data files, recipes; its commands are read."""

import json
import re
import shlex
from dataclasses import fields, is_dataclass
from pathlib import Path

import pipeline
import pytest
from common import arguments
from common.rows import checked_row
from common.verifiers import reward_function

ROOT = Path(__file__).parents[3]
RLHF = ROOT / "examples" / "rlhf"
PAGE = (ROOT / "docs/rlhf.md").read_text()
SCRIPTS = {f"{name}.py": kind for name, kind in {**pipeline.KINDS, "pipeline": arguments.PipelineArguments}.items()}
MAKE_DATA = set(re.findall(r'"--([\w-]+)"', (RLHF / "make_data.py").read_text()))


def options_of_dataclasses():
    """The names of all options, and of those that switch off what is on."""
    kinds = [kind for kind in vars(arguments).values() if is_dataclass(kind)]
    names = {field.name for kind in kinds for field in fields(kind)}
    off = {f"no_{field.name}" for kind in kinds for field in fields(kind) if field.default is True}
    aliases = {alias[2:] for kind in kinds for field in fields(kind) for alias in field.metadata.get("aliases", [])}
    return names | off | aliases | {"help"}


def blocks(language=""):
    """The texts of the code blocks in a language; commands are in those without one."""
    return [body for name, body in re.findall(r"```(\w*)\n(.*?)```", PAGE, flags=re.S) if name == language]


def commands():
    """The words of each command of the page, from the script on."""
    lines = "\n".join(blocks()).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if re.match(r"(deepspeed|python) examples/rlhf/", line)]


def test_every_option_named_is_one():
    """In the tables about DeepSpeed-Chat that goes for what stands beside its flags."""
    text = re.sub(r"```.*?```", "", PAGE, flags=re.S)
    start = text.index("## Coming from DeepSpeed-Chat")
    rows = [line.split(" | ") for line in text[start:].splitlines() if line.startswith("|")]
    assert len(rows) > 60 and all(len(row) == 2 for row in rows if row[0] != "|---|---|")
    named = re.findall(r"--([A-Za-z][\w-]*)", text[:start] + "\n".join(" ".join(row[1:]) for row in rows))
    assert len(named) > 100 and set(named) <= options_of_dataclasses()
    flags = [flag for row in rows for flag in re.findall(r"`--(\w+)`", row[0])]
    assert {"enable_ema", "unsup_coef", "data_split", "num_padding_at_beginning", "enable_hybrid_engine"} <= {*flags}


@pytest.mark.parametrize("words", commands(), ids=lambda words: Path(words[0]).stem)
def test_every_command_is_read(words):
    script, *given = words
    assert (ROOT / script).is_file()
    if script.endswith("make_data.py"):
        assert {word[2:] for word in given if word.startswith("--")} <= MAKE_DATA
        return
    (read,) = arguments.FieldParser(SCRIPTS[Path(script).name]).parse_args_into_dataclasses(given)
    if script.endswith("pipeline.py"):
        assert pipeline.read_settings(read.settings, read.changes)
        assert (ROOT / "ds_configs" / f"{read.recipe}.json").is_file()
    else:
        assert arguments.read_ds_config(read)
    for name in getattr(read, "reward_functions", []):
        if ":" not in name:
            reward_function(name)


def test_there_are_commands_of_all_scripts():
    assert {Path(words[0]).name for words in commands()} == {*SCRIPTS, "make_data.py"}


def test_scripts_recipes_and_files_named():
    table = PAGE[: PAGE.index("## Quick start")]
    assert "`docs/rlhf.md`" in (RLHF / "README.md").read_text()
    assert set(re.findall(r"^\| `(\w+\.py)`", table, flags=re.M)) == {path.name for path in RLHF.glob("*.py")}
    table = PAGE[PAGE.index("## Recipes") : PAGE.index("## Generation")]
    recipes = re.findall(r"^\| `([\w-]+)` \|", table, flags=re.M)
    assert {"zeropp", "fp8-lm", "qlora", "stock"} <= set(recipes)
    assert all((ROOT / "ds_configs" / f"{name}.json").is_file() for name in recipes)
    data = PAGE[PAGE.index("## Data") : PAGE.index("## Recipes")]
    assert set(re.findall(r"`(\w+\.jsonl)`", data)) == {*pipeline.FILES.values(), "text.jsonl"}
    (monitor,) = map(json.loads, blocks("json"))
    assert monitor["tensorboard"]["enabled"]


def test_defaults_are_deepspeed_chats():
    """The page says so of ppo_trainer.py's constants: 0.1, 5, 0.2, 0.2, 1.0, 0.95."""
    names = ("kl_coefficient", "reward_clip", "clip", "value_clip", "gamma", "lam")
    assert all(f"`--{name}`" in PAGE for name in names)
    defaults = {field.name: field.default for field in fields(arguments.PPOArguments)}
    assert [defaults[name] for name in names] == [0.1, 5.0, 0.2, 0.2, 1.0, 0.95] and defaults["whiten_advantages"]


def test_the_reward_function_shown(tmp_path):
    """And the other engine shown has the hook's methods."""
    (shown,) = (body for body in blocks("python") if "def short_and_right" in body)
    file = tmp_path / "my_rewards.py"
    file.write_text(shown)
    function = reward_function(f"{file}:short_and_right")
    assert function(prompts=["1+1="] * 2, completions=["2", "11"], answer=["2", "2"]) == [0.99, -0.02]
    (engine,) = (body for body in blocks("python") if "class MyEngine" in body)
    names = {}
    exec(engine, names)
    names["MyEngine"]().update_weights(iter([("weight", None)]))
    assert callable(names["MyEngine"].generate)


def test_the_rows_shown():
    """One of each kind in the table of data."""
    turns = [{"role": "user", "content": "2+2="}]
    answer = [{"role": "assistant", "content": "4"}]
    for kind, row in [
        ("sft", {"prompt": "2+2=", "completion": "4"}),
        ("sft", {"messages": turns + answer}),
        ("preference", {"prompt": turns, "chosen": answer, "rejected": [{"role": "assistant", "content": "5"}]}),
        ("preference", {"chosen": "2+2= 4", "rejected": "2+2= 5", "margin": 1}),
        ("prompt", {"prompt": "2+2=", "answer": "4"}),
        ("prompt", {"prompt": "2+2=", "chosen": "4", "rejected": "5"}),
        ("text", {"text": "4"}),
    ]:
        assert checked_row(row, kind)
