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
from transformers import AutoConfig

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


def main() -> None:
    arguments = parse(RewardModelArguments, __doc__)
    ds_config = read_ds_config(arguments)
    zeropp_fp8.enable()  # acts where the ds_config asks for it
    join_the_other_ranks()
    seed_everything(arguments.seed)

    start, tokenizer = find_start(arguments.model), load_tokenizer(arguments.model)
    lora = lora_config(arguments, ds_config, start)
    check_length(arguments.max_tokens, AutoConfig.from_pretrained(start.base), "--max_tokens")
    items = load_items(arguments, arguments.data, "preference", encode_preference, tokenizer)
    held_out = arguments.eval_data and load_items(
        arguments, arguments.eval_data, "preference", encode_preference, tokenizer
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
