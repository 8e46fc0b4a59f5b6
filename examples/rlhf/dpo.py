"""Direct preference optimization: a policy learns from preferences themselves, without a reward model or sampling.

    deepspeed examples/rlhf/dpo.py --deepspeed_config ds_configs/qlora.json --model runs/sft --data ROWS --out runs/dpo

The implicit reward of a response is beta times its log-ratio to the reference, which is the policy as it starts; the
chosen response's is to be above the rejected one's (arXiv 2305.18290). --out then holds the policy, as an adapter or a
model.
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
from common.arguments import DPOArguments, check_preferences, check_sequences, parse, read_ds_config
from common.engines import make_engine
from common.losses import dpo_loss
from common.models import (
    POLICY,
    find_start,
    load_policy,
    load_tokenizer,
    lora_config,
    recompute_activations,
    save_model,
    without_dropout,
)
from common.reference import key_of, pair_logprobs, with_reference
from common.roles import Role
from common.samples import Samples
from common.state import Checkpoints
from common.supervised import fit, load_items, steps_of
from common.tokens import encode_preference
from options import model_config, refusals


def main() -> None:
    arguments = parse(DPOArguments, __doc__)
    with refusals():
        check_preferences(arguments)
        ds_config, start = read_ds_config(arguments), find_start(arguments.model)
        check_sequences(arguments, model_config("--model", start.base))
        tokenizer, lora = load_tokenizer(arguments.model), lora_config(arguments, ds_config, start)
    zeropp_fp8.enable()  # acts where the ds_config asks for it
    join_the_other_ranks()
    seed_everything(arguments.seed)
    keys, pad = {}, tokenizer.pad_token_id
    with refusals():
        parts = {
            name: load_items(arguments, sources, "preference", encode_preference, tokenizer) if sources else []
            for name, sources in (("train", arguments.data), ("eval", arguments.eval_data))
        }
        if not arguments.reference_free:
            keys = {name: key_of(pairs, start, ds_config, lora is not None) for name, pairs in parts.items() if pairs}
        fixed = {"the number of rows": len(parts["train"]), "the hash of rows and model": keys.get("train")}
        checkpoints = Checkpoints(arguments, ds_config, fixed)

    model = load_policy(start, ds_config, lora)
    without_dropout(model)  # the log-ratios would hold its noise
    if arguments.gradient_checkpointing:
        recompute_activations(model)
    engine = make_engine(model, ds_config, arguments, steps_of(arguments, ds_config, len(parts["train"])))
    policy = Role(engine, None if lora is None else POLICY)
    for name, key in keys.items():
        path = Path(arguments.reference_cache or arguments.out, f"reference_{name}.safetensors")
        engine.train(name == "train")  # FP8 layers may evaluate in other numbers than they train in
        parts[name] = with_reference(path, key, policy, parts[name], arguments.seed, pad)
    engine.train()

    def losses(micro_batches: Sequence[list]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        for pairs in micro_batches:
            logprobs, tokens = pair_logprobs(policy, pairs, pad)
            reference = None, None
            if not arguments.reference_free:
                reference = torch.tensor([pair["reference"] for pair in pairs], device=engine.device).T
            loss, figures = dpo_loss(
                *logprobs, *reference, arguments.beta, arguments.label_smoothing, arguments.loss, *tokens
            )
            chosen, rejected = logprobs.detach().mean(1)
            yield loss, figures | {"chosen_logprob": chosen, "rejected_logprob": rejected}

    samples = Samples(arguments, policy, tokenizer, [pair["chosen"] for pair in parts["eval"] or parts["train"]])
    figures = fit(arguments, ds_config, engine, losses, parts["train"], parts["eval"], checkpoints, samples)
    save_model(engine.module, arguments.out, tokenizer, policy.adapter)
    if dist.get_rank() == 0:
        print(f"{arguments.out}: {figures}", flush=True)
    shut_down(engine)


if __name__ == "__main__":
    main()
