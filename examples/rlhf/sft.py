"""Supervised fine-tuning: learn the completions of prompts, or the assistant's turns of conversations.

    deepspeed examples/rlhf/sft.py --deepspeed_config ds_configs/qlora.json --model MODEL --data ROWS --out runs/sft

With recipe qlora it trains a LoRA adapter over quantized weights, with the others all weights. --out then holds what
the next stage takes as its --model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import zeropp_fp8

sys.path.append(str(Path(__file__).resolve().parents[1]))  # examples/

from basics import join_the_other_ranks, seed_everything, shut_down
from common.arguments import SFTArguments, check_sequences, parse, read_ds_config
from common.engines import make_engine
from common.losses import sft_loss, token_logprobs, tokens_a_micro_batch
from common.models import (
    POLICY,
    find_start,
    load_policy,
    load_tokenizer,
    lora_config,
    recompute_activations,
    save_model,
)
from common.roles import Role
from common.samples import Samples
from common.state import Checkpoints
from common.supervised import fit, load_items, steps_of
from common.tokens import collate, encode_sft
from options import model_config, refusals


def main() -> None:
    arguments = parse(SFTArguments, __doc__)
    with refusals():
        ds_config, start = read_ds_config(arguments), find_start(arguments.model)
        check_sequences(arguments, model_config("--model", start.base))
        tokenizer, lora = load_tokenizer(arguments.model), lora_config(arguments, ds_config, start)
    zeropp_fp8.enable()  # acts where the ds_config asks for it
    join_the_other_ranks()
    seed_everything(arguments.seed)
    with refusals():
        items, held_out = (
            load_items(arguments, sources, "sft", encode_sft, tokenizer) if sources else []
            for sources in (arguments.data, arguments.eval_data)
        )
        checkpoints = Checkpoints(arguments, ds_config, {"the number of rows": len(items)})

    model = load_policy(start, ds_config, lora)
    if arguments.gradient_checkpointing:
        recompute_activations(model)
    engine = make_engine(model, ds_config, arguments, steps_of(arguments, ds_config, len(items)))

    def losses(micro_batches: Sequence[list]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        batches = [collate(items, tokenizer.pad_token_id) for items in micro_batches]
        # Of what is held out each rank says the mean over its own tokens.
        group = dist.group.WORLD if torch.is_grad_enabled() else None
        tokens = tokens_a_micro_batch([batch["response_mask"].to(engine.device) for batch in batches], group)
        for batch in batches:
            ids, attention, mask = (tensor.to(engine.device) for tensor in batch.values())
            logits = engine(input_ids=ids, attention_mask=attention, use_cache=False).logits
            yield sft_loss(token_logprobs(logits, ids), mask, tokens)

    policy = Role(engine, None if lora is None else POLICY)
    samples = Samples(arguments, policy, tokenizer, held_out or items)
    figures = fit(arguments, ds_config, engine, losses, items, held_out, checkpoints, samples)
    save_model(engine.module, arguments.out, tokenizer, POLICY)
    if dist.get_rank() == 0:
        print(f"{arguments.out}: {figures}", flush=True)
    shut_down(engine)


if __name__ == "__main__":
    main()
