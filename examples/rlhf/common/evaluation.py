"""How a policy answers held-out prompts, greedily, in the eyes of reward functions."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch.distributed as dist

from common.monitor import Monitor
from common.prompts import Prompts
from common.rewards import Rewards
from common.roles import Role
from common.rollout import Sampling, roll_out


def evaluate(
    policy: Role, tokenizer, prompts: Prompts, rewards: Rewards, max_new_tokens: int, batch: int
) -> tuple[dict[str, float], list[dict]]:
    """(means by name, one dict a prompt, in order: prompt, completion, what each function says of it).

    The prompts are dealt to the ranks; all of them return the same. Reward models are not asked.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    sampling, answered = Sampling(max_new_tokens, greedy=True), []
    for first in range(0, math.ceil(len(prompts) / (batch * world))):
        # Every rank generates as often as the others: those whose prompts have run out answer old ones again.
        dealt = range((first * world + rank) * batch, (first * world + rank + 1) * batch)
        part = prompts.rows([index % len(prompts) for index in dealt])
        rollout = roll_out(policy, tokenizer, part.ids, sampling, seed=0)
        said = rewards.of_functions(rollout.texts, part.columns, part.texts)
        for i, index in enumerate(dealt):
            if index < len(prompts):
                values = {name: values[i].item() for name, values in said.items()}
                answered.append((index, {"prompt": part.texts[i], "completion": rollout.texts[i], **values}))
    gathered = [None] * world
    dist.all_gather_object(gathered, answered)
    rows = [row for _, row in sorted((pair for part in gathered for pair in part), key=lambda pair: pair[0])]
    said = {name: [row[name] for row in rows if not math.isnan(row[name])] for name in rewards.functions}
    return {name: math.fsum(values) / max(1, len(values)) for name, values in said.items()}, rows


def report(
    arguments, policy: Role, tokenizer, prompts: Prompts, rewards: Rewards, monitor: Monitor, step: int
) -> dict[str, float]:
    """Evaluate, log the means, and write the answers to OUT/eval_step{step}.jsonl, to be compared between steps."""
    means, rows = evaluate(policy, tokenizer, prompts, rewards, arguments.max_new_tokens, arguments.eval_batch)
    monitor.log(step, **{f"eval_{name}": mean for name, mean in means.items()})
    if dist.get_rank() == 0:
        path = Path(arguments.out, f"eval_step{step}.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return means
