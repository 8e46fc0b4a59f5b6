"""Train a reward model on preferences: the chosen response's score is to be above the rejected one's.

    deepspeed examples/rlhf/reward.py --deepspeed_config ds_configs/qlora.json --model runs/sft --data ROWS \
        --out runs/reward

It starts from a language model (an SFT stage's folder, for example) and adds a head; --out is the --reward_model of PPO
and GRPO.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

import zeropp_fp8

sys.path.append(str(Path(__file__).resolve().parents[1]))  # examples/

from basics import join_the_other_ranks, seed_everything, shut_down
from common.arguments import RewardModelArguments, check_length, parse, read_ds_config
from common.batch import Tokens
from common.engines import make_engine
from common.losses import reward_loss
from common.models import (
    REWARD,
    find_start,
    load_scorer,
    load_tokenizer,
    lora_config,
    recompute_activations,
    save_model,
)
from common.roles import Role, scores_of
from common.state import Checkpoints
from common.supervised import fit, load_items, steps_of
from common.tokens import collate_pairs, encode_preference
from options import model_config, refusals


def main() -> None:
    arguments = parse(RewardModelArguments, __doc__)
    with refusals():
        ds_config, start = read_ds_config(arguments), find_start(arguments.model)
        check_length(arguments.max_tokens, model_config("--model", start.base), "--max_tokens")
        tokenizer, lora = load_tokenizer(arguments.model), lora_config(arguments, ds_config, start)
    zeropp_fp8.enable()  # acts where the ds_config asks for it
    join_the_other_ranks()
    seed_everything(arguments.seed)
    with refusals():
        items, held_out = (
            load_items(arguments, sources, "preference", encode_preference, tokenizer) if sources else []
            for sources in (arguments.data, arguments.eval_data)
        )
        checkpoints = Checkpoints(arguments, ds_config, {"the number of rows": len(items)})

    model = load_scorer(start, ds_config, lora, trained=REWARD)
    if arguments.gradient_checkpointing:
        recompute_activations(model)
    engine = make_engine(model, ds_config, arguments, steps_of(arguments, ds_config, len(items)))
    reward = Role(engine, REWARD)

    def losses(micro_batches: Sequence[list]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        for pairs in micro_batches:
            batch = collate_pairs(pairs, tokenizer.pad_token_id)
            margin = batch.pop("margin", None)
            chosen, rejected = scores_of(reward, Tokens(**batch).to(engine.device)).chunk(2)
            yield reward_loss(
                chosen, rejected, None if margin is None else margin.to(engine.device), arguments.centering
            )

    figures = fit(arguments, ds_config, engine, losses, items, held_out, checkpoints)
    save_model(model, arguments.out, tokenizer, REWARD)
    if dist.get_rank() == 0:
        print(f"{arguments.out}: {figures}", flush=True)
    shut_down(engine)


if __name__ == "__main__":
    main()
