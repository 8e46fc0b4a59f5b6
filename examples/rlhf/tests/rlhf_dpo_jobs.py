"""Jobs about DPO: the log-probabilities of its reference, step by step."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from ranks import attempt, printed
from rlhf_jobs import arguments_of, config_of
from running import switch


def references(folder, model, rows, micro, **given):
    """Log-probabilities of the reference: computed, read again, made again for other rows, and refused."""
    from common import reference
    from common.engines import make_engine
    from common.models import find_start, load_policy, load_tokenizer, lora_config, without_dropout
    from common.roles import Role
    from common.supervised import load_items
    from common.tokens import encode_preference

    switch(True)
    config = config_of(None, {"train_micro_batch_size_per_gpu": micro})
    arguments = arguments_of("DPOArguments", folder, config, model=model, max_tokens=16, **given)
    start, tokenizer = find_start(model), load_tokenizer(model)
    lora = lora_config(arguments, config, start)
    policy = load_policy(start, config, lora)
    without_dropout(policy)
    policy = Role(make_engine(policy, config, arguments, 1), None if lora is None else "policy")
    pairs = load_items(arguments, [rows], "preference", encode_preference, tokenizer)
    path = Path(folder, "deep", "reference.safetensors")

    def made_of(pairs):
        """(values, what rank 0 said of it)"""
        before = len(printed())
        key = reference.key_of(pairs, start, config, lora is not None)
        made = reference.with_reference(path, key, policy, pairs, arguments.seed, tokenizer.pad_token_id)
        assert [{**pair, "reference": None} for pair in made] == [{**pair, "reference": None} for pair in pairs]
        return [pair["reference"] for pair in made], printed()[before:]

    log = {"pairs": pairs, "first": made_of(pairs), "again": made_of(pairs), "fewer": made_of(pairs[:3])}
    dist.barrier()
    log["files"] = sorted(each.name for each in path.parent.iterdir())
    if dist.get_rank() == 0:
        path.write_bytes(b"nonsense")
    dist.barrier()
    log["broken"] = attempt(lambda: made_of(pairs))
    log["nowhere"] = attempt(
        lambda: reference.with_reference(Path(folder, "ds_config0.json", "r"), "k", policy, pairs[:1], 0, 0)
    )
    return log
