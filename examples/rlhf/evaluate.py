"""How policies answer held-out prompts, greedily, in the eyes of reward functions: one after the other, the same ones.

    deepspeed examples/rlhf/evaluate.py --deepspeed_config ds_configs/qlora.json --models runs/sft runs/ppo \
        --data PROMPTS --reward_functions exact_match --out runs/evaluate

--out then holds a file for each policy, sft.jsonl and ppo.jsonl: a row a prompt with the completion, what each function
says of it, and the prompt's columns. Policies compute as they do in training, with the ds_config's numbers.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch.distributed as dist

import zeropp_fp8

sys.path.append(str(Path(__file__).resolve().parents[1]))  # examples/

from basics import join_the_other_ranks, seed_everything, shut_down
from common.arguments import EvaluationArguments, RolloutArguments, check_length, parse, read_ds_config
from common.engines import frozen_ds_config, make_frozen_engine
from common.evaluation import evaluate
from common.models import POLICY, find_start, load_policy, load_tokenizer, lora_config
from common.prompts import load_prompts
from common.rewards import Rewards, columns_for, load_functions
from common.roles import Role
from options import model_config, refusals


def names_of(models: list[str]) -> list[str]:
    """The last names of the policies' folders.

    Raises:
        ValueError: two of them are the same.
    """
    names = [Path(model).name for model in models]
    if len(set(names)) < len(names):
        raise ValueError(f"--models {' '.join(models)}: their last names must differ, because files are named by them")
    return names


def check_model(arguments: RolloutArguments, ds_config: dict) -> None:
    """Refuse a model that is not there or could not answer, before any model does.

    Raises:
        ValueError, OSError: names what is wrong.
    """
    start = find_start(arguments.model)
    tokens, config = arguments.max_prompt_tokens + arguments.max_new_tokens, model_config("--models", start.base)
    check_length(tokens, config, "--max_prompt_tokens and --max_new_tokens")
    load_tokenizer(arguments.model)
    lora_config(arguments, ds_config, start)


def answers_of(arguments: RolloutArguments, ds_config: dict) -> tuple[dict[str, float], list[dict]]:
    """(means by function, one dict a prompt in their order); on every rank together."""
    start, tokenizer = find_start(arguments.model), load_tokenizer(arguments.model)
    lora, functions = lora_config(arguments, ds_config, start), load_functions(arguments)
    with refusals():
        prompts = load_prompts(arguments, arguments.data, tokenizer, columns_for(functions))
    # Weights are stored as the codes that training would send: the same numbers. An adapter is merged before that.
    stored = frozen_ds_config(ds_config, None)
    merges = lora is None and start.adapter is not None
    engine = make_frozen_engine(load_policy(start, ds_config if merges else stored, lora), stored)
    means, rows = evaluate(
        Role(engine, POLICY),
        tokenizer,
        prompts,
        Rewards(arguments, functions),
        arguments.max_new_tokens,
        arguments.eval_batch,
    )
    engine.destroy()
    return means, [{**columns, **row} for columns, row in zip(prompts.columns, rows, strict=True)]


def main() -> None:
    arguments = parse(EvaluationArguments, __doc__)
    with refusals():
        names, ds_config = names_of(arguments.models), read_ds_config(arguments)
        load_functions(arguments)
        for model in arguments.models:
            check_model(arguments.of(model), ds_config)
    zeropp_fp8.enable()  # acts where the ds_config asks for it
    join_the_other_ranks()
    seed_everything(0)
    folder = Path(arguments.out)
    for name, model in zip(names, arguments.models):
        means, rows = answers_of(arguments.of(model), ds_config)
        gc.collect()  # an engine is full of circles, and the next model is loaded before Python looks for them
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
            said = ", ".join(f"{function} {mean:.4f}" for function, mean in means.items())
            print(f"{model}: {said} of {len(rows)} prompts", flush=True)
    shut_down()


if __name__ == "__main__":
    main()
