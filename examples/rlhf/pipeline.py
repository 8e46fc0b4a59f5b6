"""SFT, reward model and PPO end to end (or other stages), and what they came to on held-out prompts.

    python examples/rlhf/pipeline.py --settings examples/rlhf/demo.json --ranks 2 --out runs/rlhf     # make rlhf-demo
    python examples/rlhf/pipeline.py --model MODEL --data FOLDER --recipe qlora --out runs/rlhf
    python examples/rlhf/pipeline.py --stages sft grpo --set grpo.lr=1e-5 grpo.iterations=50 --out runs/rlhf

Each stage is a script of this folder under the `deepspeed` launcher, on this machine's GPUs or CPU, with a folder in
--out, and begins where the one before ended. Without --model and --data they are made (make_data.py). At the end the
policies of all stages answer the same held-out prompts: --out/summary.json, --out/summary.png. A stage that fails ends
the run; --resume goes on from there.
"""

from __future__ import annotations

import json
import platform
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import zeropp_fp8
from zeropp_fp8.config import load_ds_config

sys.path.append(str(Path(__file__).resolve().parents[1]))  # examples/

import make_data
from common.arguments import (
    DPOArguments,
    EvaluationArguments,
    FieldParser,
    GRPOArguments,
    PipelineArguments,
    PPOArguments,
    RewardModelArguments,
    SFTArguments,
    check_groups,
    check_preferences,
    check_rollout,
    checked_ds_config,
    parse,
)
from common.models import find_start
from common.summary import draw, lines, score_of, summarize
from common.verifiers import reward_function
from launching import computes_in_bf16, device, hardware, launch
from options import model_config, refusals

HERE = Path(__file__).resolve().parent
DS_CONFIGS = HERE.parent.parent / "ds_configs"
POLICIES = ("sft", "dpo", "ppo", "grpo")  # the stages that leave a policy
ROLLOUTS = ("ppo", "grpo")  # the stages that learn from their own answers
KINDS = {
    "sft": SFTArguments,
    "reward": RewardModelArguments,
    "dpo": DPOArguments,
    "ppo": PPOArguments,
    "grpo": GRPOArguments,
    "evaluate": EvaluationArguments,
}
FILES = {
    "sft": "sft.jsonl",
    "reward": "preferences.jsonl",
    "dpo": "preferences.jsonl",
    "ppo": "tasks_train.jsonl",
    "grpo": "tasks_train.jsonl",
    "evaluate": "tasks_test.jsonl",
}
OURS = ("out", "models", "deepspeed_config", "local_rank", "resume")  # options that are not for settings
# What policies are evaluated with is what they were trained with, where the settings do not say otherwise.
AS_TRAINED = ("chat", "bad_rows", "lora_rank", "max_prompt_tokens", "max_new_tokens", "eval_batch")
SUMMARY = ("summary.json", "summary.png")
RECORD = "stage.json"  # in a stage's folder: what it was run with, and when it ended


@dataclass
class Stage:
    """A script with its options. Without a ds_config it runs as one process, without the launcher."""

    name: str
    script: str
    options: dict
    ds_config: dict | None = None
    after: list[str] = field(default_factory=list)  # the stages whose folders it reads


# --- settings ----------------------------------------------------------------------------------------------------


def read_settings(path: str | None, changes: list[str]) -> dict:
    """The settings file with the changes of the command line.

    Raises:
        ValueError: the file is no JSON of settings, a change is not NAME.NAME=VALUE, or a name is no stage or option.
    """
    settings = {}
    if path is not None:
        try:
            settings = json.loads(Path(path).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"--settings {path} is no JSON: {error}") from error
        if not isinstance(settings, dict):
            raise ValueError(f"--settings {path}: give an object, options by stage")
    for change in changes:
        names, equals, value = change.partition("=")
        *outer, last = names.split(".")
        if not equals or not outer:
            raise ValueError(f"--set {change}: write STAGE.OPTION=VALUE")
        place = settings
        for name in outer:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise ValueError(f"--set {change}: {name} is {place!r}, which has no parts")
        place[last] = parsed(value)
    known = ("make_data", "ds_config", *KINDS)
    for name, options in settings.items():
        if name not in known or not isinstance(options, dict):
            raise ValueError(f"settings of {name}: give options by name, of one of {', '.join(known)}")
    return {name: checked_options(name, options) if name in KINDS else options for name, options in settings.items()}


def checked_options(stage: str, options: dict) -> dict:
    """The options of a stage; one value where several may stand becomes a list, and null is as if nothing was given.

    Raises:
        ValueError: the script has no such option, or it is the pipeline's to give.
    """
    types = {"ds_config": "dict"} | {each.name: str(each.type) for each in fields(KINDS[stage])}
    unknown = [name for name in options if name in OURS or name not in types]
    if unknown:
        raise ValueError(
            f"settings of {stage}: {', '.join(unknown)}: {stage}.py has no such option, or the pipeline gives it "
            f'({", ".join(OURS)}); {stage}.py --help lists all of them, here they have "_" between words'
        )
    return {
        name: [value] if types[name].startswith("list") and not isinstance(value, list) else value
        for name, value in options.items()
        if value is not None
    }


def parsed(value: str):
    """A value of JSON, or the text itself."""
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def merged(config: dict, changes: dict) -> dict:
    """`config` with `changes`, which are merged into it level by level."""
    new = dict(config)
    for key, value in changes.items():
        new[key] = merged(new[key], value) if isinstance(value, dict) and isinstance(new.get(key), dict) else value
    return new


def ds_config_of(stage: str, arguments: PipelineArguments, settings: dict, accelerator: str, ranks: int) -> dict:
    """The recipe's ds_config with the changes of the settings, for this machine.

    Raises:
        ValueError: there is no such recipe, or the ds_config cannot be honoured.
    """
    path = DS_CONFIGS / f"{arguments.recipe}.json"
    path = path if path.is_file() else Path(arguments.recipe)
    if not path.is_file():
        known = sorted(each.stem for each in DS_CONFIGS.glob("*.json"))
        raise ValueError(f"--recipe {arguments.recipe}: neither a file nor one of {', '.join(known)}")
    config = load_ds_config(path)
    if not computes_in_bf16(accelerator):
        config = merged(config, {"bf16": {"enabled": False}})
    if "zeropp_fp8" in config:
        here = {"topology": {"ranks_per_node": ranks // arguments.nodes}, "report": {"every": 0}}
        config = merged(config, {"zeropp_fp8": here})
    config = merged(merged(config, settings.get("ds_config", {})), settings.get(stage, {}).get("ds_config", {}))
    return checked_ds_config(config, f"the ds_config of {stage}")


# --- what is run -------------------------------------------------------------------------------------------------


def plan(arguments: PipelineArguments, settings: dict, accelerator: str, ranks: int) -> list[Stage]:
    """The stages in their order, each with the folders of those before it.

    Raises:
        ValueError: a stage twice, none that leaves a policy, or two policies of one name; what a stage's script would
            refuse; files that are not there.
        OSError, ImportError: a reward function is not there.
    """
    names = arguments.stages
    if len(set(names)) < len(names) or not set(names) & set(POLICIES):
        raise ValueError(f"--stages {' '.join(names)}: give each once, and one of {', '.join(POLICIES)} at least")
    out, stages = Path(arguments.out), []
    model, data = arguments.model, arguments.data
    if model is None or data is None:
        given = {name: value for name, value in settings.get("make_data", {}).items() if value is not None}
        options = {"out": str(out / "data"), "seed": arguments.seed, "model": "small"} | given
        folder, size = options["out"], options["model"]
        if model is not None:
            del options["model"]
        # Its flags have no values.
        options = {name: value for name, value in options.items() if value is not False}
        stages.append(Stage("data", "make_data.py", options))
        model, data = model or str(Path(folder, size)), data or folder
    made = [stage.name for stage in stages]

    def rows(stage: str) -> list[str]:
        return [str(Path(data, FILES[stage]))]

    def launched(name: str, options: dict, after: list[str]) -> Stage:
        own = {key: value for key, value in settings.get(name, {}).items() if key != "ds_config"}
        options = {"out": str(out / name)} | options | own
        if name in ROLLOUTS:
            options |= rewards_of(own, options.get("reward_model"), arguments.metric)
        ds_config = ds_config_of(name, arguments, settings, accelerator, ranks)
        return Stage(name, f"{name}.py", options, ds_config, list(dict.fromkeys([*made, *after])))

    policy, latest, reward = model, [], None
    for name in names:
        options, after = {"model": policy, "data": rows(name), "seed": arguments.seed}, latest
        if name in ROLLOUTS:
            options["eval_data"] = rows("evaluate")
            if reward is not None:
                options["reward_model"], after = reward, [*latest, "reward"]
        stages.append(launched(name, options, after))
        if name == "reward":
            reward = str(out / name)
        else:
            policy, latest = str(out / name), [name]

    trained = [name for name in names if name in POLICIES]
    models = [str(out / name) for name in trained]
    if "sft" not in names:
        if Path(model).name in trained:
            raise ValueError(f"--model {model}: policies are told apart by their last names, and a stage has this one")
        models.insert(0, model)
    options = {"models": models, "data": rows("evaluate"), "reward_functions": [arguments.metric]}
    for name in names:
        options |= {key: value for key, value in settings.get(name, {}).items() if key in AS_TRAINED}
    stages.append(launched("evaluate", options, trained))
    for stage in stages:
        check(stage, arguments.data)
    return stages


def rewards_of(own: dict, reward_model: str | None, metric: str) -> dict:
    """Reward functions and their weights: those of the settings, and the metric.

    The metric is the reward where nothing else gives one; else it is watched, with the weight 0.
    """
    functions, weights = list(own.get("reward_functions", [])), list(own.get("reward_weights", []))
    weights = weights or [1.0] * len(functions)
    if metric not in functions:
        functions.append(metric)
        if len(weights) < len(functions):
            weights.append(0.0 if reward_model or len(functions) > 1 else 1.0)
    return {"reward_functions": functions, "reward_weights": weights}


def command_line(options: dict) -> list[str]:
    """--name value ...; True is a flag alone, and an empty list is left out."""
    words = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        if value != []:
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words


def check(stage: Stage, data: str | None) -> None:
    """Refuse now what the stage's script would refuse when its turn comes, after hours of other stages perhaps.

    Args:
        data: a folder that must have the files which are read from it.

    Raises:
        ValueError, OSError, ImportError: see the scripts.
    """

    def refuse(message: str) -> None:
        raise ValueError(f"settings of {stage.name}: {message}")

    parser = make_data.command_line() if stage.ds_config is None else FieldParser(KINDS[stage.name])
    parser.error = refuse
    words = command_line(stage.options)
    if stage.ds_config is None:
        parser.parse_args(words)
        return
    words += ["--deepspeed-config", "written later"]
    (arguments,) = parser.parse_args_into_dataclasses(words, look_for_args_file=False)
    if stage.name in ROLLOUTS:
        check_rollout(arguments, stage.ds_config)
    if stage.name == "grpo":
        check_groups(arguments)
    if stage.name == "dpo":
        check_preferences(arguments)
    if stage.name == "evaluate":
        for name in arguments.reward_functions:
            reward_function(name)
    for path in map(Path, [*arguments.data, *getattr(arguments, "eval_data", [])]):
        if data is not None and path.parent == Path(data) and not path.is_file():
            raise ValueError(
                f"--data {data} has no {path.name}; name the files as make_data.py does, or give the stage rows of its "
                f"own with --set {stage.name}.data=..."
            )


def run(stage: Stage, out: Path, accelerator: str, ranks: int, ended: dict[str, str]) -> dict:
    """Run a stage to its end, unless it was before; returns its record.

    A stage that read what another one wrote is run again if that one was. One that was stopped goes on from its latest
    checkpoint (its script then compares the settings), or begins again where it has none.

    Args:
        ended: when the stages before it ended.

    Raises:
        ValueError: it was finished before with other settings.
        SystemExit: it failed.
    """
    folder, settings = out / stage.name, {f"--{name}": value for name, value in stage.options.items()}
    if stage.ds_config is not None:
        settings |= {"the ds_config": stage.ds_config, "the number of ranks": ranks, "the accelerator": accelerator}
    after = {name: ended[name] for name in stage.after}
    path, earlier = folder / RECORD, None
    if path.is_file():
        earlier = json.loads(path.read_text())
        again = [name for name in after if earlier["after"].get(name, after[name]) != after[name]]
        if again:
            print(f"\n== {stage.name}: again from the beginning, because {', '.join(again)} was run again", flush=True)
            shutil.rmtree(folder)
            earlier = None
    if earlier is not None and earlier["ended"] is not None:
        for name in {**earlier["settings"], **settings}:
            then, now = earlier["settings"].get(name), settings.get(name)
            if then != now:
                raise ValueError(
                    f"--resume: stage {stage.name} was run with {name} {then}, now it is {now}; give what it began "
                    f"with, or remove {folder} to run it again"
                )
        print(f"\n== {stage.name}: finished at {earlier['ended']}", flush=True)
        return earlier
    words = command_line(stage.options)
    if (folder / "checkpoints" / "latest").is_file():
        words.append("--resume")
    folder.mkdir(parents=True, exist_ok=True)
    if stage.ds_config is not None:
        ds_config = folder / "ds_config.json"
        ds_config.write_text(json.dumps(stage.ds_config, indent=2) + "\n")
        words += ["--deepspeed-config", str(ds_config)]
    record = {"settings": settings, "after": after, "command": [stage.script, *words], "ended": None}
    write_record(path, record)  # from now on the folder is known as this stage's
    began = time.monotonic()
    if stage.ds_config is None:
        alone(stage.name, HERE / stage.script, words)
    else:
        launch(stage.name, HERE / stage.script, words, accelerator, ranks)
    record |= {"seconds": round(time.monotonic() - began, 1), "ended": datetime.now(timezone.utc).isoformat()}
    write_record(path, record)
    return record


def write_record(path: Path, record: dict) -> None:
    """Write it whole, or leave the one before: a disk may be full, and --resume reads it."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(record, indent=1) + "\n")
    new.replace(path)


def alone(name: str, script: Path, words: list[str]) -> None:
    """Run a script as one process.

    Raises:
        SystemExit: it failed.
    """
    print(f"\n== {name}: {shlex.join([str(script), *words])}", flush=True)
    code = subprocess.run([sys.executable, str(script), *words]).returncode
    if code:
        raise SystemExit(f"pipeline: {script.name} failed with exit status {code}; its error is above")


def check_folder(arguments: PipelineArguments, stages: list[Stage]) -> None:
    """Make --out ready: nothing of an earlier run is in the way.

    Raises:
        ValueError: there is, and neither --resume nor --replace is given, or both are; or what is read would be
            written over.
    """
    if arguments.resume and arguments.replace:
        raise ValueError("--resume keeps the stages of an earlier run and --replace removes them; give one of them")
    out = Path(arguments.out)
    folders = [out / stage.name for stage in stages]
    for given in filter(None, (arguments.model, arguments.data)):
        for folder in folders:
            if Path(given).resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"{given} is read, and {folder} is written; give another --out")
    earlier = [folder for folder in folders if (folder / RECORD).is_file()]
    if earlier and not arguments.resume and not arguments.replace:
        raise ValueError(
            f"{', '.join(map(str, earlier))}: of an earlier run; --resume to go on with it, --replace to remove it, or "
            "give another --out"
        )
    if earlier and arguments.replace:
        for folder in earlier:
            shutil.rmtree(folder)
        for name in SUMMARY:
            (out / name).unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)


def main() -> None:
    began, arguments = time.monotonic(), parse(PipelineArguments, __doc__)
    accelerator, ranks = device(arguments.nodes, arguments.ranks)
    out, records = Path(arguments.out), {}
    with refusals():
        if ranks % arguments.nodes:
            raise ValueError(f"{ranks} ranks do not make {arguments.nodes} nodes of as many each; give --ranks")
        if arguments.model is not None:
            model_config("--model", find_start(arguments.model).base)
        settings = read_settings(arguments.settings, arguments.changes)
        stages = plan(arguments, settings, accelerator, ranks)
        check_folder(arguments, stages)
        print(
            f"pipeline: {', '.join(arguments.stages)}; recipe {arguments.recipe}; {ranks} ranks as {arguments.nodes} "
            f"node(s) on this machine's {'GPUs' if accelerator == 'cuda' else 'CPU'}",
            flush=True,
        )
        for stage in stages:
            ended = {name: record["ended"] for name, record in records.items()}
            records[stage.name] = run(stage, out, accelerator, ranks, ended)
    summary = summarize(out, stages[-1].options["models"], arguments.metric, arguments.stages) | {
        "seconds": {name: record["seconds"] for name, record in records.items()},
        "this_call_seconds": round(time.monotonic() - began, 1),
        "ranks": ranks,
        "nodes": arguments.nodes,
        "hardware": hardware(accelerator),
        "versions": {"python": platform.python_version(), "zeropp_fp8": zeropp_fp8.__version__}
        | {name: version(name) for name in ("deepspeed", "peft", "torch", "transformers")},
        "command": shlex.join(["python", *sys.argv]),
        "commands": {name: shlex.join(record["command"]) for name, record in records.items()},
        "ds_configs": {stage.name: stage.ds_config for stage in stages if stage.ds_config},
    }
    figures, picture = (out / name for name in SUMMARY)
    figures.write_text(json.dumps(summary, indent=2) + "\n")
    model = arguments.model or "a small Llama from random weights"
    setting = f"{model}, recipe {arguments.recipe}, {ranks} ranks as {arguments.nodes} node(s)"
    last = next(stage for stage in stages if stage.name == arguments.stages[-1])
    if last.name in ROLLOUTS:
        usual = KINDS[last.name]
        setting += f"\n{score_of(last.options, usual.reward_model_weight, usual.missing_eos_penalty)}"
    draw(summary, arguments.metric, picture, setting)
    print("\n" + "\n".join(lines(summary, arguments.metric)))
    print(f"Written: {figures}, {picture}")


if __name__ == "__main__":
    main()
